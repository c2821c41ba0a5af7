"""From blocks to tiles: the rectangles of queries and keys that one fused call each computes.

A block is a row of ``MaskLayout.to_blocks()``: inside it query i sees key j iff ``d = i - j + shift`` (both counted
from the block's start) satisfies ``d >= 0`` when causal and ``|d| < window``. A block whose mask is empty or plainly
causal is one tile. Any other is walked in bands of query rows; a band attends to the few keys that it can see under a
small mask that depends on ``d`` alone, so neighbouring bands share it. Work and memory are linear in the length for a
fixed window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

#: Query rows of a band. On CPU 192 is where the fused op starts to work in larger pieces; 128 takes a tenth longer.
BAND = 192

#: The keys of a masked band start at a multiple of this, so that the rows of its scores are aligned.
ALIGNMENT = 16


class Tile(NamedTuple):
    """One fused call.

    Attributes:
        batch: batch row of the layout.
        q_start, q_stop, k_start, k_stop: the rectangle, in indices of the whole tensors.
        causal: the kernel's own top-left causal flag.
        offset: ``None``, or the distance ``d`` of the tile's first query to its first key, which fixes its mask.
        block_causal: whether the mask of ``offset`` is causal.
    """

    batch: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    offset: int | None = None
    block_causal: bool = False


def tiles_of(blocks: Iterable[list[int]], window: int | None, band: int = BAND) -> list[Tile]:
    """The tiles of a block table, in its order; every query row that sees a key lies in exactly one."""
    found: list[Tile] = []
    for batch, q_start, q_stop, k_start, k_stop, shift, causal in blocks:
        if q_start < q_stop and k_start < k_stop:
            _add_tiles(found, batch, q_start, q_stop, k_start, k_stop, shift, bool(causal), window, band)
    return found


def _add_tiles(
    found: list[Tile],
    batch: int,
    q0: int,
    q1: int,
    k0: int,
    k1: int,
    shift: int,
    causal: bool,
    window: int | None,
    band: int,
) -> None:
    if causal and shift < 0:  # the first rows see nothing
        q0, shift = q0 - shift, 0
    rows, keys = q1 - q0, k1 - k0
    if rows <= 0:
        return
    farthest = max(rows - 1 + shift, keys - 1 - shift)
    if window is not None and window > farthest:
        window = None
    if window is None and (not causal or shift >= keys - 1):
        found.append(Tile(batch, q0, q1, k0, k1))
        return
    if window is None and shift == 0:
        found.append(Tile(batch, q0, q1, k0, min(k1, k0 + rows), causal=True))
        return
    start = 0
    if window is not None and causal and shift == 0:
        # The first W rows are an ordinary causal square.
        start = min(window, rows)
        found.append(Tile(batch, q0, q0 + start, k0, min(k1, k0 + start), causal=True))
    for r0 in range(start, rows, band):
        r1 = min(rows, r0 + band)
        lo = 0 if window is None else max(0, r0 + shift - window + 1)
        reach = 1 if causal else (window if window is not None else keys)
        hi = min(keys, r1 - 1 + shift + reach)
        if lo >= hi:
            continue
        nearest, offset = r0 + shift - (hi - 1), r0 + shift - lo
        sees_all = (not causal or nearest >= 0) and (
            window is None or (offset + r1 - 1 - r0 < window and -nearest < window)
        )
        if sees_all:
            found.append(Tile(batch, q0 + r0, q0 + r1, k0 + lo, k0 + hi))
            continue
        early = min(lo, (k0 + lo) % ALIGNMENT)  # hidden by the mask
        first = k0 + lo - early
        found.append(Tile(batch, q0 + r0, q0 + r1, first, k0 + hi, offset=offset + early, block_causal=causal))


def band_mask(tile: Tile, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a tile with an offset: 0 where the query sees the key, ``-inf`` elsewhere."""
    assert tile.offset is not None
    queries, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    rows = torch.arange(queries, dtype=torch.int32, device=device)
    # Query i sees key j where least <= i - j < most. Both are cut to what i - j can be, which int32 holds.
    least, most = -keys, queries
    if window is not None:
        least, most = 1 - window - tile.offset, window - tile.offset
    if tile.block_causal:
        least = -tile.offset
    apart = rows[:, None] - torch.arange(keys, dtype=torch.int32, device=device)[None, :]
    visible = (apart >= min(max(least, -keys), queries)) & (apart < min(max(most, -keys), queries))
    return additive(visible, dtype)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as the fused kernels take it: 0 where visible, ``-inf`` elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
