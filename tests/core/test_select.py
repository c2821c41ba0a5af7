"""Who is chosen, and what is said about the others."""

import ast
import contextlib
import copy
import gc
import logging
import pickle
import weakref

import pluggy
import pytest
import torch

import polyattn
from polyattn import (
    AttentionInputError,
    AttentionRequest,
    AttentionResult,
    BackendBase,
    ConfigError,
    GroupedQueryAttention,
    LayoutError,
    MaskLayout,
    PolyattnError,
    PreparedAttention,
    Reason,
    UnsupportedAttentionError,
    attention,
    explain,
)
from polyattn.registry import hooks
from polyattn.select import prepare, resolve_backend
from python_calls import python_calls


def request_of(**fields):
    q = torch.zeros(1, 2, 4, 8)
    return AttentionRequest.of(q, q, q, **fields)


class Fancy(BackendBase):
    """Outputs zeros, and says how much it wants to."""

    name = "fancy"
    abilities = frozenset({"float32", "causal"})

    def preference(self, layout, request):
        return 1000

    def plan(self, layout, request):
        return None

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return AttentionResult(torch.zeros_like(q))


def test_auto_takes_the_highest_preference_among_those_that_can():
    with polyattn.backends.override("fancy", Fancy()):
        assert explain(MaskLayout.causal(4), request_of()).chosen == "fancy"
        decision = explain(MaskLayout.full(4), request_of())
    assert decision.chosen == "sdpa"
    assert decision.candidates["sdpa"] == ()
    assert [reason.feature for reason in decision.candidates["fancy"]] == ["full"]
    assert decision.because.startswith("highest preference")


def test_auto_gives_the_prepared_attention_of_the_chosen_backend():
    prepared = resolve_backend("auto").prepare(MaskLayout.causal(4), request_of(softcap=2.0))
    assert prepared.backend.name == "eager"


def refusal_of(backend, **fields):
    with pytest.raises(UnsupportedAttentionError) as caught:
        prepare(backend, MaskLayout.causal(4), request_of(**fields))
    return caught.value


def test_a_refusal_names_every_feature_and_which_loaded_backend_can():
    polyattn.backends.get("eager")
    refusal = refusal_of(polyattn.backends.get("sdpa"), softcap=2.0, dropout_p=0.1, training=True, needs_lse=True)
    assert refusal.backend == "sdpa"
    assert [reason.feature for reason in refusal.reasons] == ["softcap", "lse"]
    assert refusal.alternatives[0] == "eager"
    assert "softcap: got softcap 2.0, need a backend with the ability 'softcap'" in str(refusal)
    assert "installed backends that can: eager" in str(refusal)


REFUSAL = """
import sys, torch, polyattn
from polyattn import AttentionRequest, MaskLayout, UnsupportedAttentionError
{before}
q = torch.zeros(1, 2, 4, 8)
layout = MaskLayout.causal(4)
ask = {{
    "attention": lambda: polyattn.attention(q, q, q, layout, backend="sdpa", softcap=2.0),
    "scope": lambda: polyattn.AttentionScope(layout).prepare("sdpa", AttentionRequest.of(q, q, q, softcap=2.0)),
}}["{asked}"]
try:
    ask()
except UnsupportedAttentionError as refusal:
    print(str(refusal).splitlines()[2:])
    assert refusal.not_asked == {not_asked}, refusal.not_asked
    assert refusal.alternatives == {alternatives}, refusal.alternatives
plugins = {{module.partition(".")[0] for module in sys.modules if module.startswith("polyattn_")}}
assert plugins == {{"polyattn_sdpa", *{loaded}}}, plugins
"""
ASKED = "`polyattn explain` or explain(layout, request) asks them"


@pytest.mark.parametrize("asked", ["attention", "scope"])
def test_a_refusal_imports_no_other_plugin_and_says_who_was_not_asked(asked, run_python):
    code = REFUSAL.format(
        asked=asked, before="", alternatives=(), not_asked=("eager", "fa", "flex_attention"), loaded=()
    )
    (said,) = ast.literal_eval(run_python(code).stdout)
    assert said.strip() == f"not asked, because they are not loaded: eager, fa, flex_attention; {ASKED}"


def test_a_refusal_asks_the_loaded_backends_and_not_those_that_are_forbidden(run_python):
    code = REFUSAL.format(
        asked="attention",
        before="polyattn.backends.get('eager'); polyattn.backends.disable(['fa'])",
        alternatives=("eager",),
        not_asked=("flex_attention",),
        loaded=("polyattn_eager",),
    )
    can, others = ast.literal_eval(run_python(code).stdout)
    assert can.strip() == "installed backends that can: eager"
    assert others.strip() == f"not asked, because they are not loaded: flex_attention; {ASKED}"


def test_a_backend_by_itself_knows_no_other_and_its_refusal_survives_pickling_when_completed():
    sdpa = polyattn.backends.get("sdpa")
    with pytest.raises(UnsupportedAttentionError) as caught:
        sdpa.prepare(MaskLayout.causal(4), request_of(softcap=2.0))
    assert caught.value.alternatives is None
    assert len(str(caught.value).splitlines()) == 2
    told = UnsupportedAttentionError("sdpa", caught.value.reasons, ("eager",), ("fa",))
    again = pickle.loads(pickle.dumps(told))
    assert (again.alternatives, again.not_asked, str(again)) == (("eager",), ("fa",), str(told))


def test_when_none_can_auto_lists_everybodys_reasons():
    with contextlib.ExitStack() as stack:
        for name in polyattn.backends.names():
            stack.enter_context(polyattn.backends.override(name, _refuser(name)))
        with pytest.raises(UnsupportedAttentionError) as caught:
            resolve_backend("auto").prepare(MaskLayout.causal(4), request_of())
    text = str(caught.value)
    assert "[eager]" in text
    assert "[sdpa]" in text
    assert "no installed backend can" in text


def _refuser(own_name):
    class Refuser(Fancy):
        name = own_name
        abilities = frozenset()

    return Refuser()


def test_a_backend_that_knows_nobody_gets_the_alternatives_from_core():
    class Loner:
        name = "loner"
        api_version = 1

        def unsupported(self, layout, request):
            return (Reason("never", "full", "anything", "nothing"),)

        def prepare(self, layout, request):
            raise UnsupportedAttentionError(self.name, self.unsupported(layout, request))

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            raise AssertionError

    for name in ("eager", "sdpa"):
        polyattn.backends.get(name)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedAttentionError) as caught:
        polyattn.attention(q, q, q, MaskLayout.full(4), backend=Loner())
    assert set(caught.value.alternatives) >= {"eager", "sdpa"}


def test_a_plugin_that_does_not_load_is_a_candidate_with_its_cause():
    polyattn.backends.register("broken_thing", "no_such_module_anywhere:Backend")
    try:
        decision = explain(MaskLayout.full(4), request_of())
    finally:
        polyattn.backends.unregister("broken_thing")
    (reason,) = decision.candidates["broken_thing"]
    assert reason.code == "not_loadable"
    assert "no_such_module_anywhere" in reason.got
    assert decision.chosen == "sdpa"


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("preference", ZeroDivisionError("mine"), "preference: ZeroDivisionError: mine"),
        ("preference", "much", "preference: TypeError"),
        ("unsupported", OSError("libkernel.so"), "unsupported: OSError: libkernel.so"),
        ("unsupported", None, "unsupported: TypeError: must return a tuple of Reason, got None"),
        ("unsupported", ("no",), "unsupported: TypeError: must return a tuple of Reason, got ('no',)"),
    ],
)
def test_a_backend_that_fails_when_asked_loses_nobody_but_itself(method, answer, said):
    def fails(self, layout, request):
        if isinstance(answer, Exception):
            raise answer
        return answer

    clumsy = type("Clumsy", (Fancy,), {method: fails})()
    with polyattn.backends.override("fancy", clumsy):
        decision = explain(MaskLayout.causal(4), request_of())
        prepared = resolve_backend("auto").prepare(MaskLayout.causal(4), request_of())
    (reason,) = decision.candidates["fancy"]
    assert (reason.code, reason.feature) == ("fails_when_asked", "plugin")
    assert said in reason.got
    assert decision.chosen == prepared.backend.name == "sdpa"


def test_the_decision_reads_as_text_and_as_json():
    decision = explain(MaskLayout.causal(4), request_of(softcap=1.0))
    assert "chosen: eager" in str(decision)
    assert "sdpa: cannot" in str(decision)
    assert decision.to_dict()["candidates"]["sdpa"][0]["feature"] == "softcap"


def test_auto_says_once_what_it_chose(caplog):
    with caplog.at_level(logging.INFO, logger="polyattn"):
        for _ in range(2):
            resolve_backend("auto").prepare(MaskLayout.causal(4), request_of(softcap=123.5))
    lines = [record.message for record in caplog.records if "chosen: eager" in record.message]
    assert len(lines) == 1
    assert "softcap 123.5" in lines[0]


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_names_are_looked_up_outside_compiled_functions(backend):
    q = torch.zeros(1, 2, 4, 8)
    compiled = torch.compile(
        lambda q, layout: polyattn.attention(q, q, q, layout, backend=backend).output, backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"look it up before: polyattn.backends.get"):
        compiled(q, MaskLayout.causal(4))


def test_options_for_auto_are_refused():
    with pytest.raises(ConfigError, match="backend_options must be empty with attn_backend 'auto'"):
        resolve_backend("auto", {"x": 1})


def test_a_device_is_refused_before_dtypes_are_looked_at():
    class Elsewhere(Fancy):
        def device_reasons(self, device):
            return (Reason("no_device", "device", str(device), "a GPU"),)

    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedAttentionError, match="device: got cpu, need a GPU"):
        polyattn.attention(q, q.bfloat16(), q, MaskLayout.full(4), backend=Elsewhere())


def test_explain_takes_a_layout_and_a_request():
    with pytest.raises(AttentionInputError, match="request must be an AttentionRequest, got NoneType"):
        polyattn.explain(MaskLayout.causal(4), None)
    with pytest.raises(LayoutError, match="layout must be a MaskLayout, got NoneType"):
        polyattn.explain(None, None)


@pytest.mark.parametrize("value", [None, 3, ["sdpa"]])
def test_what_is_neither_a_name_nor_a_backend_is_refused(value):
    with pytest.raises(ConfigError, match=r"backend must be a name .* or a backend object, got "):
        resolve_backend(value)


class Asked(Fancy):
    """Counts how often it is asked."""

    def __init__(self):
        super().__init__()
        self.questions = 0

    def unsupported(self, layout, request):
        self.questions += 1
        return super().unsupported(layout, request)

    def prepare(self, layout, request):
        return PreparedAttention(self, layout, request)


def test_auto_asks_once_about_a_layout_and_equal_requests():
    layout, asked = MaskLayout.causal(4), Asked()
    with polyattn.backends.override("fancy", asked):
        for _ in range(3):
            assert resolve_backend("auto").prepare(layout, request_of()).backend is asked
        assert asked.questions == 1
        resolve_backend("auto").prepare(layout, request_of(scale=2.0))
        resolve_backend("auto").prepare(MaskLayout.causal(4), request_of())
        assert asked.questions == 3
        explain(layout, request_of())
        assert asked.questions == 4


@pytest.mark.parametrize("change", ["register", "disable", "environment", "policy", "refresh"])
def test_auto_decides_anew_when_what_it_may_choose_from_has_changed(change, monkeypatch):
    layout, asked, other = MaskLayout.causal(4), Asked(), Asked()

    def chosen():
        return resolve_backend("auto").prepare(layout, request_of()).backend

    class Policy:
        @pluggy.HookimplMarker("polyattn")
        def polyattn_select_backend(self):
            return "eager"

    with contextlib.ExitStack() as after, polyattn.backends.override("fancy", asked):
        assert chosen() is asked
        if change == "register":
            with polyattn.backends.override("fancy", other):
                assert chosen() is other
        elif change == "disable":
            after.callback(polyattn.backends.disable, [])
            polyattn.backends.disable(["fancy"])
            assert chosen().name == "sdpa"
            polyattn.backends.disable([])
        elif change == "environment":
            monkeypatch.setenv("POLYATTN_DISABLE", "fancy")
            assert chosen().name == "sdpa"
            monkeypatch.delenv("POLYATTN_DISABLE")
        elif change == "policy":
            hooks.register(Policy(), "policy")
            try:
                assert chosen().name == "eager"
            finally:
                hooks.unregister("policy")
        else:
            polyattn.backends.refresh()
            before = asked.questions
            chosen()
            assert asked.questions == before + 1
        assert chosen() is asked
    assert chosen().name == "sdpa"


def test_auto_does_not_remember_a_decision_in_which_a_backend_failed_to_answer():
    class Recovers(Asked):
        def unsupported(self, layout, request):
            if not self.questions:
                self.questions += 1
                raise OSError("busy")
            return super().unsupported(layout, request)

    layout = MaskLayout.causal(4)
    with polyattn.backends.override("fancy", Recovers()):
        names = [resolve_backend("auto").prepare(layout, request_of()).backend.name for _ in range(2)]
    assert names == ["sdpa", "fancy"]


@pytest.mark.parametrize(("backend", "most"), [("sdpa", 80), ("auto", 90)])
def test_making_a_prepared_attention_over_a_packed_layout_takes_few_calls(backend, most):
    q, layout = torch.zeros(1, 4, 64, 16), MaskLayout.packed([16, 48])
    request = AttentionRequest.of(q, q, q)
    ready = polyattn.backends.get("sdpa").prepare(layout, request)

    def whole():
        return polyattn.attention(q, q, q, layout, backend=backend)

    for work in (whole, lambda: ready(q, q, q)):
        work()  # what is loaded and decided once
    assert len(python_calls(whole)) - len(python_calls(lambda: ready(q, q, q))) <= most


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_auto_is_one_object_wherever_it_is_copied_to(again):
    auto, layout = resolve_backend("auto"), MaskLayout.causal(4)
    auto.prepare(layout, request_of())
    assert again(auto) is auto


def test_auto_keeps_no_layout_alive():
    layout = MaskLayout.causal(4)
    resolve_backend("auto").prepare(layout, request_of())
    alive = weakref.ref(layout)
    del layout
    gc.collect()
    assert alive() is None


class FailsWhenAsked(BackendBase):
    name = "acme"

    def unsupported(self, layout, request):
        raise RuntimeError("the kernel's table is empty")


def test_a_named_backend_that_fails_when_asked_is_an_error_with_its_name_and_the_cause():
    q = torch.randn(1, 2, 4, 8)
    text = "^backend 'acme': unsupported must return its reasons, got RuntimeError: the kernel's table is empty; "
    for ask in (
        lambda: attention(q, q, q, MaskLayout.causal(4), backend=FailsWhenAsked()),
        lambda: GroupedQueryAttention(16, 2, 2, backend=FailsWhenAsked()),
    ):
        with pytest.raises(PolyattnError, match=text) as caught:
            ask()
        assert isinstance(caught.value.__cause__, RuntimeError)
