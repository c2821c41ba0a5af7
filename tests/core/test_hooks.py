"""Hooks: any number of plugins, none of which can harm another or a call that no hook watches."""

from __future__ import annotations

import logging

import pluggy
import pytest

from polyattn import AttentionSpec, BackendLoadError, ConfigError, check_servable
from polyattn.registry import discovery, hooks

hookimpl = pluggy.HookimplMarker("polyattn")

HOOK = "import pluggy\nhookimpl = pluggy.HookimplMarker('polyattn')\n"


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def polyattn_backend_loaded(self, name):
        self.seen.append(name)


@pytest.fixture
def recorder():
    plugin = Recorder()
    hooks.register(plugin, "recorder")
    yield plugin
    hooks.unregister("recorder")


def reload():
    discovery.rescan()
    hooks.refresh()


def info(name):
    return next(info for info in hooks.infos() if info.name == name)


def test_without_a_plugin_no_hook_is_installed_and_asking_loads_nothing_again(site):
    reload()
    assert not any(map(hooks.installed, hooks.NAMES))
    first = hooks._looks[0][0]
    assert not hooks.installed("polyattn_prepared")
    assert hooks._looks[0][0] is first


def test_a_plugin_registered_in_code_is_called_with_the_arguments_that_it_names(recorder):
    assert hooks.installed("polyattn_backend_loaded")
    assert not hooks.installed("polyattn_prepared")
    hooks.call("polyattn_backend_loaded", name="acme", backend=object())
    assert recorder.seen == ["acme"]


def test_an_unregistered_plugin_is_no_longer_called():
    plugin = Recorder()
    hooks.register(plugin, "recorder")
    hooks.unregister("recorder")
    assert not hooks.installed("polyattn_backend_loaded")


def test_a_name_is_registered_once(recorder):
    with pytest.raises(BackendLoadError, match="there is a hook plugin of that name"):
        hooks.register(Recorder(), "recorder")


def test_an_installed_plugin_is_loaded_at_the_first_question(site, make_dist):
    source = HOOK + "calls = []\n@hookimpl\ndef polyattn_prepared(prepared):\n    calls.append(prepared)\n"
    make_dist("tracer", hooks={"trace": "tracer_module"}, modules={"tracer_module.py": source}).unpack(site)
    reload()
    assert info("trace").status == "available"
    assert hooks.installed("polyattn_prepared")
    assert info("trace").status == "loaded"
    hooks.call("polyattn_prepared", prepared="it")
    import tracer_module

    assert tracer_module.calls == ["it"]


def test_an_uninstalled_plugin_is_gone_after_a_refresh(site, make_dist):
    source = HOOK + "@hookimpl\ndef polyattn_prepared():\n    pass\n"
    make_dist("tracer", hooks={"trace": "tracer_gone"}, modules={"tracer_gone.py": source}).unpack(site)
    reload()
    assert hooks.installed("polyattn_prepared")
    (site / "tracer-1.0.dist-info" / "entry_points.txt").unlink()
    reload()
    assert not hooks.installed("polyattn_prepared")


def test_two_entry_points_that_lead_to_one_object_call_it_once(site, make_dist):
    source = HOOK + "calls = []\n@hookimpl\ndef polyattn_prepared():\n    calls.append(1)\n"
    make_dist(
        "tracer", hooks={"one": "tracer_twice", "two": "tracer_twice"}, modules={"tracer_twice.py": source}
    ).unpack(site)
    reload()
    assert hooks.installed("polyattn_prepared")
    hooks.call("polyattn_prepared", prepared=None)
    import tracer_twice

    assert tracer_twice.calls == [1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no"),
        (
            HOOK + "@hookimpl\ndef polyattn_prepard():\n    pass\n",
            "no hook polyattn_prepard, did you mean polyattn_prepared?",
        ),
        (HOOK + "@hookimpl\ndef polyattn_prepared(layout):\n    pass\n", "Argument(s) {'layout'}"),
        ("def polyattn_prepared(prepared):\n    pass\n", 'no function marked with pluggy.HookimplMarker("polyattn")'),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_faulty_plugin_is_left_out_and_named_and_harms_no_other(source, said, site, make_dist, caplog):
    good = HOOK + "@hookimpl\ndef polyattn_prepared():\n    pass\n"
    make_dist("goodhooks", hooks={"good": "good_hooks"}, modules={"good_hooks.py": good}).unpack(site)
    make_dist("badhooks", "3.1", hooks={"bad": "bad_hooks"}, modules={"bad_hooks.py": source}).unpack(site)
    reload()
    with caplog.at_level(logging.WARNING, "polyattn"):
        assert hooks.installed("polyattn_prepared")
        assert not hooks.installed("polyattn_select_backend")
    assert info("bad").status == "broken"
    assert said in info("bad").error
    assert "badhooks 3.1" in info("bad").error
    assert info("good").status == "loaded"
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_a_hook_of_a_later_version_may_be_marked_optional():
    class Later(Recorder):
        @pluggy.HookimplMarker("polyattn")(optionalhook=True)
        def polyattn_of_tomorrow(self, anything):
            pass

    hooks.register(Later(), "later")
    hooks.unregister("later")


def test_the_first_policy_that_answers_decides():
    class Silent:
        @hookimpl
        def polyattn_select_backend(self):
            return None

    class Site:
        @hookimpl
        def polyattn_select_backend(self, candidates):
            return candidates[-1]

    hooks.register(Site(), "site")
    hooks.register(Silent(), "silent")
    try:
        chosen = hooks.call("polyattn_select_backend", layout=None, request=None, candidates=("a", "b"))
    finally:
        hooks.unregister("site")
        hooks.unregister("silent")
    assert chosen == "b"


def test_an_observer_that_fails_is_logged_and_stops_nothing(caplog):
    class Clumsy:
        @hookimpl
        def polyattn_prepared(self):
            raise ZeroDivisionError("mine")

    hooks.register(Clumsy(), "clumsy")
    try:
        assert hooks.call("polyattn_prepared", prepared=None) == []
    finally:
        hooks.unregister("clumsy")
    (record,) = caplog.records
    assert "polyattn_prepared" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_a_policy_that_fails_is_not_ignored():
    class Clumsy:
        @hookimpl
        def polyattn_select_backend(self):
            raise ZeroDivisionError("mine")

    hooks.register(Clumsy(), "clumsy")
    try:
        with pytest.raises(ZeroDivisionError):
            hooks.call("polyattn_select_backend", layout=None, request=None, candidates=())
    finally:
        hooks.unregister("clumsy")


def test_loading_a_backend_tells_the_hook_once(site, make_dist, isolated_registry, recorder):
    make_dist.backend("acme-attention", "acme").unpack(site)
    isolated_registry.refresh()
    isolated_registry.get("acme")
    isolated_registry.get("acme")
    assert recorder.seen == ["acme"]


def test_importing_polyattn_and_listing_load_no_hook(run_python, tmp_path, make_dist):
    folder = make_dist("tracer", hooks={"trace": "tracer"}, modules={"tracer.py": "raise SystemExit('loaded')"}).unpack(
        tmp_path / "site"
    )
    run_python("import polyattn; polyattn.backends.names(); polyattn.backends.infos()", path=[folder])


def test_a_hook_plugin_that_asks_about_hooks_while_it_is_imported_works(site, make_dist):
    source = (
        "from polyattn.registry import hooks\nhooks.installed('polyattn_prepared')\n"
        + HOOK
        + "@hookimpl\ndef polyattn_prepared():\n    pass\n"
    )
    make_dist("curious", hooks={"curious": "curious_hooks"}, modules={"curious_hooks.py": source}).unpack(site)
    reload()
    assert hooks.installed("polyattn_prepared")
    assert [name for name in hooks.NAMES if hooks.installed(name)] == ["polyattn_prepared"]


def test_an_observer_that_raises_system_exit_stops_nothing(caplog):
    class Leaves:
        @hookimpl
        def polyattn_prepared(self, prepared):
            raise SystemExit(3)

    hooks.register(Leaves(), "leaves")
    try:
        assert hooks.call("polyattn_prepared", prepared=None) == []
    finally:
        hooks.unregister("leaves")
    assert "an implementation of the hook polyattn_prepared failed" in caplog.text


def test_an_answer_about_serving_that_is_not_reasons_is_refused(isolated_registry):
    spec = AttentionSpec(
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        v_head_dim=8,
        dropout=0.0,
        **dict.fromkeys(("rope", "qk_norm", "window", "softcap", "scale")),
        **dict.fromkeys(("bias", "output_bias", "sinks"), False),
    )

    class Answers:
        @hookimpl
        def polyattn_check_servable(self, spec, target):
            return "no"

    hooks.register(Answers(), "answers")
    try:
        with pytest.raises(ConfigError, match=r"must return a tuple of Reason, or None, got 'no'"):
            check_servable(spec, "acme_engine")
    finally:
        hooks.unregister("answers")
