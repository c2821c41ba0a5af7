"""A field that StructuredMask gets tomorrow: whoever was not changed refuses it or goes dense, with right numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn
from polyattn import FEATURES, AttentionRequest, LayoutError, MaskLayout, StructuredMask
from polyattn._features import features_of
from polyattn._layout.structured import WORDS

SUPPORT = Path(__file__).parents[1] / "support"
#: What a new field takes: a line in the mask, one in the formula, one word in the list, and what the word stands for.
CHANGES = {
    "_layout/structured.py": {
        "    chunk_size: int | None = None\n": "    chunk_size: int | None = None\n    dilation: int | None = None\n",
        "        if self.causal:\n            tests": (
            "        if self.dilation is not None:\n            tests.append((q - k) % self.dilation == 0)\n"
            "        if self.causal:\n            tests"
        ),
        '    "chunk_size": "chunked",\n': '    "chunk_size": "chunked",\n    "dilation": "dilation",\n',
    },
    "_reasons.py": {'    "chunked",\n': '    "chunked",\n    "dilation",\n'},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the backends and operations make of a core with one field more."""
    root = tmp_path_factory.mktemp("core")
    core = root / "polyattn"
    shutil.copytree(Path(polyattn.__file__).parent, core, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        text = (core / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{name} has no longer one line {old!r}"
            text = text.replace(old, new)
        (core / name).write_text(text)
    run = subprocess.run(
        [sys.executable, SUPPORT / "dilated.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(SUPPORT)]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["core"].startswith(str(root))
    assert "dilation" in result["field"]
    return result


def test_every_backend_that_was_not_changed_refuses_a_new_field_by_its_word(found):
    names = ("eager", "sdpa", "flex_attention", "flex_attention uncompiled", "fa")
    assert {name for name, features in found["refused"].items() if "dilation" in features} == set(names)


def test_a_backend_that_claims_the_word_and_was_not_changed_otherwise_goes_dense_with_right_numbers(found):
    assert found["claimed"].keys() == {"eager", "sdpa", "flex_attention"}
    assert max(found["claimed"].values()) < 1e-12
    assert found["compiled flex is dense"]


def test_a_backend_without_a_dense_path_refuses_though_it_claims_the_word(found):
    assert found["claimed by fa"] == ["causal"]


def test_every_operation_keeps_a_new_field(found):
    assert {name: right for name, right in found["operations"].items() if not right} == {}


def test_the_words_that_layouts_use_and_the_listed_features_are_the_same():
    """Every word in use is listed, and every listed word is in use."""
    import torch

    active = torch.ones(1, 4, dtype=torch.bool)
    ids = torch.zeros(1, 4, dtype=torch.int32)
    everything = {"causal": True, "window": 2, "chunk_size": 2, "kv_valid": active, "prefix_lengths": ids[:, 0]}
    everything |= {"q_segments": ids, "kv_segments": ids, "kv_segment_ends": ids + 1, "sink_lengths": ids[:, 0]}
    masks = [StructuredMask(window=(1, 2)), StructuredMask(**everything, q_positions=ids)]
    assert masks[1].given() == WORDS.keys() - {"kv_positions"}
    layouts = [MaskLayout(4, 4, visibility=mask, active_queries=active) for mask in masks]
    layouts += [layouts[0] | layouts[1], MaskLayout.cached(torch.tensor([4]), 4, 4)]
    layouts += [MaskLayout.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int64), 4)]
    layouts += [MaskLayout.dense(active.expand(1, 2, 4, 4)), MaskLayout.from_mod(_all, q_len=4, kv_len=4)]
    request = AttentionRequest(
        batch=1, heads=4, kv_heads=2, head_dim=8, v_head_dim=4, dtype=torch.float32, device=torch.device("cpu"),
        dropout_p=0.5, training=True, softcap=1.0, has_bias=True, has_sinks=True, needs_grad=True,
        needs_bias_grad=True, needs_lse=True, needs_lse_grad=True, deterministic=True,
    )  # fmt: skip
    used = {word for layout in layouts for word in features_of(layout, request)}
    # Other dtypes are words like this one; second derivatives are asked of autograd and not of a request.
    assert used | {"float64", "bfloat16", "float16", "second_order"} == set(FEATURES)


def _all(_b, _h, q_idx, _kv_idx):
    return q_idx >= 0


def test_a_structure_of_another_class_is_refused_whatever_it_adds():
    class Louder(StructuredMask):
        pass

    class Callable(StructuredMask):
        def __call__(self, b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

    for kind in (Louder, Callable):
        with pytest.raises(LayoutError, match=rf"got {kind.__name__}, a subclass whose own rules nobody here knows"):
            MaskLayout(4, 4, visibility=kind(causal=True))


def test_no_backend_computes_its_abilities_from_the_list_of_all_features():
    root = Path(__file__).parents[2]
    folders = [root / "plugins", root / "examples", root / "cli/src/polyattn_cli/template"]
    sources = [path for folder in folders for path in [*folder.rglob("*.py"), *folder.rglob("*.jinja")]]
    assert len(sources) > 30
    assert [str(path) for path in sources if "FEATURES" in path.read_text(encoding="utf-8")] == []
