"""Faulty plugins, really installed from wheels beside healthy ones, each met in a fresh interpreter."""

from __future__ import annotations

import json

import pytest

from tiny_dists import TinyDist, backend_source, tiny_backend

HOOK = "import pluggy\nhookimpl = pluggy.HookimplMarker('polyattn')\n@hookimpl\n"


def with_backend(source, old, new):
    assert old in source
    return source.replace(old, new)


def faulty(name, source, **kwargs):
    return TinyDist(
        f"{name}-dist",
        "3.1",
        backends={name: f"{name}_module:Backend"},
        modules={f"{name}_module.py": source},
        **kwargs,
    )


FAULTY = [
    faulty("no_module", "import nowhere_to_be_found"),
    faulty("exits", "raise SystemExit(3)"),
    faulty("no_attribute", "x = 1"),
    faulty("syntax", "def :"),
    faulty(
        "bad_init", backend_source("bad_init", after="    def __init__(self):\n        raise ValueError('no device')")
    ),
    faulty(
        "bad_signature",
        with_backend(backend_source("bad_signature"), "q, k, v, prepared, *, bias=None, sinks=None", "q, k, v"),
    ),
    faulty("no_method", with_backend(backend_source("no_method"), "def prepare", "def prepair")),
    faulty("too_new", with_backend(backend_source("too_new"), "api_version = 1", "api_version = 99")),
    faulty("too_old", with_backend(backend_source("too_old"), "api_version = 1", "api_version = 0")),
    faulty("misnamed", backend_source("another")),
    faulty("recurses", "def again():\n    again()\nagain()"),
    faulty("panics", "class Panic(BaseException):\n    pass\nraise Panic('index out of bounds')"),
    faulty("mute", "class Mute(Exception):\n    def __str__(self):\n        return self.text\nraise Mute"),
    faulty("gone", "import sys\ndel sys.modules[__name__]"),
    faulty("selfish", backend_source("selfish", before="import polyattn\npolyattn.backends.get('selfish')")),
]
CAUSES = {
    "no_module": "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "exits": "SystemExit: 3",
    "no_attribute": "AttributeError: module 'no_attribute_module' has no attribute 'Backend'",
    "syntax": "SyntaxError: invalid syntax",
    "bad_init": "ValueError: no device",
    "bad_signature": "attend(q, k, v) cannot be called as attend(q, k, v, prepared, bias=..., sinks=...)",
    "no_method": "Backend lacks prepare; a backend has name, api_version, unsupported, prepare, attend",
    "too_new": "it speaks api_version 99, this polyattn speaks 1; upgrade polyattn",
    "too_old": "it speaks api_version 0, this polyattn speaks 1; upgrade the plugin",
    "misnamed": "its attribute name must be 'misnamed', got 'another'",
    "recurses": "RecursionError: maximum recursion depth exceeded",
    "panics": "Panic: index out of bounds",
    "mute": "cannot be loaded: Mute, whose text raises AttributeError",
    "gone": "KeyError: 'gone_module'",
    "selfish": "AttributeError: partially initialized module 'selfish_module' has no attribute 'Backend'",
}
OTHERS = [
    tiny_backend("healthy", "healthy"),
    tiny_backend("alpha", "contested", version="1.5"),
    tiny_backend("beta", "contested", version="2.5"),
    TinyDist("malformed-dist", "3.1", backends={"malformed": "not a value!"}),
    TinyDist("illegal-dist", "3.1", backends={"nx-loop": "illegal:Backend", "FA": "illegal:Backend"}),
    TinyDist(
        "nohook-dist",
        "3.1",
        hooks={"nohook": "nohook"},
        modules={"nohook.py": HOOK + "def polyattn_nothing():\n    pass\n"},
    ),
    TinyDist(
        "noarg-dist",
        "3.1",
        hooks={"noarg": "noarg"},
        modules={"noarg.py": HOOK + "def polyattn_prepared(nonsense):\n    pass\n"},
    ),
    tiny_backend(
        "lister",
        "lister",
        before="""
import polyattn, polyattn._request
NAMES = polyattn.backends.names()
polyattn.backends.infos(), polyattn.backends.get("healthy")
""",
    ),
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, pip_install):
    """A folder into which pip installed every faulty distribution and some healthy ones."""
    wheels = tmp_path_factory.mktemp("wheels")
    return pip_install(tmp_path_factory.mktemp("hostile"), *(dist.wheel(wheels) for dist in [*FAULTY, *OTHERS]))


def test_every_fault_has_its_expected_cause():
    assert {dist.name.removesuffix("-dist") for dist in FAULTY} == set(CAUSES)


@pytest.mark.parametrize("name", CAUSES)
def test_a_faulty_plugin_is_named_with_its_cause_and_harms_no_other(name, hostile, run_python):
    code = f"""
import sys, polyattn
from polyattn import backends
assert backends.info({name!r}).status == "available"
for _ in range(2):
    try:
        backends.get({name!r})
    except polyattn.PolyattnError as error:
        text = str(error)
        assert (error.name, error.dist, error.version) == ({name!r}, "{name}-dist", "3.1"), vars(error)
    else:
        raise AssertionError("loaded")
print(text)
assert {name!r} in backends.names()
info = backends.info({name!r})
assert (info.dist, info.version, info.error) == ("{name}-dist", "3.1", text)
assert info.status == ("incompatible" if {name!r}.startswith("too_") else "broken"), info
assert type(backends.get("healthy")).__module__ == "healthy"
assert "torch" not in sys.modules
"""
    said = run_python(code, path=[hostile]).stdout
    assert CAUSES[name] in said
    assert f"backend '{name}' ({name}-dist 3.1)" in said
    assert f"{name}_dist-3.1.dist-info" in said


def test_what_the_plugin_raised_is_the_cause_of_the_error(hostile, run_python):
    code = """
from polyattn import BackendLoadError, backends
for name, cause in (("no_module", ModuleNotFoundError), ("exits", SystemExit), ("bad_init", ValueError)):
    try:
        backends.get(name)
    except BackendLoadError as error:
        assert type(error.__cause__) is cause and isinstance(error, ImportError)
"""
    run_python(code, path=[hostile])


def test_a_plugin_that_uses_the_registry_while_it_loads_works(hostile, run_python):
    code = """
from polyattn import backends
assert backends.get("lister").name == "lister"
import lister
assert {"healthy", "contested", "lister", "no_module"} <= set(lister.NAMES)
"""
    run_python(code, path=[hostile])


def test_ctrl_c_during_an_import_interrupts_and_is_not_remembered(tmp_path, run_python, make_dist):
    before = (
        "import builtins\nif not hasattr(builtins, 'again'):\n    builtins.again = True\n    raise KeyboardInterrupt"
    )
    folder = make_dist.backend("acme-attention", "acme", before=before).unpack(tmp_path / "site")
    code = """
from polyattn import backends
try:
    backends.get("acme")
except KeyboardInterrupt:
    assert backends.info("acme").status == "available"
    print(backends.get("acme").name)
"""
    assert run_python(code, path=[folder]).stdout.split() == ["acme"]


@pytest.fixture(scope="module")
def rivals(tmp_path_factory, pip_install):
    """Two folders, into each of which pip installed a distribution that claims the name ``contested``."""
    return [
        pip_install(tmp_path_factory.mktemp(dist.name), dist.wheel(tmp_path_factory.mktemp("wheel")))
        for dist in OTHERS
        if "contested" in dist.backends
    ]


@pytest.mark.parametrize("reverse", [False, True])
def test_two_distributions_with_one_name_are_an_error_at_get_whatever_their_order(reverse, rivals, run_python):
    code = """
import polyattn
from polyattn import backends
assert "contested" in backends.names()
info = backends.info("contested")
assert (info.status, info.dist, info.version) == ("conflict", "alpha, beta", "1.5, 2.5"), info
assert [i.status for i in backends.infos() if i.name == "contested"] == ["conflict", "conflict"]
try:
    backends.get("contested")
except polyattn.DuplicatePluginError as error:
    print(error)
for dist in ("alpha", "beta"):
    assert type(backends.get(f"{dist}:contested")).__module__ == dist
    assert backends.info(f"{dist}:contested").dist == dist
    assert backends.resolve(f"{dist}:contested").name == "contested"
import sys; assert "torch" not in sys.modules
"""
    said = run_python(code, path=rivals[::-1] if reverse else rivals).stdout
    assert said.startswith("2 plugins claim the backend name 'contested':")
    assert "alpha 1.5: alpha:Backend" in said
    assert "beta 2.5: beta:Backend" in said
    assert "uninstall all but one (pip uninstall alpha), or write which one you mean" in said
    assert '"alpha:contested" or "beta:contested"' in said


def test_a_malformed_rival_does_not_make_a_conflict(tmp_path, run_python, make_dist):
    make_dist.backend("good-dist", "acme").unpack(tmp_path / "site")
    make_dist("bad-dist", backends={"acme": "not a value!"}).unpack(tmp_path / "site")
    code = "from polyattn import backends; print(type(backends.get('acme')).__module__, backends.info('acme').dist)"
    assert run_python(code, path=[tmp_path / "site"]).stdout.split() == ["good_dist", "good-dist"]


def test_one_distribution_that_names_two_plugins_alike_is_a_conflict_that_its_author_must_mend(
    tmp_path, run_python, make_dist
):
    text = "[polyattn.backends]\nacme = one:Backend\nacme = two:Backend\n"
    folder = make_dist("acme-attention", entry_points=text).unpack(tmp_path / "site")
    code = """
import polyattn
try: polyattn.backends.get("acme")
except polyattn.DuplicatePluginError as error: print(error)
"""
    said = run_python(code, path=[folder]).stdout
    assert "acme-attention itself names it 2 times, which only its author can mend" in said


def test_a_plugin_that_forks_and_changes_the_path_while_it_is_imported_loads(tmp_path, run_python, make_dist):
    before = """
import os, pathlib, sys
sys.path.insert(0, "/nowhere")
sys.path += [None, 3, pathlib.Path("/nowhere")]
if hasattr(os, "fork"):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
"""
    make_dist.backend("acme-attention", "acme", before=before).unpack(tmp_path / "site")
    make_dist.backend("other-attention", "other").unpack(tmp_path / "site")
    code = """
from polyattn import backends
print(backends.get("acme").name)
backends.refresh()  # also with what is not a folder on the path
print(backends.get("other").name, "sdpa" in backends.names())
"""
    assert run_python(code, path=[tmp_path / "site"]).stdout.split() == ["acme", "other", "True"]


def test_two_versions_left_in_one_folder_are_a_conflict_with_its_own_cure(tmp_path, run_python, make_dist):
    make_dist.backend("acme", "acme", version="1.0", module="old").unpack(tmp_path / "site")
    make_dist.backend("acme", "acme", version="2.0", module="new").unpack(tmp_path / "site")
    code = """
import polyattn
try: polyattn.backends.get("acme")
except polyattn.DuplicatePluginError as error: print(error)
"""
    said = run_python(code, path=[tmp_path / "site"]).stdout
    assert "pip uninstall acme until it is gone, then install it" in said
    assert "acme 1.0" in said
    assert "acme 2.0" in said


def test_stale_metadata_says_that_the_code_is_gone(tmp_path, run_python, make_dist):
    folder = make_dist("acme-attention", backends={"acme": "acme.kernels:Backend"}).unpack(tmp_path / "site")
    code = (
        "import polyattn\ntry: polyattn.backends.get('acme')\nexcept polyattn.BackendLoadError as error: print(error)"
    )
    said = run_python(code, path=[folder]).stdout
    assert "its metadata is installed but its code is not: pip install --force-reinstall acme-attention" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [("malformed", "must be 'module' or 'module:attribute', got 'not a value!'"), ("FA", "a plugin's name must match")],
)
def test_faulty_metadata_is_an_error_at_get(name, said, hostile, run_python):
    code = f"""
import polyattn
try: polyattn.backends.get({name!r})
except polyattn.BackendLoadError as error: print(error.dist, error)
"""
    done = run_python(code, path=[hostile])
    assert said in done.stdout
    assert "-dist" in done.stdout.split()[0]


def test_illegal_names_are_warned_about_once_and_are_not_names(hostile, run_python):
    code = (
        "import polyattn; print(polyattn.backends.names()); polyattn.rope_variants.names(); polyattn.backends.names()"
    )
    done = run_python(code, path=[hostile])
    assert "FA" not in done.stdout
    assert "nx-loop" not in done.stdout
    assert done.stderr.count("'FA' of illegal-dist 3.1 is ignored") == 1
    assert done.stderr.count("'nx-loop' of illegal-dist 3.1 is ignored") == 1


def test_listing_never_waits_for_an_import(tmp_path, run_python, make_dist):
    folder = make_dist.backend("slow-attention", "slow", before="import time; time.sleep(60)").unpack(tmp_path / "site")
    run_python(["-m", "polyattn", "list"], path=[folder], timeout=20)


KERNEL = """
import torch
from polyattn import AttentionResult, BackendBase

class Backend(BackendBase):
    name = "contested"
    abilities = frozenset(("float32", "full"))

    def device_reasons(self, device):
        {fails}

    def plan(self, layout, request):
        return None
"""


@pytest.mark.parametrize(
    ("fails", "got", "error"),
    [
        ("import nowhere_to_be_found", "nowhere_to_be_found", "polyattn.PolyattnError"),
        ("raise SystemExit('no kernel here')", "SystemExit: no kernel here", "SystemExit"),
    ],
)
def test_a_kernel_that_fails_to_import_later_is_a_reason_against_its_own_backend(
    fails, got, error, tmp_path, run_python, make_dist
):
    kernel = {"gamma.py": KERNEL.format(fails=fails)}
    folder = make_dist("gamma", "1.0", backends={"contested": "gamma:Backend"}, modules=kernel).unpack(
        tmp_path / "site"
    )
    code = f"""
import polyattn, torch
q = torch.zeros(1, 1, 2, 4)
layout, request = polyattn.MaskLayout.full(2), polyattn.AttentionRequest.of(q, q, q)
decision = polyattn.explain(layout, request)
assert decision.candidates["sdpa"] == decision.candidates["eager"] == ()
(reason,) = decision.candidates["contested"]
assert reason.code == "fails_when_asked" and {got!r} in reason.got, reason
assert reason.got.endswith(", from gamma 1.0"), reason
assert polyattn.attention(q, q, q, layout).output.shape == q.shape
try: polyattn.attention(q, q, q, layout, backend="contested")
except {error} as error:
    assert isinstance(error, SystemExit) or ", from gamma 1.0; this is the backend's fault" in str(error), error
    print("told")
"""
    assert run_python(code, path=[folder]).stdout.split() == ["told"]


def test_a_backend_chosen_among_rivals_survives_pickling(tmp_path, run_python, make_dist):
    for dist in ("gamma", "delta"):
        kernel = {f"{dist}.py": KERNEL.format(fails="return ()")}
        make_dist(dist, "1.0", backends={"contested": f"{dist}:Backend"}, modules=kernel).unpack(tmp_path / "site")
    code = """
import pickle, polyattn
chosen = polyattn.backends.get("gamma:contested")
again = pickle.loads(pickle.dumps(chosen))
assert again == chosen and type(again).__module__ == "gamma"
"""
    run_python(code, path=[tmp_path / "site"])


def test_the_command_line_survives_everything_at_once(hostile, run_python):
    listed = json.loads(run_python(["-m", "polyattn", "list", "--json"], path=[hostile]).stdout)
    shown = {(entry["name"], entry["dist"]): entry for section in listed.values() for entry in section}
    for dist in FAULTY:
        name = dist.name.removesuffix("-dist")
        assert shown[name, dist.name]["version"] == "3.1"
    assert shown["contested", "alpha"]["status"] == shown["contested", "beta"]["status"] == "conflict"
    assert shown["malformed", "malformed-dist"]["status"] == shown["FA", "illegal-dist"]["status"] == "broken"


def test_a_conflict_is_told_once_in_a_listing(hostile, run_python):
    said = run_python(["-m", "polyattn", "list"], path=[hostile]).stdout
    assert said.count("2 plugins claim the backend name 'contested'") == 1


def test_doctor_shows_every_fault_with_distribution_version_and_cause(hostile, run_python):
    # On Python 3.10 torch's own scan for device backends would stop at the malformed entry point.
    alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_python(["-m", "polyattn", "doctor", "--json"], path=[hostile], env=alone, status=1)
    report = json.loads(done.stdout)
    entries = {(entry["name"], entry["dist"]): entry for section in ("backends", "hooks") for entry in report[section]}
    for name, cause in CAUSES.items():
        entry = entries[name, f"{name}-dist"]
        assert entry["version"] == "3.1"
        assert entry["status"] == ("incompatible" if name.startswith("too_") else "broken")
        assert cause in entry["error"]
    assert entries["healthy", "healthy"]["status"] == "loaded"
    assert entries["healthy", "healthy"]["code"] == str(hostile / "healthy.py")
    assert entries["healthy", "healthy"]["source"] == str(hostile / "healthy-1.0.dist-info" / "entry_points.txt")
    assert '"alpha:contested" or "beta:contested"' in entries["contested", "alpha"]["error"]
    assert "there is no hook polyattn_nothing" in entries["nohook", "nohook-dist"]["error"]
    assert "nonsense" in entries["noarg", "noarg-dist"]["error"]
    assert report["torch"]
