"""Small layouts of every kind, by name: what every backend must honour or refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from polyattn import MaskLayout, StructuredMask


def _bools(*rows: str) -> Tensor:
    """``"1101"`` as booleans, one string a row."""
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def _random(*shape: int) -> Tensor:
    """A random mask in which every row sees something."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    return mask


def _block_diffusion() -> MaskLayout:
    """Drafts of a block-diffusion model: each block of 3 queries sees the context before its anchor, and itself."""
    block = torch.arange(9) // 3
    anchors = torch.tensor([2, 4, 5])
    context = torch.arange(6) < anchors[block].unsqueeze(-1)
    return MaskLayout.dense(torch.cat([context, block.unsqueeze(-1) == block], -1))


def _every_second_or_self(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & ((q_idx - kv_idx) % 2 == 0)


def _per_head_reach(_b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= h)


def _decoded_positions() -> MaskLayout:
    """Queries at positions 3, 5, 6 of a cache whose slots hold positions 0, 1, 2, 6, 5, 4, 3."""
    mask = StructuredMask(
        causal=True, q_positions=torch.tensor([[3, 5, 6]]), kv_positions=torch.tensor([[0, 1, 2, 6, 5, 4, 3]])
    )
    return MaskLayout(q_len=3, kv_len=7, batch=1, heads=1, visibility=mask)


def _window(left: int | None, right: int | None, length: int = 9) -> MaskLayout:
    return MaskLayout(length, length, visibility=StructuredMask(window=(left, right)))


def _of_each_document(**lengths: list[list[int]]) -> MaskLayout:
    """Documents of 4, 5 and 3 tokens in a window of 2, of which each has its own length of prefix or sinks."""
    packed = MaskLayout.packed([4, 5, 3], window=2, sink_tokens=1)
    fields = {name: torch.tensor(values) for name, values in lengths.items()}
    return dataclasses.replace(packed, visibility=cast("StructuredMask", packed.visibility).replace(**fields))


def _draft_steps(length: int, steps: int) -> MaskLayout:
    """A draft of several steps: a query sees the first step's keys up to its own, and one key of each later step."""
    own = torch.arange(length)[None]
    step = torch.arange(steps).repeat_interleave(length)[None]

    def keys_of(number: int, window: int | None) -> MaskLayout:
        mask = StructuredMask(
            causal=True,
            window=window,
            q_positions=own,
            kv_positions=own.repeat(1, steps),
            q_segments=torch.full_like(own, number),
            kv_segments=step,
        )
        return MaskLayout(length, steps * length, visibility=mask)

    layout = keys_of(0, None)
    for number in range(1, steps):
        layout = layout | keys_of(number, 1)
    return layout


def _listed(heads: int, q_len: int, count: int, most: int) -> Tensor:
    """Keys below ``most`` of each query, the first one always, some twice, gaps: ``Int[1, heads, q_len, count]``."""
    listed = torch.randint(-1, most, (1, heads, q_len, count), generator=torch.Generator().manual_seed(most))
    listed[..., 0] = 0
    return listed


def _in_part(length: int) -> MaskLayout:
    """A window, and for every third query all keys: of the second part most rows see nothing."""
    third = torch.arange(length) % 3 == 1
    return MaskLayout.causal(length, window=2) | MaskLayout.full(length, active_queries=third[None])


#: A tree of three levels and one beside it: nodes before each node, and their numbers of tokens.
PARENTS, LENGTHS = [-1, 0, 0, 1, 1, -1, 5], [3, 2, 1, 2, 3, 2, 1]

#: name -> builder, on the CPU. In these every row sees something.
ORDINARY: dict[str, Callable[[], MaskLayout]] = {
    "full": lambda: MaskLayout.full(7),
    "full_fewer_queries": lambda: MaskLayout.full(5, 9),
    "full_more_queries": lambda: MaskLayout.full(9, 4),
    "full_window": lambda: MaskLayout(
        q_len=9, kv_len=9, batch=1, heads=1, visibility=StructuredMask(causal=False, window=3)
    ),
    "causal": lambda: MaskLayout.causal(8),
    "causal_one_query": lambda: MaskLayout.causal(1, 6),
    "causal_fewer_queries": lambda: MaskLayout.causal(3, 9),
    "causal_window": lambda: MaskLayout.causal(10, window=3),
    "causal_window_fewer_queries": lambda: MaskLayout.causal(4, 11, window=3),
    "packed": lambda: MaskLayout.packed([3, 1, 5]),
    "packed_one_document": lambda: MaskLayout.packed([9]),
    "packed_rows": lambda: MaskLayout.packed([[4, 2, 3], [1, 8]]),
    "packed_both_ways": lambda: MaskLayout.packed([4, 5], causal=False),
    "packed_window": lambda: MaskLayout.packed([6, 1, 4], window=2),
    "prefix_lm": lambda: MaskLayout.prefix_lm([3], 8),
    "prefix_lm_rows": lambda: MaskLayout.prefix_lm([5, 0], 7),
    "chunked": lambda: MaskLayout.chunked(4, 10),
    "block_causal": lambda: MaskLayout.block_causal(3, 8),
    "two_sided_window": lambda: _window(3, 1),
    "left_window": lambda: _window(2, None),
    "packed_two_sided_window": lambda: MaskLayout.packed([6, 1, 4], causal=False, window=(1, 2)),
    "sink_tokens": lambda: MaskLayout.causal(11, window=3, sink_tokens=2),
    "sink_tokens_fewer_queries": lambda: MaskLayout.causal(4, 11, window=2, sink_tokens=3),
    "packed_sink_tokens": lambda: MaskLayout.packed([6, 2, 5], window=2, sink_tokens=1),
    "sink_tokens_of_each_document": lambda: _of_each_document(sink_lengths=[[1, 3, 0]]),
    "prefix_of_each_document": lambda: _of_each_document(prefix_lengths=[[2, 4, 0]]),
    "tree": lambda: MaskLayout.tree(PARENTS, LENGTHS),
    "tree_window": lambda: MaskLayout.tree(PARENTS, LENGTHS, window=3),
    "tree_both_ways": lambda: MaskLayout.tree(PARENTS, LENGTHS, causal=False),
    "tree_rows": lambda: MaskLayout.tree([[-1, 0, 0], [-1, -1, 1]], [[4, 3, 2], [2, 5, 2]]),
    "tree_part": lambda: MaskLayout.tree(PARENTS, LENGTHS).select_queries(slice(4, 12)),
    "shared_prefix": lambda: MaskLayout.shared_prefix(4, [3, 1, 2]),
    "union": lambda: MaskLayout.causal(9, window=2) | MaskLayout.chunked(4, 9),
    "union_apart": lambda: _draft_steps(5, 3),
    "union_in_part": lambda: _in_part(9),
    "positions": _decoded_positions,
    "selected": lambda: MaskLayout.selected(_listed(1, 6, 3, 9), 9),
    "selected_heads": lambda: MaskLayout.selected(_listed(4, 7, 3, 7), 7, causal=True),
    "selected_blocks": lambda: MaskLayout.selected(_listed(1, 5, 2, 3), 8, block=3),
    "dense": lambda: MaskLayout.dense(_random(6, 8)),
    "dense_rows": lambda: MaskLayout.dense(_random(2, 1, 6, 6)),
    "dense_heads": lambda: MaskLayout.dense(_random(1, 4, 5, 6)),
    "block_diffusion": _block_diffusion,
    "mask_mod": lambda: MaskLayout.from_mod(_every_second_or_self, q_len=7, kv_len=7),
    "mask_mod_heads": lambda: MaskLayout.from_mod(_per_head_reach, q_len=6, kv_len=6, heads=4),
}

#: In these some rows see nothing, or some keys are seen by no row.
WITH_DEAD: dict[str, Callable[[], MaskLayout]] = {
    "first": lambda: MaskLayout.dense(_random(6, 6) & (torch.arange(6) != 0).unsqueeze(-1)),
    "middle": lambda: MaskLayout.dense(_random(6, 6) & (torch.arange(6) != 3).unsqueeze(-1)),
    "last": lambda: MaskLayout.dense(_random(6, 6) & (torch.arange(6) != 5).unsqueeze(-1)),
    "per_head": lambda: MaskLayout.dense(
        _random(1, 4, 6, 6) & (torch.arange(6) != torch.arange(4).unsqueeze(-1)).view(1, 4, 6, 1)
    ),
    "element": lambda: MaskLayout.dense(_random(2, 1, 5, 5) & torch.tensor([True, False]).view(2, 1, 1, 1)),
    "all": lambda: MaskLayout.dense(torch.zeros(4, 5, dtype=torch.bool)),
    "unseen_keys": lambda: MaskLayout.dense(_random(6, 7) & (torch.arange(7) % 3 != 1)),
    "causal_more_queries": lambda: MaskLayout.causal(8, 3),
    "right_padding": lambda: MaskLayout.padded(_bools("111100", "111111")),
    "left_padding": lambda: MaskLayout.padded(_bools("001111", "111111")),
    "left_padding_window": lambda: MaskLayout.padded(_bools("0001111", "0111111"), window=2),
    "padding_both_ways": lambda: MaskLayout.padded(_bools("11100", "11111", "00000"), causal=False),
    "padding_with_holes": lambda: MaskLayout.padded(_bools("0110101", "1100011")),
    "padded_cache": lambda: MaskLayout.padded(_bools("11111000", "11100000"), q_len=2, causal=False),
    "inactive": lambda: MaskLayout.causal(6, active_queries=_bools("101100", "000111")),
    "inactive_padding": lambda: MaskLayout.padded(
        _bools("1111000", "1111110"), active_queries=_bools("1111000", "1111110")
    ),
    "inactive_packed": lambda: MaskLayout.packed([3, 4], active_queries=_bools("1110110")),
    "selected_none": lambda: MaskLayout.selected(_listed(1, 6, 3, 9).masked_fill(torch.arange(6)[:, None] == 2, -1), 9),
    "tree_some_keys": lambda: MaskLayout.tree(PARENTS, LENGTHS).select_keys([1, 4, 6, 8, 12]),
    "inactive_union": lambda: (
        MaskLayout.causal(7, window=2, active_queries=_bools("1100101"))
        | MaskLayout.padded(_bools("0110000"), causal=False, active_queries=_bools("0101001"), q_len=7)
    ),
}

LAYOUTS = {**ORDINARY, **WITH_DEAD}

#: Long enough for lowerings that walk bands, blocks or documents.
LONG: dict[str, Callable[[], MaskLayout]] = {
    "causal": lambda: MaskLayout.causal(300),
    "causal_window": lambda: MaskLayout.causal(601, window=70),
    "full_window": lambda: MaskLayout(
        q_len=401, kv_len=401, batch=1, heads=1, visibility=StructuredMask(causal=False, window=65)
    ),
    "packed": lambda: MaskLayout.packed([130, 1, 200, 64, 5]),
    "packed_window": lambda: MaskLayout.packed([290, 40, 260], window=33),
    "padding": lambda: MaskLayout.padded(torch.arange(300) < torch.tensor([[300], [131]])),
    "chunked": lambda: MaskLayout.chunked(128, 333),
    "prefix_lm": lambda: MaskLayout.prefix_lm([140], 290),
    "sink_tokens": lambda: MaskLayout.causal(500, window=70, sink_tokens=5),
    "tree": lambda: MaskLayout.tree([-1, 0, 0, 1, 1, 2], [150, 40, 200, 33, 65, 70]),
    "union": lambda: _draft_steps(200, 3),
    "union_in_part": lambda: _in_part(210),
}
