"""``polyattn new``: what it writes, and what it refuses to write."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import polyattn
from polyattn_cli import cli

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings tomli
    import tomli as tomllib  # type: ignore[no-redef]

FILES = {".gitignore", ".github/workflows/test.yml", "LICENSE", "README.md", "pyproject.toml"}


@pytest.fixture
def new(tmp_path):
    """``new("name", ...)``: the result of the command, run for this test's folder."""

    def invoke(*arguments):
        return CliRunner().invoke(cli, ["new", *arguments, "--into", str(tmp_path)], prog_name="polyattn")

    return invoke


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(new, tmp_path, *arguments):
    """What the command wrote: its folder and the files in it."""
    result = new(*arguments)
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    return folder, files(folder)


def test_a_backend_is_a_package_with_entry_point_tests_ci_readme_and_licence(new, tmp_path):
    folder, written = write(new, tmp_path, "my-backend", "--author", 'Ada "A" Lovelace')
    assert folder.name == "polyattn-my-backend"
    package = {"src/polyattn_my_backend/__init__.py", "src/polyattn_my_backend/py.typed"}
    assert set(written) == FILES | package | {"tests/test_conformance.py"}
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == "polyattn-my-backend"
    assert project["authors"] == [{"name": 'Ada "A" Lovelace'}]
    assert project["entry-points"] == {"polyattn.backends": {"my_backend": "polyattn_my_backend:MyBackend"}}
    assert project["dependencies"][0] == f"polyattn>={polyattn.__version__}"
    kit = f"polyattn-conformance[pytest]>={polyattn.__version__}"
    assert project["optional-dependencies"] == {"test": [f"polyattn-cli>={polyattn.__version__}", kit]}
    assert "`polyattn-conformance[pytest]`" in written["README.md"]
    assert "class MyBackend(BackendBase):" in written["src/polyattn_my_backend/__init__.py"]
    assert 'backend = "my_backend"' in written["tests/test_conformance.py"]
    assert 'Ada "A" Lovelace' in written["LICENSE"]
    assert "${{ matrix.python }}" in written[".github/workflows/test.yml"]


def test_a_rope_variant_is_the_same_in_its_own_group(new, tmp_path):
    folder, written = write(new, tmp_path, "--rope", "spiral")
    assert folder.name == "polyattn-rope-spiral"
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["entry-points"] == {"polyattn.rope": {"spiral": "polyattn_rope_spiral:SpiralRope"}}
    assert 'variant = "spiral"' in written["tests/test_conformance.py"]
    assert "The polyattn-rope-spiral developers" in written["LICENSE"]


@pytest.mark.parametrize("arguments", [("my-backend",), ("--rope", "spiral")])
def test_no_mark_of_the_template_is_left(arguments, new, tmp_path):
    _, written = write(new, tmp_path, *arguments)
    for path, text in written.items():
        assert "{%" not in text + path
        assert "{{" not in (text + path).replace("${{ matrix.python }}", "")
        assert text == "" or (text.endswith("\n") and not text.endswith("\n\n")), path


@pytest.mark.parametrize("arguments", [("my-backend",), ("--rope", "spiral")])
def test_the_code_of_the_template_is_tidy(arguments, new, tmp_path):
    pytest.importorskip("ruff", reason="ruff is not installed: pip install ruff")
    folder, _ = write(new, tmp_path, *arguments)
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        ["check", "--isolated", "--select=E,F,I,W,UP,B,D1,ANN,RUF100"],
        ["format", "--isolated", "--check"],
    ):
        done = subprocess.run(
            [*ruff, *command, "--line-length=120", "--no-cache", folder / "src"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_backend_is_forty_lines_of_code(new, tmp_path):
    _, written = write(new, tmp_path, "my-backend")
    lines = written["src/polyattn_my_backend/__init__.py"].splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


@pytest.mark.parametrize(
    ("arguments", "dist", "named"),
    [
        (("polyattn-fast",), "polyattn-fast", "fast = "),
        (("fast_kernel2",), "polyattn-fast-kernel2", "fast_kernel2 = "),
        (("--rope", "polyattn-rope-fast"), "polyattn-rope-fast", "fast = "),
    ],
)
def test_a_name_may_be_given_in_any_usual_form(arguments, dist, named, new, tmp_path):
    folder, written = write(new, tmp_path, *arguments)
    assert folder.name == dist
    assert f"\n{named}" in written["pyproject.toml"]


def refused(result):
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


def test_nothing_is_overwritten(new, tmp_path):
    folder = tmp_path / "polyattn-my-backend"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    said = refused(new("my-backend"))
    assert "polyattn-my-backend exists and is left as it is; choose another name or --into" in said
    assert files(folder) == {"notes": "mine"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("MyBackend",), "a plugin's name must match [a-z][a-z0-9_]*, got 'MyBackend'"),
        (("2fast",), "must match"),
        (("../up",), "must match"),
        (("auto",), "'auto' is reserved"),
        (("sdpa",), "polyattn-sdpa has that name; choose another one"),
        (("fa2",), "polyattn-fa2 has that name"),
        (("transformers",), "polyattn-transformers has that name"),
        (("modules",), "polyattn-modules has that name"),
        (("cli",), "polyattn-cli has that name"),
        (("--rope", "yarn"), "polyattn-rope-yarn has that name"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_before_anything_is_written(arguments, said, new, tmp_path):
    assert said in refused(new(*arguments))
    assert list(tmp_path.iterdir()) == []


def test_without_copier_the_message_says_how_to_get_it(new, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "copier", None)
    assert "needs copier, which is not installed: pip install 'polyattn[new]'" in refused(new("my-backend"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_named_with_the_next_steps(new, tmp_path):
    said = new("my-backend").output
    assert f"{tmp_path / 'polyattn-my-backend'} is ready" in said
    assert 'pip install --editable ".[test]"' in said
    assert "\n  polyattn check my_backend\n  pytest\n" in said
    assert "polyattn check" not in new("--rope", "spiral").output


@pytest.mark.parametrize("name", ["spiral", "rope-spiral", "rope_spiral", "polyattn-rope-spiral", "polyattn-spiral"])
def test_a_rope_variant_may_be_called_as_its_folder(name, new, tmp_path):
    folder, _ = write(new, tmp_path, "--rope", name)
    assert folder.name == "polyattn-rope-spiral"
