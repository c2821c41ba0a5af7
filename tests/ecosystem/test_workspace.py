"""The workspace has one list of distributions; this is what each of them must be, and who must know it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from polyattn_transformers._versions import NEWEST, OLDEST

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings tomli
    import tomli as tomllib  # type: ignore[no-redef]

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


def test_each_extra_of_core_brings_distributions_of_the_workspace_in_its_own_version():
    project = read_project("core")["project"]
    here = {read_project(folder)["project"]["name"] for folder in FOLDERS}
    extras = {name: [Requirement(need) for need in needs] for name, needs in project["optional-dependencies"].items()}
    for need in itertools.chain(*extras.values()):
        if need.name != "polyattn" and need.name.startswith("polyattn"):
            assert need.name in here
            assert str(need.specifier) == f"=={project['version']}"
    brought = {need.name for name in extras["all"][0].extras for need in extras[name]}
    bridge = {"polyattn-transformers", "polyattn-conformance"}
    assert brought == {
        name for name in here - bridge - {"polyattn"} if name.startswith("polyattn-") and "example" not in name
    }


def test_a_command_belongs_to_one_distribution():
    commands = [name for folder in FOLDERS for name in read_project(folder)["project"].get("scripts", {})]
    assert len(commands) == len(set(commands))
    assert "scripts" not in read_project("core")["project"]


def test_import_contracts_cover_every_distribution():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    everything = {import_name(folder) for folder in FOLDERS}
    plugins = {import_name(folder) for folder in FOLDERS if folder.startswith("plugins/")}
    contracts = {contract["name"]: contract for contract in settings["contracts"]}
    assert set(settings["root_packages"]) == everything
    assert set(contracts["A plugin knows the core and no other plugin"]["modules"]) == plugins
    assert set(contracts["A plugin uses nothing above the backend protocol"]["source_modules"]) == plugins
    forbidden = set(contracts["Core knows no wing, no plugin, no integration and no example"]["forbidden_modules"])
    assert everything - {"polyattn"} <= forbidden
    strangers = set(contracts["Everything outside core uses its public names only"]["source_modules"])
    assert strangers == everything - {"polyattn"}
    assert set(contracts["No circle of imports anywhere"]["ancestors"]) == everything
    assert "exclude_type_checking_imports" not in settings, "an import for types is an arrow too"


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


def ranges_of_others(folder):
    project = read_project(folder)["project"]
    lists = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    return [need for need in map(Requirement, itertools.chain(*lists)) if not need.name.startswith("polyattn")]


RANGES = {need.name: need.specifier for folder in FOLDERS for need in ranges_of_others(folder)}


def test_every_distribution_accepts_the_same_versions_of_a_package_and_says_from_which_on():
    for folder in FOLDERS:
        for need in ranges_of_others(folder):
            assert need.specifier == RANGES[need.name], f"{folder}: {need}"
    for name, accepted in RANGES.items():
        assert [part.operator for part in accepted].count(">=") == 1, f"{name}{accepted}"


def test_what_strangers_and_developers_need_starts_at_the_same_versions():
    texts = [
        *(ROOT / folder / "pyproject.toml" for folder in STRANGERS),
        ROOT / "cli/src/polyattn_cli/template/pyproject.toml.jinja",
        ROOT / "requirements-dev.txt",
    ]
    for path in texts:
        for name, oldest in re.findall(r"([\w-]+)>=([\d.]+)", path.read_text(encoding="utf-8")):
            if name in RANGES:
                assert f">={oldest}" in map(str, RANGES[name]), f"{path}: {name}>={oldest}"


def test_the_pinned_versions_lie_inside_the_ranges():
    pins = re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"torch", "transformers"} <= {name for name, _ in pins}
    for name, version in pins:
        assert version in RANGES.get(name, SpecifierSet()), f"{name} {version} is outside {RANGES[name]}"


def test_the_bridge_registers_with_the_transformers_that_its_package_accepts():
    first, (major, last) = OLDEST, NEWEST
    assert RANGES["transformers"] == SpecifierSet(f">={first[0]}.{first[1]},<{major}.{last + 1}")


def constraints(which):
    command = [sys.executable, ROOT / "tools" / "bounds.py", which]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {match[1]: match[2] for match in (re.fullmatch(r"([\w-]+)(?:==)?(.+)", line) for line in lines)}


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = constraints("oldest")
    assert oldest.keys() == RANGES.keys()
    assert all(f">={version}" in map(str, RANGES[name]) for name, version in oldest.items())


def test_the_newest_versions_lie_below_the_upper_bounds():
    newest = constraints("newest")
    assert newest.keys() == {name for name, bounds in RANGES.items() if "<" in str(bounds)}
    assert all(bound in map(str, RANGES[name]) for name, bound in newest.items())
