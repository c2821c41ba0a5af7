"""A public name that no page explains is public to its authors only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyattn
import polyattn.testing
import polyattn_transformers

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def listed():
    """The names in the first column of the page's tables."""
    first = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", "\n".join(first)))


@pytest.mark.parametrize("module", [polyattn, polyattn.testing, polyattn_transformers], ids=lambda m: m.__name__)
def test_every_public_name_has_a_line_on_the_page_of_names(module):
    assert set(module.__all__) - {"__version__"} <= listed()


def test_the_page_lists_nothing_that_is_not_there():
    modules = (polyattn, polyattn.testing, polyattn_transformers)
    known = {name for module in modules for name in module.__all__}
    assert listed() <= known
