"""The README of a distribution becomes its page in an index: what it shows must run as it stands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.parent.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    for page in sorted(ROOT.glob("*/**/README.md"))
    if (page.parent / "pyproject.toml").is_file() and not any(part.startswith(".") for part in page.parts)
}
SHOWING = [folder for folder, blocks in PAGES.items() if blocks]


@pytest.mark.parametrize("folder", SHOWING)
def test_the_examples_of_a_package_run_as_they_stand(folder):
    names = {}
    for block in PAGES[folder]:
        if 'device="cuda"' in block and not torch.cuda.is_available():
            pytest.skip("the example needs a CUDA device")
        if "flex_attention" in block and not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("the example compiles a kernel, which needs a C++ compiler")
        exec(block, names)


@pytest.mark.parametrize("kind", ["plugins/eager", "plugins/sdpa", "plugins/flex", "plugins/fa2", "plugins/rope/yarn"])
def test_a_plugin_shows_an_example(kind):
    assert kind in SHOWING


@pytest.mark.parametrize("folder", [f for f in PAGES if f.split("/")[0] in {"core", "plugins", "integrations"}])
def test_a_package_says_how_it_is_installed(folder):
    assert "pip install" in (ROOT / folder / "README.md").read_text("utf-8")
