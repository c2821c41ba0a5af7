"""Which tokens belong to which rank, and what a mask asks of them, on intervals: no row of a mask is ever looked at.

A partition cuts the tokens ``0 .. S - 1`` into pieces, each owned by one rank. The bands of a layout
(``layout.to_bands()``) cross the pieces; each crossing shows one run of keys to the queries of one rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn import MaskLayout


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """Who owns which tokens.

    Attributes:
        edges: int64 CPU ``[P + 1]``, ascending from 0 to S: where the pieces begin and end.
        owner: int64 CPU ``[P]``: the rank of each piece.
        ranks: number of ranks; some may own nothing.
    """

    edges: Tensor
    owner: Tensor
    ranks: int

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, int, int]], length: int, ranks: int) -> Partition:
        """From ``(start, stop, rank)`` in any order; empty pieces are left out."""
        kept = sorted(piece for piece in pieces if piece[1] > piece[0])
        edges = torch.tensor([*(start for start, _, _ in kept), length], dtype=torch.int64, device="cpu")
        return cls(edges, torch.tensor([rank for _, _, rank in kept], dtype=torch.int64, device="cpu"), ranks)

    def rows(self, rank: int) -> Tensor:
        """The tokens of a rank in ascending order: int64 CPU ``[n]``."""
        mine = self.owner == rank
        return spread(self.edges[:-1][mine], self.edges[1:][mine])

    def counts(self) -> Tensor:
        """The number of tokens of each rank: int64 ``[ranks]``."""
        return torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, self.owner, self.edges.diff())

    def owner_of(self) -> Tensor:
        """The rank of each token: int64 ``[S]``."""
        return self.owner.repeat_interleave(self.edges.diff())

    def crossings(self, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Which interval meets which piece: the indices of both, for non-empty intervals."""
        first = torch.searchsorted(self.edges, start, right=True) - 1
        last = torch.searchsorted(self.edges, stop)
        which, step = counted(last - first)
        return which, first[which] + step


@dataclasses.dataclass(frozen=True, eq=False)
class Demand:
    """What the queries of each rank ask for.

    Attributes:
        pairs: int64 ``[ranks]``: visible pairs of queries and keys, over all batch rows of the layout.
        rank, start, stop: int64 ``[N]``: the runs of keys that a rank's queries see in any batch row, ascending.
        keys: int64 ``[ranks, ranks]``: how many keys of rank j the queries of rank i see.
    """

    pairs: Tensor
    rank: Tensor
    start: Tensor
    stop: Tensor
    keys: Tensor

    @classmethod
    def of(cls, layout: MaskLayout, partition: Partition) -> Demand:
        """Read off the bands; a layout without bands is taken to show everything."""
        _, q_start, q_stop, k_start, k_stop, low, high = bands_of(layout)
        band, piece = partition.crossings(q_start, q_stop)
        owner = partition.owner[piece]
        width, low, high = (k_stop - k_start)[band], low[band], high[band]
        first = torch.maximum(q_start[band], partition.edges[piece]) - q_start[band]
        last = torch.minimum(q_stop[band], partition.edges[piece + 1]) - q_start[band]
        seen = _sum(last - low + 1, width) - _sum(first - low + 1, width)
        hidden = _sum(last - high, width) - _sum(first - high, width)
        pairs = torch.zeros(partition.ranks, dtype=torch.int64).index_add_(0, owner, seen - hidden)
        start = k_start[band] + (first - high).clamp(min=0)
        stop = k_start[band] + torch.minimum(last - low, width)
        live = stop > start
        owner, start, stop = _joined(owner[live], start[live], stop[live], layout.kv_len + 1)
        run, piece = partition.crossings(start, stop)
        length = torch.minimum(stop[run], partition.edges[piece + 1]) - torch.maximum(
            start[run], partition.edges[piece]
        )
        keys = torch.zeros(partition.ranks**2, dtype=torch.int64)
        keys.index_add_(0, owner[run] * partition.ranks + partition.owner[piece], length)
        return cls(pairs, owner, start, stop, keys.view(partition.ranks, partition.ranks))

    def needed(self, rank: int) -> Tensor:
        """The keys that the rank's queries see, ascending: int64 CPU ``[n]``."""
        mine = self.rank == rank
        return spread(self.start[mine], self.stop[mine])


def bands_of(layout: MaskLayout) -> Tensor:
    """The bands of a layout that show something, ``[7, N]``; one of everything where it has none."""
    bands = layout.to_bands()
    if bands is None:
        q, k = layout.q_len, layout.kv_len
        bands = torch.tensor([[0, 0, q, 0, k, -k, q]], dtype=torch.int64, device="cpu")
    return bands[(bands[:, 2] > bands[:, 1]) & (bands[:, 4] > bands[:, 3])].T.contiguous()


def documents_of(layout: MaskLayout) -> list[tuple[int, int]]:
    """Where no query before sees a key after, nor the reverse: the connected parts of the bands, as ``(start, stop)``.

    Tokens that no band holds make parts of their own.
    """
    _, q_start, q_stop, k_start, k_stop, _, _ = bands_of(layout)
    start, stop = torch.minimum(q_start, k_start), torch.maximum(q_stop, k_stop)
    whole = torch.zeros_like(start)
    _, start, stop = _joined(whole, start, stop, layout.kv_len + 1, touching=False)
    edges = sorted({0, layout.q_len, *start.tolist(), *stop.tolist()})
    return list(itertools.pairwise(edges))


def counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of ``counts`` things, again and again: which, and the how-manieth of it."""
    which = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return which, torch.arange(len(which), device="cpu") - (counts.cumsum(0) - counts)[which]


def spread(start: Tensor, stop: Tensor) -> Tensor:
    """The numbers in intervals, one after the other."""
    which, step = counted(stop - start)
    return start[which] + step


def _sum(end: Tensor, width: Tensor) -> Tensor:
    """The sum of ``min(j, width)`` over ``0 <= j < end``."""
    short, rest = torch.minimum(end.clamp(min=0), width + 1), (end - width - 1).clamp(min=0)
    return short * (short - 1) // 2 + rest * width


def _joined(
    row: Tensor, start: Tensor, stop: Tensor, span: int, *, touching: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Intervals of each row, sorted, those that overlap (or touch) made one."""
    if not len(row):
        return row, start, stop
    line, order = (row * span + start).sort()
    reached = (row * span + stop)[order].cummax(0).values
    first = torch.ones_like(line, dtype=torch.bool)
    first[1:] = line[1:] > reached[:-1] if touching else line[1:] >= reached[:-1]
    line, reached = line[first], reached[torch.cat([first[1:], first.new_ones(1)])]
    row = line // span
    return row, line - row * span, reached - row * span
