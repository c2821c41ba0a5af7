"""The path of a plugin's author: generate, build, install, list, check, and name it in a config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bare_environment import bare_environment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder in which ``polyattn new`` wrote a backend and a RoPE variant."""
    from click.testing import CliRunner

    from polyattn_cli import cli

    folder = tmp_path_factory.mktemp("workshop")
    for arguments in (["my-backend"], ["--rope", "my-rope"]):
        result = CliRunner().invoke(cli, ["new", *arguments, "--into", str(folder)])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def target(workshop, build_wheel, pip_install, tmp_path_factory):
    """A clean folder into which both were installed from their wheels."""
    wheels = [build_wheel(folder) for folder in sorted(workshop.iterdir())]
    return pip_install(tmp_path_factory.mktemp("target"), *wheels)


def test_the_installed_plugins_are_listed(target, run_python):
    listed = json.loads(run_python(["-m", "polyattn", "list", "--json"], path=[target]).stdout)
    (backend,) = [entry for entry in listed["backends"] if entry["name"] == "my_backend"]
    (variant,) = [entry for entry in listed["rope"] if entry["name"] == "my_rope"]
    assert (backend["dist"], backend["status"]) == ("polyattn-my-backend", "available")
    assert (variant["dist"], variant["status"]) == ("polyattn-rope-my-rope", "available")


@pytest.mark.parametrize(("only", "least"), [("values*", 20), pytest.param("*", 150, marks=pytest.mark.nightly)])
def test_the_backend_passes_the_kit_on_the_command_line(target, run_python, only, least):
    command = ["-m", "polyattn", "check", "my_backend", "--only", only, "--json"]
    done = run_python(command, path=[target], timeout=300)
    counts = json.loads(done.stdout)["counts"]
    assert counts["failed"] == counts["expected failure"] == 0
    assert counts["pass"] > least


def test_the_generated_tests_pass(workshop, target, run_python):
    dist = "polyattn-rope-my-rope"  # those of the backend run in an environment of their own, below
    tests = [workshop / dist, "-c", workshop / dist / "pyproject.toml", "-q", "-p", "no:cacheprovider"]
    assert " passed" in run_python(["-m", "pytest", *tests], path=[target], timeout=120).stdout


@pytest.mark.parametrize(
    ("dist", "only"),
    [("polyattn-my-backend", "ability"), pytest.param("polyattn-rope-my-rope", "", marks=pytest.mark.nightly)],
)
def test_the_generated_package_needs_nothing_that_it_does_not_declare(dist, only, workshop, build_wheel, tmp_path):
    wheels = [
        build_wheel(folder) for folder in (workshop / dist, *(ROOT / name for name in ("core", "cli", "conformance")))
    ]
    links = [option for wheel in wheels for option in ("--find-links", wheel.parent)]
    python = bare_environment(tmp_path / "environment") / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "POLYATTN"))}

    def run(*command, cwd=tmp_path):
        done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", *links, f"{dist}[test]")
    assert dist in run(python, "-m", "polyattn", "list")
    assert " passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only, cwd=workshop / dist)


def test_a_model_trains_with_both_by_name(target, run_python, tmp_path):
    config = yaml.safe_load((ROOT / "examples/tiny_lm/demo.yaml").read_text(encoding="utf-8"))
    config["attn_backend"] = "my_backend"
    config["rope"] |= {"variant": "my_rope", "parameters": {"factor": 4.0}}
    config["model"]["layers"] = 1
    config["data"] = {"rows": 1, "row_length": 64}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run_python(["-m", "tiny_lm", "train", "run.yaml", "--steps", 2, "--out", "out"], path=[target])
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (report["backend"], report["distribution"]) == ("my_backend", "polyattn-my-backend 0.1.0")
    assert len(report["losses"]) == 2


def test_the_template_is_in_the_wheel_of_the_command_line(build_wheel, pip_install, tmp_path, run_python):
    wheels = [build_wheel(ROOT / folder) for folder in ("core", "cli", "conformance")]
    site = pip_install(tmp_path / "site", *wheels)
    run_python(["-m", "polyattn", "new", "my-backend"], path=[site])
    code = "import polyattn_cli.new as new; print(new.__file__)"
    assert Path(run_python(code, path=[site]).stdout.strip()).is_relative_to(site)
    assert (tmp_path / "polyattn-my-backend" / ".github" / "workflows" / "test.yml").is_file()
