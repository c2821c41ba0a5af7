"""A public name that no page explains is public to its authors only."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import polyattn

ROOT = Path(__file__).parents[2]


def names_of_the_page():
    """Module -> the names in the first column of its tables; what stands before the first module is `polyattn`."""
    names = {}
    module = "polyattn"
    for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## `([\w.]+)`", line):
            module = heading[1]
        elif line.startswith("| `"):
            names.setdefault(module, set()).update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return names


PAGE = names_of_the_page()
OTHERS = ["polyattn_context_parallel", "polyattn_fa2", "polyattn_flex", "polyattn_transformers"]
MODULES = ["documents", "kernels", "messages", "registry", "rope", "select", "testing"]


def test_the_page_has_a_section_for_each_public_module():
    assert set(PAGE) == {"polyattn", *OTHERS, *(f"polyattn.{name}" for name in MODULES)}
    core = Path(polyattn.__file__).parent
    found = {path.stem if path.is_file() else path.name for path in core.iterdir()}
    assert {name for name in found if name[0] not in "_." and name != "py"} == set(MODULES)


@pytest.mark.parametrize("name", PAGE)
def test_every_public_name_has_a_line_on_the_page_and_no_other_has(name):
    module = importlib.import_module(name)
    listed = PAGE[name]
    if public := getattr(module, "__all__", None):
        above = set() if name == "polyattn" else PAGE["polyattn"]  # names of `polyattn` have their line there
        assert set(public) - {"__version__"} <= listed | above
        assert listed <= set(public)
    else:
        assert [one for one in listed if not hasattr(module, one)] == []


def imported_from_core(path):
    """``(module, name)`` of every name that a file imports from a public module of core."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # Import contracts keep private modules out.
        if isinstance(node, ast.ImportFrom) and re.match(r"polyattn(\.[a-z]|$)", node.module or ""):
            yield from ((node.module, alias.name) for alias in node.names)


def test_the_wings_and_plugins_use_names_of_the_page_only():
    folders = ("modules", "conformance", "cli", "plugins", "integrations", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).glob("**/src/**/*.py")]
    used = {pair for path in sources for pair in imported_from_core(path)}
    assert used
    unlisted = {
        f"{module}.{name}"
        for module, name in used
        if name not in PAGE.get(module, set()) | PAGE["polyattn"] | {"__version__"}
    }
    assert unlisted == set()
