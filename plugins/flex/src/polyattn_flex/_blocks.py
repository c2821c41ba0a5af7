"""The block table of a mask: which tiles of queries and keys a kernel visits, 128 of each unless others are asked for.

A tile is *full* when every query in it sees every key in it, *partial* when some do; a kernel evaluates the mask in
partial tiles only and never visits the rest. Tiles that stick out over the last query or key are never full, as in
torch's own ``create_block_mask``, whose tables these are, without its ``[Q, K]`` temporaries of int64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries and keys of a tile; torch's default, which the tile sizes of its kernels divide.
TILE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The tiles to visit, in rows of R = ceil(Q / tile) query tiles and C = ceil(K / tile) key tiles.

    Attributes:
        partial_count: ``Int32[B|1, H|1, R]``.
        partial_index: ``Int32[B|1, H|1, R, C]``; the first ``partial_count`` of a row count, ascending.
        full_count, full_index: likewise.
        key_partial_count, key_partial_index, key_full_count, key_full_index: the same by key tile, ``[.., C]`` and
            ``[.., C, R]``, which the backward kernel walks; ``None`` for inference.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    key_partial_count: Tensor | None = None
    key_partial_index: Tensor | None = None
    key_full_count: Tensor | None = None
    key_full_index: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The tables that are there, in the order of the attributes."""
        every = [getattr(self, field.name) for field in dataclasses.fields(self)]  # vars() stops Dynamo of torch 2.10
        return [x for x in every if x is not None]

    def to(self, device: torch.device) -> Blocks:
        """The tables on ``device``."""
        return Blocks(*(x.to(device) for x in self.tensors()))


def from_ranges(start: Tensor, stop: Tensor, kv_len: int, *, backward: bool, tile: int = TILE) -> Blocks:
    """The table of a mask in which each query sees some runs of keys, of which no two touch.

    Time and memory are linear in the runs of all queries plus the number of tiles.

    Args:
        start: ``Int64[B, Q, runs]``, the first key of each run that a query sees.
        stop: ``Int64[B, Q, runs]``, the key after its last one; a run with ``stop <= start`` is empty.
        kv_len: K.
        backward: whether the backward kernel will run.
        tile: queries and keys of a tile.
    """
    batch, q_len, runs = start.shape
    rows, columns = -(-q_len // tile), -(-kv_len // tile)
    row = torch.arange(q_len, device=start.device).div(tile, rounding_mode="floor") * (columns + 1)
    row = row.repeat_interleave(runs)
    start, stop = start.flatten(1), stop.flatten(1)

    def queries_in(first: Tensor, last: Tensor) -> Tensor:
        """How many runs in each row of tiles have a tile among their ``first .. last - 1``: ``[B, 1, R, C]``."""
        some = (last > first).int()
        change = torch.zeros(batch, rows * (columns + 1), dtype=torch.int32, device=start.device)
        change.scatter_add_(1, row + first, some).scatter_add_(1, row + last, -some)
        return change.view(batch, 1, rows, columns + 1)[..., :-1].cumsum(-1)

    live = stop > start
    first, last = torch.where(live, start, 0), torch.where(live, stop, 0)
    touched = queries_in(first // tile, (last + tile - 1) // tile) > 0
    full = queries_in((first + tile - 1) // tile, last // tile) == tile
    return _table(touched, full, backward=backward)


def from_rows(rows: Callable[[int, int], Tensor], q_len: int, *, backward: bool, tile: int = TILE) -> Blocks:
    """The table of any mask.

    Args:
        rows: gives rows ``start .. stop - 1`` of the mask, ``Bool[B|1, H|1, stop - start, K]``; asked for one row of
            tiles at a time, so that nothing of size Q x K is needed.
        q_len: Q.
        backward: whether the backward kernel will run.
        tile: queries and keys of a tile.
    """
    counts = []
    for start in range(0, q_len, tile):
        by_key = rows(start, min(start + tile, q_len)).sum(2, keepdim=True, dtype=torch.int32)
        by_key = F.pad(by_key, (0, -by_key.shape[3] % tile))
        counts.append(by_key.unflatten(3, (-1, tile)).sum(-1, dtype=torch.int32))
    visible = torch.cat(counts, 2)
    return _table(visible > 0, visible == tile * tile, backward=backward)


def _table(touched: Tensor, full: Tensor, *, backward: bool) -> Blocks:
    partial = touched & ~full
    by_query = (*_listed(partial), *_listed(full))
    return Blocks(*by_query, *_listed(partial.mT), *_listed(full.mT)) if backward else Blocks(*by_query)


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are wanted, and their numbers in front of the others'."""
    order = wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32), order.int()
