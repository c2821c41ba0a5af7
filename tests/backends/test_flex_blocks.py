"""The block table of flex_attention: which tiles a kernel visits, found without looking at every element."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn import AttentionRequest, MaskLayout, StructuredMask, backends
from polyattn_flex._blocks import from_ranges, from_rows

pytestmark = pytest.mark.usefixtures("any_compiler")
_VALID = torch.arange(300) < torch.tensor([[300], [131], [0]])

LAYOUTS = {
    "full": lambda: MaskLayout.full(256),
    "causal": lambda: MaskLayout.causal(300),
    "causal_more_keys": lambda: MaskLayout.causal(129, 513),
    "causal_more_queries": lambda: MaskLayout.causal(300, 127),
    "causal_window": lambda: MaskLayout.causal(700, window=130),
    "full_window": lambda: MaskLayout(500, 500, visibility=StructuredMask(window=128)),
    "packed": lambda: MaskLayout.packed([[128, 1, 255], [384]]),
    "packed_both_ways": lambda: MaskLayout.packed([256, 300], causal=False),
    "padding": lambda: MaskLayout.padded(_VALID),
    "left_padding_window": lambda: MaskLayout.padded(_VALID.flip(1), window=64),
    "prefix_lm": lambda: MaskLayout.prefix_lm([200, 0], 257),
    "chunked": lambda: MaskLayout.chunked(128, 400),
    "inactive": lambda: MaskLayout.causal(260, active_queries=torch.arange(260)[None] % 3 > 0),
    "one_query": lambda: MaskLayout.causal(1, 400, window=150),
}


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that an operation returns: all together, and of the largest."""

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.total += x.numel() * x.element_size()
                self.largest = max(self.largest, x.numel() * x.element_size())
        return result


def _request(layout, batch=None, *, heads=2):
    return AttentionRequest(
        batch=layout.batch if batch is None else batch,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _same(count, index, wanted_count, wanted_index):
    assert torch.equal(count, wanted_count)
    listed = torch.arange(index.shape[-1]) < count.unsqueeze(-1)
    assert torch.equal(index[listed], wanted_index[listed])


def _assert_equal(blocks, block_mask):
    _same(blocks.partial_count, blocks.partial_index, block_mask.kv_num_blocks, block_mask.kv_indices)
    _same(blocks.full_count, blocks.full_index, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if blocks.key_full_count is not None:
        _same(blocks.key_partial_count, blocks.key_partial_index, block_mask.q_num_blocks, block_mask.q_indices)
        _same(blocks.key_full_count, blocks.key_full_index, block_mask.full_q_num_blocks, block_mask.full_q_indices)


@pytest.mark.parametrize("name", LAYOUTS)
def test_structure_gives_the_block_mask_that_torch_finds_element_by_element(name):
    layout = LAYOUTS[name]()
    sizes = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    block_mask = create_block_mask(layout.to_mask_mod(), *sizes, device="cpu")
    _assert_equal(from_ranges(*layout.key_intervals().unbind(-1), layout.kv_len, backward=True), block_mask)
    _assert_equal(from_rows(layout.dense_rows, layout.q_len, backward=True), block_mask)


def test_a_mask_by_head_gets_tables_by_head():
    layout = MaskLayout.from_mod(lambda b, h, q, k: (k <= q) & (q - k < 100 * (h + 1)), q_len=300, kv_len=300, heads=4)
    block_mask = create_block_mask(layout.visibility, 1, 4, 300, 300, device="cpu")
    _assert_equal(from_rows(layout.dense_rows, 300, backward=False), block_mask)


def test_building_from_structure_at_16384_takes_neither_time_nor_memory():
    backend, layout = backends.get("flex_attention"), MaskLayout.causal(16384, window=512)
    backend.prepare(layout, _request(layout))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin = time.thread_time()
        backend.prepare(layout, _request(layout))
        seconds = time.thread_time() - begin
    finally:
        torch.set_num_threads(threads)
    with Allocations() as allocations:
        backend.prepare(layout, _request(layout))
    assert seconds < 0.2
    assert allocations.total < 64 * 2**20


def test_a_mask_mod_is_evaluated_in_blocks_of_rows():
    layout = MaskLayout.from_mod(lambda b, h, q, k: (q - k).abs() < 256, q_len=2048, kv_len=4096)
    with Allocations() as allocations:
        from_rows(layout.dense_rows, layout.q_len, backward=True)
    assert allocations.largest <= 128 * 4096 * 8  # int64 distances of one row of tiles, of sixteen


def test_a_layout_of_several_batch_rows_keeps_a_table_for_each():
    lengths = [100, 300]
    layout = MaskLayout.padded(lengths=lengths, kv_len=300, causal=False)
    blocks = backends.get("flex_attention").prepare(layout, _request(layout)).state.blocks
    assert blocks.partial_count.shape == (2, 1, 3)
    assert (blocks.partial_count + blocks.full_count).tolist() == [[[1, 1, 1]], [[3, 3, 3]]]


def test_a_layout_of_one_batch_row_and_one_head_is_not_expanded():
    layout = MaskLayout.causal(300)
    state = backends.get("flex_attention").prepare(layout, _request(layout, batch=5, heads=8)).state
    assert state.blocks.partial_count.shape == (1, 1, 3)
    assert all(x.shape == (1, 300) for x in state.ranges)


@pytest.mark.parametrize("offset", [torch.tensor([3]), torch.tensor(3), 3], ids=["one_element", "scalar", "int"])
def test_a_mask_mod_may_capture_an_offset_in_any_form(offset):
    layout = MaskLayout.from_mod(lambda b, h, q, k: q + offset >= k, q_len=4, kv_len=8)
    state = backends.get("flex_attention").prepare(layout, _request(layout)).state
    assert torch.equal(state.dense[0, 0], torch.ones(4, 8).tril(3).bool())
