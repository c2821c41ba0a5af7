"""Every mask of xformers and attention-gym as a layout, against a plain rule for each pair."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mask_kinds import PEERS

KINDS = {f"{peer}.{kind.name}": kind for peer, kinds in PEERS.items() for kind in kinds}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_layout_says_what_the_mask_of_the_peer_means_and_has_the_blocks_that_the_page_promises(kind):
    found = []
    for values in kind.values:
        layout, named = kind.layout(values), SimpleNamespace(**values)
        sizes = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
        want = torch.tensor([kind.sees(named, *pair) for pair in itertools.product(*map(range, sizes))]).view(sizes)
        assert want.any()
        assert not want.all()
        assert torch.equal(layout.to_dense().expand(sizes), want), values
        found.append(layout.max_runs)
    assert (None if None in found else max(found)) == kind.blocks


def test_the_page_holds_these_kinds():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("masks_page", root / "tools" / "masks.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (root / "docs" / "masks.md").read_text(encoding="utf-8") == tool.page(), "run: python tools/masks.py"
