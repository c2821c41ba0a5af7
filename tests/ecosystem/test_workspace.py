"""The workspace has one list of distributions; this is what each of them must be, and who must know it."""

from __future__ import annotations

from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
FOLDERS = [
    line.removeprefix("-e ").strip()
    for line in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("-e ")
]
#: Examples of what other people ship: installed by their own tests, never with the workspace.
STRANGERS = {"examples/chrome_trace", "examples/third_party_backend"}


def read_project(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def import_name(folder):
    (package,) = read_project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return Path(package).name


def first_party(project):
    return [need for need in project.get("dependencies", []) if need.startswith("polyattn")]


def test_every_distribution_in_the_tree_is_on_the_list():
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.glob("*/**/pyproject.toml")
        if ".venv" not in path.parts
    }
    assert found == set(FOLDERS) | STRANGERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_distribution_is_a_real_package(folder):
    project = read_project(folder)["project"]
    core = read_project("core")["project"]
    assert project["version"] == core["version"], "first-party distributions share one version"
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (ROOT / folder / project["readme"]).read_text(encoding="utf-8").startswith("# ")
    assert (ROOT / folder / "src" / import_name(folder) / "py.typed").is_file()


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "core"])
def test_a_distribution_accepts_this_core_and_no_other_series(folder):
    major, minor, _ = (int(part) for part in read_project("core")["project"]["version"].split("."))
    needs = first_party(read_project(folder)["project"])
    assert needs
    assert all(need.endswith(f">={major}.{minor}.0,<{major}.{minor + 1}") for need in needs), needs


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.startswith("plugins/")])
def test_a_plugin_depends_on_core_and_on_no_other_plugin(folder):
    (need,) = first_party(read_project(folder)["project"])
    assert need.startswith("polyattn>=")


def test_import_contracts_cover_every_distribution():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    everything = {import_name(folder) for folder in FOLDERS}
    plugins = {import_name(folder) for folder in FOLDERS if folder.startswith("plugins/")}
    contracts = {contract["name"]: contract for contract in settings["contracts"]}
    assert set(settings["root_packages"]) == everything
    assert set(contracts["A plugin knows the core and no other plugin"]["modules"]) == plugins
    assert set(contracts["A plugin uses nothing above the backend protocol"]["source_modules"]) == plugins
    forbidden = set(contracts["Core knows no plugin, no integration and no example"]["forbidden_modules"])
    assert everything - {"polyattn"} <= forbidden


def test_installing_the_workspace_without_dependencies_leaves_nothing_out():
    """The Makefile installs the distributions with --no-deps, so requirements-dev.txt must name what they need."""
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    named = {line.split(">")[0].strip().lower() for line in lines if line and line[0] not in "#-"}
    needed = {
        need.split(">")[0].strip().lower()
        for folder in FOLDERS
        for need in read_project(folder)["project"].get("dependencies", [])
        if not need.startswith("polyattn")
    }
    assert needed <= named
