"""Fixtures for every area: fresh interpreters, tiny distributions, and registries that nobody else sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from polyattn.registry import discovery, hooks
from polyattn.registry.permissions import ALLOW, DISABLE, trust
from polyattn.registry.registry import Registry, backends, rope_variants
from tiny_dists import TinyDist, tiny_backend


def _left_behind():
    state = {
        f"{registry} {info.name}": info.value
        for registry in (backends, rope_variants)
        for info in registry.infos()
        if not info.dist
    }
    return state | {"allowed": trust._allowed, "disabled": trust._disabled}


@pytest.fixture(autouse=True)
def no_registration_left_behind():
    before = _left_behind()
    yield
    assert _left_behind() == before, "a test left a registration or a trust list behind"


@pytest.fixture
def isolated_registry(monkeypatch):
    """A registry of backends like the real one, which sees no registration of it and keeps none."""
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.delenv(DISABLE, raising=False)
    return Registry(backends._contract)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path`` of this process; call ``discovery.rescan()`` after writing distributions into it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    known = set(sys.modules)
    yield folder
    monkeypatch.undo()
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(folder)):
            del sys.modules[name]
    discovery.rescan()
    hooks.refresh()


@pytest.fixture(scope="session")
def make_dist():
    """``make_dist(name, ...)``: see ``TinyDist``; ``make_dist.backend(dist, name)`` for one that works."""

    def make(*args, **kwargs):
        return TinyDist(*args, **kwargs)

    make.backend = tiny_backend
    return make


@pytest.fixture(scope="session")
def pip_install():
    """``pip_install(folder, *wheels)``: what ``pip install --target folder`` does, without a network."""

    def install(folder, *wheels):
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
        ]
        done = subprocess.run(
            [*command, "--target", str(folder), *map(str, wheels)],
            # On Python 3.10 pip's other reader of metadata refuses the malformed entry points of some tests.
            env={**os.environ, "_PIP_USE_IMPORTLIB_METADATA": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Path(folder)

    return install


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory):
    """``build_wheel(folder)``: the wheel of the distribution in ``folder``, built without a network."""

    def build(folder):
        wheels = tmp_path_factory.mktemp("wheels")
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = wheels.iterdir()
        return wheel

    return build


@pytest.fixture
def run_python(tmp_path):
    """``run_python(code, path=[...], env={...}, status=0)``: stdout and stderr of a fresh interpreter.

    ``run_python(["-m", "polyattn", "list"])`` runs a command instead of code. ``status=None`` accepts any.
    """

    def run(code, *, path=(), env=None, status=0, timeout=180):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("POLYATTN", "PYTHON"))}
        environment = clean | {"PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})}
        arguments = ["-c", code] if isinstance(code, str) else list(map(str, code))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert status is None or done.returncode == status, (
            f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run
