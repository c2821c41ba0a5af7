"""The documents say what is so: their code runs, and the versions in them are those of the record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polyattn import rope_variants
from rope_golden import DATA

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "rope.md").read_text(encoding="utf-8")
VARIANTS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_code_of_the_guide_runs():
    names = {}
    for block in blocks(GUIDE):
        exec(block, names)
    with rope_variants.override("cosine", names["CosineRope"]()):
        names["TestCosine"]().test_spec_survives_its_canonical_form()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_code_of_a_package_readme_runs(variant):
    readme = (ROOT / "plugins" / "rope" / variant / "README.md").read_text(encoding="utf-8")
    assert f"pip install polyattn polyattn-rope-{variant}" in readme
    (block,) = blocks(readme)
    exec(block, {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_stands_in_the_guide_and_in_its_package_readme(variant):
    (line,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{variant}` |")]
    readme = (ROOT / "plugins" / "rope" / variant / "README.md").read_text(encoding="utf-8")
    for path in (DATA / "specs").glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        for parameter in data["parameters"] if data["variant"] == variant else ():
            assert f"`{parameter}`" in line
            assert f"`{parameter}`" in readme


def test_the_conventions_name_the_versions_of_the_record():
    document = (ROOT / "docs" / "rope-conventions.md").read_text(encoding="utf-8")
    versions = json.loads((DATA / "legacy_bf16.json").read_text(encoding="utf-8"))["versions"]
    for package, name in (("transformers", "transformers"), ("sglang", "SGLang"), ("vllm", "vLLM")):
        assert f"{name} {versions[package]}" in document
