"""What a user gets who installs built wheels: core and the one backend that was asked for, nothing of the workspace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bare_environment import bare_environment

ROOT = Path(__file__).parents[2]
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
    for source in ("core", "plugins/sdpa", "plugins/rope/default"):
        checked(
            sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT / source
        )
    return folder


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """The ``bin`` folder of an environment with this one's third-party packages and polyattn from wheels only."""
    binaries = bare_environment(tmp_path_factory.mktemp("environment"))
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python")
    checked(*pip, "install", "--quiet", "--no-index", "--find-links", wheels, "polyattn-sdpa", "polyattn-rope-default")
    return binaries


def test_wheels_carry_types_licence_and_entry_points(wheels):
    for name, group in (("polyattn_sdpa", "polyattn.backends"), ("polyattn", "console_scripts")):
        (wheel,) = wheels.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            assert f"{name}/py.typed" in names
            (entry_points,) = (entry for entry in names if entry.endswith(".dist-info/entry_points.txt"))
            assert f"[{group}]" in archive.read(entry_points).decode()
            assert any(entry.endswith(".dist-info/licenses/LICENSE") for entry in names)
            assert all(entry.startswith((f"{name}/", f"{name}-")) for entry in names)


def test_only_the_installed_backend_is_listed(environment):
    listed = json.loads(checked(environment / "polyattn", "list", "--json"))
    assert [entry["name"] for entry in listed["backends"]] == ["sdpa"]
    assert [entry["name"] for entry in listed["rope"]] == ["default"]


def test_the_installed_backend_runs_and_another_is_refused_with_its_pip_command(environment):
    code = """
import pathlib, sys, torch, polyattn
assert pathlib.Path(polyattn.__file__).is_relative_to(sys.prefix), polyattn.__file__
q = torch.randn(1, 4, 6, 8)
k = v = torch.randn(1, 2, 6, 8)
layout = polyattn.MaskLayout.packed([2, 4])
out = polyattn.attention(q, k, v, layout, backend="sdpa").output
alone = polyattn.attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], polyattn.MaskLayout.causal(2), backend="auto").output
torch.testing.assert_close(out[:, :, :2], alone)
try:
    polyattn.attention(q, k, v, layout, backend="eager")
except polyattn.UnknownBackendError as error:
    print(error)
"""
    said = checked(environment / "python", "-c", code)
    assert "sdpa" in said
    assert "pip install polyattn-eager" in said
