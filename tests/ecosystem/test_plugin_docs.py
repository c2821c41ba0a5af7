"""What the guide for plugin authors shows must run, and what it lists must be true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import polyattn
from polyattn.registry import hooks
from polyattn.registry.loading import BACKEND, ROPE_VARIANT
from polyattn_conformance.trial import assert_reasons

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "plugin-authors.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown():
    """Every name that the code of the guide defines."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        if "backends.register" not in block:  # tested below, and undone
            exec(block, names)
    return names


def test_the_first_backend_computes_and_refuses_the_rest(shown):
    q, k, v = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 5, 8)
    with polyattn.backends.override("my_backend", shown["MyBackend"]()):
        mine = polyattn.attention(q, k, v, polyattn.MaskLayout.full(5), backend="my_backend")
        right = polyattn.attention(q, k, v, polyattn.MaskLayout.full(5), backend="eager")
        torch.testing.assert_close(mine.output, right.output)
        with pytest.raises(polyattn.UnsupportedAttentionError) as refusal:
            polyattn.attention(q, k, v, polyattn.MaskLayout.causal(5), backend="my_backend", return_lse=True)
    assert [reason.feature for reason in refusal.value.reasons] == ["causal", "lse"]


def test_reasons_of_its_own_are_given_all_at_once(shown):
    q = torch.zeros(1, 2, 5, 12)
    request = polyattn.AttentionRequest.of(q, q, q)
    reasons = shown["WideBackend"]().unsupported(polyattn.MaskLayout.full(5), request)
    assert_reasons(reasons)
    assert [reason.code for reason in reasons] == ["no_kernel", "odd_head_dim"]
    assert reasons[0].hint == "pip install my-kernel"


def test_options_come_from_a_config(shown):
    with polyattn.backends.override("my_backend", shown["TunedBackend"]()):
        assert polyattn.backends.resolve("my_backend", {"block": 64}).options.block == 64


def test_the_rope_of_a_config_is_whole(shown):
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    rope = yaml.safe_load(block)["rope"]
    assert rope["variant"] == "my_rope"
    # The variant is the reader's own; `linear` takes the same parameter.
    config = polyattn.AttentionConfig.from_dict({"attn_backend": "eager", "rope": {**rope, "variant": "linear"}})
    assert config.layer(0).rope.parameters["factor"] == 4.0


def test_the_hook_is_one(shown, capsys):
    q = torch.zeros(1, 2, 5, 8)
    plugin = type("Module", (), {"polyattn_prepared": staticmethod(shown["polyattn_prepared"])})
    hooks.register(plugin, "shown")
    try:
        polyattn.attention(q, q, q, polyattn.MaskLayout.full(5), backend="eager")
    finally:
        hooks.unregister("shown")
    assert capsys.readouterr().out == f"eager {polyattn.MaskLayout.full(5).describe()}\n"


def test_a_registration_is_imported_at_the_first_use():
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL) if "register" in block]
    exec(block, {})
    try:
        assert polyattn.backends.info("my_backend").status == "registered"
    finally:
        polyattn.backends.unregister("my_backend")


def test_the_lists_are_those_of_the_code():
    words = " ".join(
        re.findall(r"^\| (?:dtypes|masks|heads|scores|results|else) \| `(.*)` \|$", GUIDE, flags=re.MULTILINE)
    )
    assert set(words.split()) == set(polyattn.FEATURES)
    assert re.findall(r"^\| `(polyattn_\w+)\(", GUIDE, flags=re.MULTILINE) != []
    assert set(re.findall(r"^\| `(polyattn_\w+)\(", GUIDE, flags=re.MULTILINE)) == set(hooks.NAMES)
    versions = {BACKEND.api_versions[-1], ROPE_VARIANT.api_versions[-1]}
    assert versions == {1}
    assert "(backends: 1, RoPE variants: 1)" in GUIDE


@pytest.mark.parametrize("page", ["docs/plugin-authors.md", "SECURITY.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link
