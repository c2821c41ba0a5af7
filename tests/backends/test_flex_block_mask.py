"""``polyattn_flex.block_mask``: a layout as the block mask that torch makes element by element."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from polyattn import LayoutError, MaskLayout, attention
from polyattn_flex import block_mask
from random_layouts import random_layout


def _every_third(_b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & ((q_idx + h) % 3 > 0)


OTHERS = {
    "dense": lambda: MaskLayout.dense(torch.rand(2, 1, 40, 24, generator=torch.Generator().manual_seed(0)) < 0.2),
    "per head": lambda: MaskLayout.from_mod(_every_third, q_len=20, kv_len=20, heads=4),
    "many runs": lambda: MaskLayout.padded(torch.arange(80)[None] % 2 == 0),
    "unread": lambda: MaskLayout.packed(document_ids=torch.arange(40)[None] // 7, validate=False),
    "inactive": lambda: MaskLayout.causal(40, active_queries=torch.arange(40)[None] % 3 > 0),
    "one query": lambda: MaskLayout.causal(1, 50, window=20),
    "nothing": lambda: MaskLayout.padded(lengths=[0], kv_len=20),
}


def assert_same(layout, size):
    """The same function on every pair, and the same tiles: partial, full, by query and by key."""
    found = block_mask(layout, device="cpu", block_size=size)
    shape = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    dense = layout.to_dense().expand(shape)
    assert torch.equal(create_mask(found.mask_mod, *shape, device="cpu"), dense), layout
    want = create_block_mask(layout.to_mask_mod(), *shape, device="cpu", BLOCK_SIZE=size)
    assert found.shape == want.shape
    assert found.BLOCK_SIZE == want.BLOCK_SIZE
    for table in ("kv", "full_kv", "q", "full_q"):
        count, index = getattr(found, f"{table}_num_blocks"), getattr(found, f"{table}_indices")
        other = getattr(want, f"{table}_num_blocks")
        assert torch.equal(count, other), (layout, table)
        listed = torch.arange(index.shape[-1]) < count.unsqueeze(-1)
        assert torch.equal(index[listed], getattr(want, f"{table}_indices")[listed]), (layout, table)


@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_give_the_tiles_that_torch_finds_element_by_element(seed):
    draw = random.Random(seed)
    for _ in range(30):
        assert_same(random_layout(draw), draw.choice((1, 3, 4, 8)))


@pytest.mark.parametrize("name", OTHERS)
def test_layouts_without_intervals_and_odd_ones_give_them_too(name):
    assert_same(OTHERS[name](), 16)


def test_a_long_tree_is_never_written_out(monkeypatch):
    for name in ("to_dense", "dense_rows", "to_mask_mod"):
        monkeypatch.setattr(MaskLayout, name, lambda *_arguments, **_options: pytest.fail("it is written out"))
    layout = MaskLayout.shared_prefix(30_000, [5_000] * 14)
    found = block_mask(layout, device="cpu")
    assert found.shape == (1, 1, 100_000, 100_000)
    # A little more than the pairs that are seen: half of the prefix's square, the prefix by each response, and theirs.
    seen = (30_000**2 / 2 + 14 * (30_000 * 5_000 + 5_000**2 / 2)) / 100_000**2
    assert found.sparsity() == pytest.approx(100 * (1 - seen), abs=0.5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torchs_own_function_computes_the_layout_with_it():
    layout = MaskLayout.tree([-1, 0, 0, 1], [40, 30, 20, 60], window=50) | MaskLayout.causal(150, window=3)
    q, k, v = (torch.randn(2, heads, 150, 16) for heads in (4, 2, 2))
    found = flex_attention(q, k, v, block_mask=block_mask(layout, device=q.device), enable_gqa=True)
    torch.testing.assert_close(found, attention(q, k, v, layout, backend="eager").output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "size", "text"),
    [
        (torch.ones(4, 4).bool(), 128, "layout must be a MaskLayout, got Tensor"),
        (MaskLayout.causal(0, 4), 128, "layout must have batch rows, queries and keys, got 1, 0 and 4"),
        (MaskLayout.causal(4), 0, "block_size must be an int >= 1, .* got 0"),
        (MaskLayout.causal(4), (8, 8), r"block_size must be an int >= 1, .* got \(8, 8\)"),
    ],
)
def test_what_no_block_mask_can_be_made_of_is_refused(layout, size, text):
    with pytest.raises(LayoutError, match=text):
        block_mask(layout, device="cpu", block_size=size)
