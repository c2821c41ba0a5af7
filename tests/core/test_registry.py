"""The registry's two phases, its error texts, and what a program registers itself."""

from __future__ import annotations

import logging
import pickle
import sys

import pytest

import polyattn
from polyattn import (
    BackendLoadError,
    ConfigError,
    DuplicatePluginError,
    IncompatiblePluginError,
    PluginNotFoundError,
    UnknownBackendError,
    UnknownRopeVariantError,
)
from polyattn.registry import Registry, discovery, readers, scopes
from tiny_dists import backend_source


class Fake:
    name = "fake"
    api_version = 1

    def unsupported(self, layout, request):
        return ()

    def prepare(self, layout, request):
        raise NotImplementedError

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        raise NotImplementedError


class Variant:
    name = "spiral"
    api_version = 1

    def validate(self, spec):
        pass

    def frequencies(self, spec, *, device, length=None):
        raise NotImplementedError


# Phase one


def test_names_and_info_import_neither_torch_nor_any_plugin(run_python, tmp_path, make_dist):
    folder = make_dist.backend("acme-attention", "acme", before="raise SystemExit('imported')").unpack(
        tmp_path / "site"
    )
    code = """
import sys, polyattn
assert "acme" in polyattn.backends.names()
info = polyattn.backends.info("acme")
assert (info.dist, info.version, info.status) == ("acme-attention", "1.0", "available"), info
polyattn.backends.infos(), polyattn.rope_variants.names(), polyattn.rope_variants.infos()
assert not [m for m in sys.modules if m.split(".")[0] in {"torch", "acme_attention", "polyattn_eager", "polyattn_sdpa"}]
"""
    run_python(code, path=[folder])


def test_get_imports_one_plugin_and_no_other(run_python, tmp_path, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    make_dist.backend("other-attention", "other").unpack(tmp_path / "site")
    code = """
import sys, polyattn
acme = polyattn.backends.get("acme")
assert acme is polyattn.backends.get("acme")
assert polyattn.backends.info("acme").status == "loaded"
assert "acme_attention" in sys.modules and "other_attention" not in sys.modules and "torch" not in sys.modules
"""
    run_python(code, path=[tmp_path / "site"])


@pytest.mark.parametrize("order", ["import acme_attention, polyattn", "import polyattn, acme_attention"])
def test_a_plugin_that_registers_its_own_class_at_import_works_in_either_order(order, run_python, tmp_path, make_dist):
    after = "import polyattn\npolyattn.backends.register('acme', Backend)"
    folder = make_dist.backend("acme-attention", "acme", after=after).unpack(tmp_path / "site")
    code = f"{order}\nassert polyattn.backends.get('acme').name == 'acme'\nprint(polyattn.backends.info('acme').status)"
    assert run_python(code, path=[folder]).stdout.split() == ["loaded"]


def test_first_load_is_one_log_line(site, make_dist, isolated_registry, caplog):
    make_dist.backend("acme-attention", "acme", version="2.3", module="acme_logged").unpack(site)
    isolated_registry.refresh()
    with caplog.at_level(logging.INFO, "polyattn"):
        isolated_registry.get("acme")
        isolated_registry.get("acme")
    (record,) = caplog.records
    assert record.name == "polyattn"
    assert record.getMessage() == "loaded backend 'acme': acme-attention 2.3 (acme_logged:Backend)"


def test_an_entry_point_may_name_an_instance_or_something_inside_a_class(site, make_dist, isolated_registry):
    after = "class Shelf:\n    item = Backend()\n    item.name = 'shelved'\nREADY = Backend()"
    make_dist(
        "acme-attention",
        backends={"acme": "acme_forms:READY", "shelved": "acme_forms:Shelf.item"},
        modules={"acme_forms.py": backend_source("acme", after=after)},
    ).unpack(site)
    isolated_registry.refresh()
    assert isolated_registry.get("acme") is sys.modules["acme_forms"].READY
    assert isolated_registry.get("shelved") is sys.modules["acme_forms"].Shelf.item


# Unknown names


def text_of(registry, name, kind=UnknownBackendError):
    with pytest.raises(kind) as error:
        registry.get(name)
    with pytest.raises(kind):
        registry.info(name)
    return str(error.value)


@pytest.fixture
def bare(isolated_registry, monkeypatch):
    """A registry with nothing installed."""
    empty = discovery.Scan(dict.fromkeys(discovery.GROUPS, ()))
    monkeypatch.setattr(discovery, "current", lambda: empty)
    return isolated_registry


def test_an_unknown_name_lists_what_is_installed_and_the_closest_one(bare):
    bare.register("fake", Fake())
    assert text_of(bare, "fkae") == "no backend named 'fkae' is installed; did you mean 'fake'?; installed: fake"


@pytest.mark.parametrize(
    ("name", "dist"),
    [
        ("eager", "polyattn-eager"),
        ("sdpa", "polyattn-sdpa"),
        ("flex_attention", "polyattn-flex"),
        ("fa", "polyattn-fa2"),
    ],
)
def test_a_first_party_name_comes_with_its_pip_command(name, dist, bare):
    assert (
        text_of(bare, name)
        == f"no backend named '{name}' is installed; `pip install {dist}` brings it; installed: none"
    )


def test_a_first_party_rope_variant_comes_with_its_pip_command(monkeypatch):
    empty = discovery.Scan(dict.fromkeys(discovery.GROUPS, ()))
    monkeypatch.setattr(discovery, "current", lambda: empty)
    registry = Registry(polyattn.rope_variants._contract)
    for name in ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"):
        said = text_of(registry, name, UnknownRopeVariantError)
        brings = f"`pip install polyattn-rope-{name}` brings it"
        assert said.startswith(f"no RoPE variant named '{name}' is installed; {brings}")
        assert "backend" not in said


@pytest.fixture
def without_readers(monkeypatch):
    empty = discovery.Scan(dict.fromkeys(discovery.GROUPS, ()))
    monkeypatch.setattr(discovery, "current", lambda: empty)


@pytest.mark.usefixtures("without_readers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf_rope", "no reader named 'hf_rope' is installed; `pip install polyattn-readers` brings it"),
        (
            "hf_atention",
            (
                "no reader named 'hf_atention' is installed; did you mean 'hf_attention'? "
                "`pip install polyattn-readers` brings it"
            ),
        ),
        (
            "gguf",
            "no reader named 'gguf' is installed; `pip install polyattn-readers` brings hf_rope and hf_attention",
        ),
    ],
)
def test_an_unknown_reader_names_the_distribution_that_brings_readers(name, said):
    with pytest.raises(PluginNotFoundError) as error:
        Registry(readers._contract).get(name)
    assert str(error.value) == f"{said}; installed: none"


def test_a_scope_is_called_one_in_messages():
    with pytest.raises(PluginNotFoundError, match="no scope named 'ring' is installed"):
        scopes.get("ring")
    with pytest.raises(PluginNotFoundError, match="a scope's name must be a str, got 3"):
        scopes.get(3)
    with pytest.raises(BackendLoadError, match=r"Fake is not a valid scope: .*Fake lacks scope; a scope has name"):
        Registry(scopes._contract).register("fake", Fake())


PEERS_WORDS = {
    "fa": "fa2 flash flash-attn flash_attn flash_attention flash_attention_2 Flash-Attention "
    "kernels-community/flash-attn",
    "flex_attention": "flex flexattention FlexAttention flex_attn",
    "sdpa": "SDPA spda torch pytorch native _native_flash torch_native xformers mem_efficient polyattn_sdpa "
    "polyattn-sdpa scaled_dot_product_attention",
    "eager": "math _native_math none None off vanilla naive egaer",
}


@pytest.mark.parametrize(("meant", "words"), PEERS_WORDS.items())
def test_a_name_from_elsewhere_is_never_resolved_but_answered_with_ours(meant, words, bare):
    for word in words.split():
        said = text_of(bare, word)
        assert f"did you mean '{meant}'?" in said, word
        assert "pip install" in said


@pytest.mark.parametrize("word", ["sage", "sageattention", "fa3", "flash_attention_3", "flashinfer", "triton"])
def test_a_kernel_that_this_project_has_no_plugin_for_is_not_mistaken_for_another(word, bare):
    said = text_of(bare, word)
    assert f"backend '{word}' cannot be used: this project has no plugin for that kernel" in said
    assert "did you mean" not in said


@pytest.mark.parametrize("word", ["qwertz", "sagen", "s", ""])
def test_a_name_that_is_near_to_none_gets_no_guess(word, bare):
    assert "did you mean" not in text_of(bare, word)


@pytest.mark.parametrize(("word", "meant"), [("ntk", "dynamic"), ("rope", "default"), ("llama-3", "llama3")])
def test_a_rope_variant_has_its_words_from_elsewhere_too(word, meant):
    assert f"did you mean '{meant}'?" in text_of(polyattn.rope_variants, word, UnknownRopeVariantError)


@pytest.mark.parametrize("word", ["usp_fa", "ulysses", "ring_attention"])
def test_every_word_for_sequence_parallelism_says_that_it_does_not_exist_yet(word, bare):
    assert "sequence parallelism is a scope, in polyattn-context-parallel" in text_of(bare, word)


@pytest.mark.parametrize("error", [UnknownBackendError, UnknownRopeVariantError])
def test_an_unknown_name_is_a_value_error_so_that_validators_take_it_for_one_fault_among_others(error):
    assert issubclass(error, (polyattn.PluginNotFoundError,))
    for base in (polyattn.PolyattnError, LookupError, ValueError):
        assert issubclass(error, base)
    copy = pickle.loads(pickle.dumps(error("no such name")))
    assert (type(copy), str(copy)) == (error, "no such name")


def test_usp_says_that_it_does_not_exist_yet_and_which_names_do(bare):
    bare.register("fake", Fake())
    cause = (
        "sequence parallelism is a scope, in polyattn-context-parallel; name a backend that runs inside it, and set "
        "`context_parallel: {method: auto}` beside it"
    )
    assert text_of(bare, "usp") == f"backend 'usp' cannot be used: {cause}; installed: fake"


def test_auto_is_not_a_backend(bare):
    assert "get one by its name" in text_of(bare, "auto")


def test_a_name_that_is_not_a_string_is_an_error_of_its_own(isolated_registry):
    with pytest.raises(UnknownBackendError, match="must be a str, got 3"):
        isolated_registry.get(3)


# Registering in code


def test_a_registered_object_is_found_by_name_and_listed(isolated_registry):
    fake = Fake()
    isolated_registry.register("fake", fake)
    assert isolated_registry.get("fake") is fake
    assert "fake" in isolated_registry.names()
    info = isolated_registry.info("fake")
    assert (info.status, info.dist, info.value) == ("registered", "", f"{Fake.__module__}.Fake")
    assert info in isolated_registry.infos()


def test_a_registered_class_is_instantiated_once(isolated_registry):
    isolated_registry.register("fake", Fake)
    assert isinstance(isolated_registry.get("fake"), Fake)
    assert isolated_registry.get("fake") is isolated_registry.get("fake")


def test_a_registered_string_is_imported_at_first_use(site, isolated_registry):
    (site / "lazy_backend.py").write_text(backend_source("lazy"))
    isolated_registry.register("lazy", "lazy_backend:Backend")
    assert isolated_registry.info("lazy").status == "registered"
    assert "lazy_backend" not in sys.modules
    assert isolated_registry.get("lazy") is isolated_registry.get("lazy")


def test_a_registered_string_that_leads_nowhere_fails_at_get(isolated_registry):
    isolated_registry.register("lazy", "nowhere_at_all:Backend")
    with pytest.raises(BackendLoadError, match=r"'lazy' \(registered in code\) cannot be loaded: ModuleNotFoundError"):
        isolated_registry.get("lazy")
    assert isolated_registry.info("lazy").status == "broken"


def test_a_taken_name_is_replaced_only_on_request(isolated_registry):
    isolated_registry.register("fake", Fake())
    with pytest.raises(DuplicatePluginError, match=r"the name is taken by registered in code .* pass replace=True"):
        isolated_registry.register("fake", Fake())
    second = Fake()
    isolated_registry.register("fake", second, replace=True)
    assert isolated_registry.get("fake") is second


def test_an_installed_name_is_taken_too(site, make_dist, isolated_registry):
    make_dist("faker", "4.0", backends={"fake": "faker:Backend"}).unpack(site)
    isolated_registry.refresh()
    with pytest.raises(
        DuplicatePluginError, match=r"as backend 'fake': the name is taken by faker 4.0 \(faker:Backend\)"
    ):
        isolated_registry.register("fake", Fake())
    isolated_registry.register("fake", Fake(), replace=True)
    assert isinstance(isolated_registry.get("fake"), Fake)
    isolated_registry.unregister("fake")
    assert isolated_registry.info("fake").dist == "faker"


def test_unregister_takes_back_what_was_registered(isolated_registry):
    isolated_registry.register("fake", Fake())
    isolated_registry.unregister("fake")
    assert "fake" not in isolated_registry.names()
    with pytest.raises(UnknownBackendError, match="no backend 'fake' was registered in code"):
        isolated_registry.unregister("fake")


@pytest.mark.parametrize("name", ["FA", "my-backend", "", "auto", "1x"])
def test_an_illegal_name_is_not_registered(name, isolated_registry):
    with pytest.raises(BackendLoadError, match="cannot register"):
        isolated_registry.register(name, Fake())


def test_a_malformed_string_is_not_registered(isolated_registry):
    with pytest.raises(BackendLoadError, match="'module' or 'module:attribute', got 'not a module!'"):
        isolated_registry.register("fake", "not a module!")


def test_rope_variants_are_checked_by_their_own_contract(isolated_registry):
    rope = Registry(polyattn.rope_variants._contract)
    rope.register("spiral", Variant())
    assert rope.get("spiral").name == "spiral"
    with pytest.raises(BackendLoadError, match=r"Fake is not a valid RoPE variant: .*Fake lacks validate, frequencies"):
        rope.register("fake", Fake())


# What an object must provide


def changed(**attributes):
    return type("Changed", (Fake,), attributes)()


@pytest.mark.parametrize(
    ("obj", "error", "said"),
    [
        (object(), BackendLoadError, "object lacks name, api_version, unsupported, prepare, attend"),
        (
            changed(api_version=99),
            IncompatiblePluginError,
            "speaks api_version 99, this polyattn speaks 1; upgrade polyattn",
        ),
        (
            changed(api_version=0),
            IncompatiblePluginError,
            "speaks api_version 0, this polyattn speaks 1; upgrade the plugin",
        ),
        (changed(api_version="1"), BackendLoadError, "api_version must be an int, got '1'"),
        (changed(api_version=True), BackendLoadError, "api_version must be an int, got True"),
        (changed(name="fa"), BackendLoadError, "name must be 'fake', got 'fa'"),
        (changed(prepare=None), BackendLoadError, "prepare must be a method, got None"),
        (
            changed(attend=lambda self, q, k, v: None),
            BackendLoadError,
            "attend(q, k, v) cannot be called as attend(q, k, v, prepared, bias=..., sinks=...): too many positional",
        ),
        (
            changed(unsupported=lambda self, request, layout, more: ()),
            BackendLoadError,
            "cannot be called as unsupported(layout, request)",
        ),
    ],
)
def test_an_object_that_is_not_a_backend_is_refused_with_what_it_lacks(obj, error, said, isolated_registry):
    with pytest.raises(error) as refusal:
        isolated_registry.register("fake", obj)
    assert said in str(refusal.value)
    assert "fake" not in isolated_registry.names()


def test_a_method_written_in_c_need_not_tell_its_signature(isolated_registry):
    isolated_registry.register("fake", changed(unsupported=type))


# Resolving a value from a config


def test_resolve_takes_a_name_or_an_object(isolated_registry):
    fake = Fake()
    isolated_registry.register("fake", fake)
    assert isolated_registry.resolve("fake") is fake
    assert isolated_registry.resolve("fake", {}) is fake
    other = changed(name="unheard_of")
    assert isolated_registry.resolve(other) is other


def test_resolve_refuses_what_is_not_a_backend(isolated_registry):
    with pytest.raises(BackendLoadError, match=r"builtins\.int is not a valid backend: builtins\.int lacks name"):
        isolated_registry.resolve(3)
    with pytest.raises(BackendLoadError, match="Fake is a class; give an instance"):
        isolated_registry.resolve(Fake)


def test_options_go_to_configure(isolated_registry):
    class Configurable(Fake):
        options = None

        def configure(self, options):
            configured = Configurable()
            configured.options = options
            return configured

    isolated_registry.register("fake", Configurable())
    assert isolated_registry.resolve("fake", {"block": 128}).options == {"block": 128}
    assert isolated_registry.get("fake").options is None


def test_options_for_a_backend_without_any_are_refused(isolated_registry):
    isolated_registry.register("fake", Fake())
    with pytest.raises(ConfigError, match=r"backend 'fake' has no options, got {'block': 128}; leave them out"):
        isolated_registry.resolve("fake", {"block": 128})


# Overriding


def test_override_holds_until_the_context_ends_and_nests(isolated_registry):
    first, second = Fake(), Fake()
    isolated_registry.register("fake", Fake())
    original = isolated_registry.get("fake")
    with isolated_registry.override("fake", first) as given:
        assert given is isolated_registry.get("fake") is first
        with isolated_registry.override("fake", second):
            assert isolated_registry.get("fake") is second
        assert isolated_registry.get("fake") is first
    assert isolated_registry.get("fake") is original


def test_override_ends_with_an_exception_too_and_leaves_no_name(isolated_registry):
    with pytest.raises(ZeroDivisionError), isolated_registry.override("fake", Fake()):
        1 / ("fake" not in isolated_registry.names())
    assert "fake" not in isolated_registry.names()


def test_overrides_that_overlap_end_in_any_order(isolated_registry):
    one, two = Fake(), Fake()
    first, second = isolated_registry.override("fake", one), isolated_registry.override("fake", two)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert isolated_registry.get("fake") is two
    second.__exit__(None, None, None)
    assert "fake" not in isolated_registry.names()


def test_override_of_a_bad_object_changes_nothing(isolated_registry):
    with pytest.raises(BackendLoadError), isolated_registry.override("fake", object()):
        pass
    assert "fake" not in isolated_registry.names()


# Refreshing


def test_refresh_finds_what_was_installed_and_keeps_what_was_loaded(site, make_dist, isolated_registry):
    make_dist.backend("first-attention", "first", module="first_module").unpack(site)
    isolated_registry.refresh()
    first = isolated_registry.get("first")
    make_dist.backend("second-attention", "second", module="second_module").unpack(site)
    assert "second" not in isolated_registry.names()
    isolated_registry.refresh()
    assert isolated_registry.get("second").name == "second"
    assert isolated_registry.get("first") is first


def test_refresh_forgets_what_was_uninstalled(site, make_dist, isolated_registry):
    make_dist.backend("first-attention", "first", module="first_gone").unpack(site)
    isolated_registry.refresh()
    isolated_registry.get("first")
    (site / "first_attention-1.0.dist-info" / "entry_points.txt").unlink()
    isolated_registry.refresh()
    assert "first" not in isolated_registry.names()


def test_a_failure_is_remembered_until_refresh(site, make_dist, isolated_registry):
    before = (
        "import builtins\nbuiltins.tries = getattr(builtins, 'tries', 0) + 1\n"
        "if builtins.tries < 2: raise OSError('not yet')"
    )
    make_dist.backend("shy-attention", "shy", module="shy_module", before=before).unpack(site)
    isolated_registry.refresh()
    import builtins

    try:
        for _ in range(2):
            with pytest.raises(BackendLoadError, match="OSError: not yet") as error:
                isolated_registry.get("shy")
            assert isinstance(error.value.__cause__, OSError)
        assert builtins.tries == 1
        assert isolated_registry.info("shy").status == "broken"
        isolated_registry.refresh()
        assert isolated_registry.info("shy").status == "available"
        assert isolated_registry.get("shy").name == "shy"
    finally:
        del builtins.tries


def test_a_registered_string_that_failed_is_tried_again_after_refresh(site, isolated_registry):
    isolated_registry.register("lazy", "mended_later:Backend")
    for _ in range(2):
        with pytest.raises(BackendLoadError, match="mended_later"):
            isolated_registry.get("lazy")
    (site / "mended_later.py").write_text(backend_source("lazy"))
    isolated_registry.refresh()
    assert isolated_registry.get("lazy").name == "lazy"


def test_the_errors_of_the_registry_survive_pickling(isolated_registry):
    isolated_registry.register("lazy", "nowhere_at_all:Backend")
    for name in ("lazy", "nothing"):
        with pytest.raises(polyattn.PolyattnError) as error:
            isolated_registry.get(name)
        copy = pickle.loads(pickle.dumps(error.value))
        assert (type(copy), str(copy)) == (type(error.value), str(error.value))
        assert getattr(copy, "name", None) == getattr(error.value, "name", None)


@pytest.mark.parametrize("same_name", [False, True])
def test_what_is_known_about_thousands_of_plugins_is_told_in_time_linear_in_their_number(same_name, monkeypatch):
    claims = [
        discovery.candidate("polyattn.backends", "n" if same_name else f"n{i}", f"m{i}:A", dist=f"d{i}", version="1")
        for i in range(4000)
    ]
    scan = discovery.Scan({**dict.fromkeys(discovery.GROUPS, ()), "polyattn.backends": tuple(claims)})
    monkeypatch.setattr(discovery, "current", lambda: scan)
    registry = Registry(polyattn.backends._contract)
    compared = []
    monkeypatch.setattr(discovery.Candidate, "__eq__", lambda a, b: compared.append(1) or a is b)
    assert len(registry.infos()) == 4000
    for i in (0, 2000, 3999):
        assert registry.info(f"d{i}:{claims[i].name}").dist == f"d{i}"
    assert len(compared) < 40_000


def test_what_is_loaded_is_told_without_importing_anything(site, make_dist, isolated_registry):
    make_dist.backend("first-attention", "first", module="first_told").unpack(site)
    make_dist.backend("second-attention", "second", module="second_told").unpack(site)
    isolated_registry.refresh()
    isolated_registry.register("ready", changed(name="ready"))
    isolated_registry.register("lazy", "second_told:Backend")
    isolated_registry.get("first")
    assert isolated_registry.loaded() == ("first", "ready")
    assert "second_told" not in sys.modules
    isolated_registry.disable(["first"])
    try:
        assert isolated_registry.loaded() == ("ready",)
    finally:
        isolated_registry.disable([])
