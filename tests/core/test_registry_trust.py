"""Allow and disable lists act before any code of a plugin runs."""

from __future__ import annotations

import json

import pytest

from polyattn import AttentionConfig, BlockedPluginError, ConfigError, UnknownBackendError
from polyattn.registry import hooks

WITNESS = "import pathlib\npathlib.Path('imported').touch()"


@pytest.fixture
def folder(tmp_path, make_dist):
    """Plugins of ``acme-attention`` that leave a file when they are imported, and a backend ``other``."""
    site = tmp_path / "site"
    make_dist.backend("other-attention", "other").unpack(site)
    make_dist(
        "acme-attention",
        backends={"acme": "acme_module:Backend"},
        rope={"spiral": "acme_module:Spiral"},
        hooks={"trace": "acme_module"},
        modules={"acme_module.py": WITNESS},
    ).unpack(site)
    return site


REFUSED = """
import polyattn
from polyattn import backends, rope_variants
{before}
assert "acme" in backends.names()
assert backends.info("acme").status == rope_variants.info("spiral").status == "blocked"
for registry, name in ((backends, "acme"), (rope_variants, "spiral")):
    try:
        registry.get(name)
    except polyattn.BlockedPluginError as error:
        print(error)
        assert (error.name, error.dist, error.version) == (name, "acme-attention", "1.0")
    else:
        raise AssertionError("loaded")
assert backends.get("other").name == "other"
"""


@pytest.mark.parametrize(
    ("env", "before", "said"),
    [
        (
            {"POLYATTN_ALLOW": "other-attention"},
            "",
            "POLYATTN_ALLOW=other-attention does not allow its distribution 'acme-attention'",
        ),
        ({"POLYATTN_ALLOW": " Other_Attention , x"}, "", "POLYATTN_ALLOW= Other_Attention , x does not allow"),
        ({"POLYATTN_DISABLE": "trace,acme, spiral"}, "", "POLYATTN_DISABLE=trace,acme, spiral disables it"),
        ({"POLYATTN_DISABLE": "acme-attention:acme,acme-attention:spiral,trace"}, "", "disables it"),
        (
            {},
            "backends.allow(['other-attention'])",
            "backends.allow(['other-attention']) does not allow its distribution",
        ),
        (
            {},
            "backends.disable(['acme', 'spiral', 'trace'])",
            "backends.disable(['acme', 'spiral', 'trace']) disables it",
        ),
        ({"POLYATTN_ALLOW": "acme-attention,other-attention"}, "backends.allow(['other-attention'])", "backends.allow"),
    ],
)
def test_a_blocked_plugin_is_never_imported_and_says_who_blocked_it(env, before, said, folder, tmp_path, run_python):
    done = run_python(REFUSED.format(before=before), path=[folder], env=env)
    assert "backend 'acme' may not be loaded (acme-attention 1.0: " in done.stdout
    assert "RoPE variant 'spiral' may not be loaded" in done.stdout
    assert said in done.stdout
    assert not (tmp_path / "imported").exists()


def test_without_a_list_the_witness_does_its_work(folder, tmp_path, run_python):
    run_python(
        "import polyattn\ntry: polyattn.backends.get('acme')\nexcept polyattn.BackendLoadError: pass", path=[folder]
    )
    assert (tmp_path / "imported").exists()


def test_an_empty_allow_list_allows_nothing(folder, run_python):
    code = """
import polyattn
assert {info.status for info in polyattn.backends.infos() if info.dist} == {"blocked"}
try: polyattn.backends.get("other")
except polyattn.BlockedPluginError as error: print(error)
"""
    assert (
        "POLYATTN_ALLOW= does not allow its distribution 'other-attention'"
        in run_python(code, path=[folder], env={"POLYATTN_ALLOW": ""}).stdout
    )


@pytest.mark.parametrize("info", [".dist-info", "-1.0.dist-info"])
def test_metadata_without_any_name_passes_no_allow_list(info, tmp_path, run_python, make_dist):
    acme = make_dist.backend("acme-attention", "acme", before=WITNESS)
    acme.unpack(tmp_path / "site", info=info)
    (tmp_path / "site" / info / "METADATA").write_text("Name:\nVersion: 1.0\n")
    code = """
import polyattn
assert polyattn.backends.info("acme").dist == "unnamed"
try: polyattn.backends.get("acme")
except polyattn.BlockedPluginError: print("blocked")
"""
    done = run_python(code, path=[tmp_path / "site"], env={"POLYATTN_ALLOW": "polyattn-eager"})
    assert done.stdout.split() == ["blocked"]
    assert not (tmp_path / "imported").exists()


def test_the_command_line_shows_what_is_blocked_and_imports_nothing_of_it(folder, tmp_path, run_python):
    env = {"POLYATTN_DISABLE": "acme,spiral,trace", "POLYATTN_ALLOW": "acme-attention,other-attention"}
    for command in ("list", "doctor"):
        done = run_python(["-m", "polyattn", command], path=[folder], env=env)
        assert "POLYATTN_DISABLE=acme,spiral,trace disables it" in done.stdout
    assert not (tmp_path / "imported").exists()


def test_doctor_tells_which_disabled_names_nobody_has(folder, run_python):
    env = {"POLYATTN_DISABLE": "acme,acme_,other-attention:other,x:other", "POLYATTN_ALLOW": "other-attention"}
    report = json.loads(run_python(["-m", "polyattn", "doctor", "--json"], path=[folder], env=env).stdout)
    assert [text.partition(" disables ")[2] for text in report["problems"]] == [
        "'acme_', which no installed plugin is called",
        "'x:other', which no installed plugin is called",
    ]


def test_doctor_tells_which_allowed_distributions_are_absent(folder, run_python):
    env = {"POLYATTN_ALLOW": "other-attention,typo-attention"}
    report = json.loads(run_python(["-m", "polyattn", "doctor", "--json"], path=[folder], env=env).stdout)
    assert [text.partition(" allows ")[2] for text in report["problems"]] == [
        "'typo-attention', which is not installed or brings no plugin"
    ]


def test_blocking_one_of_two_rivals_settles_the_conflict(tmp_path, run_python, make_dist):
    for dist in ("alpha", "beta"):
        make_dist.backend(dist, "contested").unpack(tmp_path / "site")
    code = "import polyattn; print(type(polyattn.backends.get('contested')).__module__)"
    for env in ({"POLYATTN_ALLOW": "beta"}, {"POLYATTN_DISABLE": "alpha:contested"}):
        assert run_python(code, path=[tmp_path / "site"], env=env).stdout.split() == ["beta"]


@pytest.fixture
def acme(site, make_dist, isolated_registry):
    make_dist.backend("acme-attention", "acme", module="acme_trusted").unpack(site)
    isolated_registry.refresh()
    yield isolated_registry
    isolated_registry.allow(None)
    isolated_registry.disable([])


def test_lists_in_code_can_be_lifted_again(acme):
    acme.disable(["acme"])
    with pytest.raises(BlockedPluginError):
        acme.get("acme")
    acme.disable([])
    acme.allow([])
    with pytest.raises(BlockedPluginError):
        acme.get("acme")
    acme.allow(None)
    assert acme.get("acme").name == "acme"


def test_a_loaded_plugin_is_refused_once_it_is_disabled(acme):
    acme.get("acme")
    acme.disable(["acme"])
    with pytest.raises(BlockedPluginError):
        acme.get("acme")


def test_a_disabled_name_is_refused_when_registered_in_code_too(acme):
    acme.register("mine", "acme_trusted:Backend")
    acme.disable(["mine"])
    with pytest.raises(BlockedPluginError, match="registered in code"):
        acme.get("mine")


def test_the_allow_list_is_about_distributions_and_lets_registrations_pass(acme):
    acme.register("acme", "acme_trusted:Backend", replace=True)
    acme.allow([])
    assert acme.get("acme").name == "acme"


@pytest.mark.parametrize("given", ["acme", [3]])
def test_a_list_must_be_a_list_of_names(given, acme):
    with pytest.raises(ConfigError, match=r"disable\(\) needs a list of strings"):
        acme.disable(given)
    with pytest.raises(ConfigError, match=r"allow\(\) needs a list of strings"):
        acme.allow(given)


def test_a_hook_that_is_disabled_is_no_longer_called(site, make_dist, acme):
    source = "import pluggy\n@pluggy.HookimplMarker('polyattn')\ndef polyattn_prepared():\n    pass\n"
    make_dist("tracer", hooks={"trace": "tracer_blocked"}, modules={"tracer_blocked.py": source}).unpack(site)
    acme.refresh()
    assert hooks.installed("polyattn_prepared")
    acme.disable(["trace"])
    assert not hooks.installed("polyattn_prepared")
    acme.disable([])
    assert hooks.installed("polyattn_prepared")


@pytest.mark.parametrize(
    "text", ["os:system", "acme_trusted:Backend", "acme_trusted", "./acme_trusted.py", "__import__('os')"]
)
def test_text_from_a_config_is_a_name_and_never_a_module(text, acme):
    with pytest.raises(UnknownBackendError):
        acme.get(text)
    with pytest.raises(UnknownBackendError):
        AttentionConfig.from_dict({"attn_backend": text})
    assert acme.info("acme").status == "available"
