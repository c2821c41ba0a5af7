"""What a user gets who installs built wheels: core and the one backend that was asked for, nothing of the workspace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bare_environment import bare_environment

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "eager": "polyattn-eager",
    "sdpa": "polyattn-sdpa",
    "flex_attention": "polyattn-flex",
    "fa": "polyattn-fa2",
}
pytestmark = pytest.mark.slow


def run(*command, cwd=None):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "POLYATTN"))}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def checked(*command, cwd=None):
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for source in (
        "core",
        "cli",
        "plugins/eager",
        "plugins/sdpa",
        "plugins/flex",
        "plugins/fa2",
    ):
        checked(
            sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT / source
        )
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The ``bin`` folder of an environment with this one's third-party packages and nothing of the workspace."""
    return bare_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(
    scope="module",
    params=[
        name if name in ("sdpa", "fa") else pytest.param(name, marks=pytest.mark.nightly) for name in DISTRIBUTIONS
    ],
)
def installed(request, wheels, environment):
    """The name of the only backend that is there: its wheel and whatever that declares, core among it."""
    name = request.param
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "python")
    checked(*pip, "install", "--quiet", "--no-index", "--find-links", wheels, DISTRIBUTIONS[name])
    yield name
    checked(*pip, "uninstall", "--quiet", "--yes", "polyattn", DISTRIBUTIONS[name])


#: What core says is the same with any backend.
about_core = pytest.mark.parametrize("installed", ["sdpa"], indirect=True)


def test_core_needs_torch_and_what_finds_plugins(wheels):
    (wheel,) = wheels.glob("polyattn-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    always = {re.match(r"[\w-]+", need).group() for need in needs if "extra ==" not in need}
    assert always == {"torch", "pluggy", "importlib-metadata"}


def test_wheels_carry_types_licence_and_entry_points(wheels):
    for name, group in (("polyattn_sdpa", "polyattn.backends"), ("polyattn_cli", "console_scripts")):
        (wheel,) = wheels.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            assert f"{name}/py.typed" in names
            (entry_points,) = (entry for entry in names if entry.endswith(".dist-info/entry_points.txt"))
            assert f"[{group}]" in archive.read(entry_points).decode()
            assert any(entry.endswith(".dist-info/licenses/LICENSE") for entry in names)
            assert all(entry.startswith((f"{name}/", f"{name}-")) for entry in names)


#: Where torch alone is installed beside the wheels, these are missing.
TORCH_ONLY = """
import sys
sys.modules |= dict.fromkeys(("click", "rich", "yaml", "packaging", "copier", "pytest", "hypothesis", "transformers"))
"""


def test_only_the_installed_backend_is_listed(environment, installed):
    code = "import json, polyattn; print(json.dumps([polyattn.backends.names(), polyattn.rope_variants.names()]))"
    assert json.loads(checked(environment / "python", "-c", TORCH_ONLY + code)) == [[installed], []]


@about_core
@pytest.mark.parametrize(
    ("wanted", "dist"),
    [
        ("polyattn.GroupedQueryAttention", "polyattn-modules"),
        ("polyattn.testing.BackendConformance", "polyattn-conformance"),
    ],
)
def test_a_name_of_a_distribution_that_is_missing_says_how_to_install_it(environment, installed, wanted, dist):
    module, _, name = wanted.rpartition(".")
    done = run(environment / "python", "-c", f"{TORCH_ONLY}from {module} import {name}")
    assert done.returncode == 1
    assert f"is part of the distribution {dist}, which is not installed; `pip install {dist}` brings it" in done.stderr


@about_core
def test_tools_that_walk_the_names_see_those_of_the_distributions_that_are_there(environment, installed):
    code = """
import inspect, pydoc, polyattn, polyattn.testing
exec("from polyattn import *", {})
names = {name for name, _ in inspect.getmembers(polyattn)}
assert "MaskLayout" in names and "AttentionConfig" not in names, names
assert "MaskLayout" in pydoc.render_doc(polyattn) and dir(polyattn.testing) == []
assert not hasattr(polyattn.testing, "__path__")
"""
    done = run(environment / "python", "-c", TORCH_ONLY + code)
    assert done.returncode == 0, done.stderr


@about_core
def test_the_command_line_and_the_readers_say_how_to_install_them(environment, installed):
    done = run(environment / "python", "-m", "polyattn", "list")
    assert "`pip install polyattn-cli` brings it" in done.stderr
    code = "import polyattn; polyattn.RopeSpec.from_hf({'model_type': 'llama'})"
    done = run(environment / "python", "-c", TORCH_ONLY + code)
    assert "`pip install polyattn-readers` brings it" in done.stderr


def test_the_installed_backend_works_or_says_why_and_others_are_refused_with_their_pip_command(environment, installed):
    code = """
import json, pathlib, sys, warnings
import torch, polyattn
assert pathlib.Path(polyattn.__file__).is_relative_to(sys.prefix), polyattn.__file__
name, others = sys.argv[1], sys.argv[2:]
q = torch.randn(1, 4, 6, 8)
k = v = torch.randn(1, 2, 6, 8)
layout = polyattn.MaskLayout.packed([2, 4])
first = polyattn.MaskLayout.causal(2)
refused = {}
for other in others:
    try:
        polyattn.attention(q, k, v, layout, backend=other)
    except polyattn.UnknownBackendError as error:
        refused[other] = str(error)
warnings.simplefilter("ignore")  # the uncompiled form says that it is slow
backend = polyattn.backends.resolve(name, {"compiled": False} if name == "flex_attention" else None)
reasons = []
try:
    out = polyattn.attention(q, k, v, layout, backend=backend).output
except polyattn.UnsupportedAttentionError as error:
    reasons = [reason.to_dict() for reason in error.reasons]
else:
    alone = polyattn.attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], first, backend=backend).output
    torch.testing.assert_close(out[:, :, :2], alone)
print(json.dumps({"refused": refused, "reasons": reasons}))
"""
    others = [name for name in DISTRIBUTIONS if name != installed]
    said = json.loads(checked(environment / "python", "-c", TORCH_ONLY + code, installed, *others))
    assert said["refused"] == {
        other: f"no backend named '{other}' is installed; `pip install {DISTRIBUTIONS[other]}` brings it; "
        f"installed: {installed}"
        for other in others
    }
    if installed == "fa":  # on the CPU
        assert (said["reasons"][0]["feature"], said["reasons"][0]["got"]) == ("device", "cpu")
    else:
        assert said["reasons"] == []
