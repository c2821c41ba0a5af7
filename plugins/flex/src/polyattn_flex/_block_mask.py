"""Layouts as block masks of FlexAttention: for the backend, and for who calls torch's kernel directly."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout
from polyattn.kernels import check_layout_type
from polyattn.messages import shown
from polyattn_flex._blocks import TILE, Blocks, from_ranges, from_rows
from polyattn_flex._mods import Mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Of keys that a query sees; a partial tile evaluates all of them for each of its elements.
MAX_RUNS = 16


def block_mask(layout: MaskLayout, *, device: torch.device | str, block_size: int = TILE) -> BlockMask:
    """A layout as the ``block_mask`` of ``torch.nn.attention.flex_attention``.

    Where :meth:`MaskLayout.key_intervals` knows the runs of keys that each query sees, time and memory are linear in
    them and in the tiles, and the mask function compares a key with their ends. Any other layout (dense, a
    ``mask_mod``, more than 16 runs for a query) is read by ``block_size`` rows at a time, and the mask function is its
    own.

    Args:
        layout: of batch 1 (or heads 1) for any number of them.
        device: of the tensors that will be attended to. What a ``mask_mod`` of the layout captures must lie there.
        block_size: queries and keys of a tile; a multiple of the tiles of torch's kernels, see ``create_block_mask``.

    Returns:
        Its tables are those of ``create_block_mask``, ``[B|1, H|1, ...]``, with those of the backward.

    Raises:
        LayoutError: ``layout`` is not a MaskLayout or is empty, or ``block_size`` is not an int of at least 1.
    """
    from polyattn_flex._kernels import made

    check_layout_type(layout)
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise LayoutError(f"block_size must be an int >= 1, the queries and keys of a tile, got {shown(block_size)}")
    if 0 in (layout.batch, layout.q_len, layout.kv_len):
        raise LayoutError(
            f"layout must have batch rows, queries and keys, got {layout.batch}, {layout.q_len} and {layout.kv_len}: "
            "FlexAttention takes no empty block mask; attention(..., backend='flex_attention') does without one"
        )
    layout = layout.to(device)
    mask: Mask
    found = of_intervals(layout, torch.device(device), backward=True, tile=block_size)
    if found is None:
        read = functools.partial(layout.dense_rows, device=device)
        blocks, mask = from_rows(read, layout.q_len, backward=True, tile=block_size), layout.to_mask_mod()
    else:
        blocks, mask = found
    return made(blocks, mask, layout.q_len, layout.kv_len, block_size)


def of_intervals(
    layout: MaskLayout, device: torch.device, *, backward: bool, tile: int = TILE
) -> tuple[Blocks, tuple[Tensor, ...]] | None:
    """The tiles of a layout, and of each run of keys that a query sees the first and the one after its last.

    Returns:
        The latter as ``Int32[B|1, Q]`` each; ``None`` where the runs are not known, or are many.
    """
    intervals = layout.key_intervals(max_runs=MAX_RUNS)
    if intervals is None:
        return None
    start, stop = intervals.unbind(-1)
    blocks = from_ranges(start, stop, layout.kv_len, backward=backward, tile=tile).to(device)
    # A kernel of inductor knows tensors by their strides, which a view of one query keeps through a copy.
    ends = intervals.flatten(2).unbind(-1)
    return blocks, tuple(torch.empty(x.shape, dtype=torch.int32, device=device).copy_(x) for x in ends)
