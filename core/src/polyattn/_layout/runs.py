"""Queries and keys as runs: stretches of indices whose positions step by one and whose documents are one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Runs of indices, one entry each, in order: int64 CPU tensors ``[N]``, ``flat`` Bool.

    Attributes:
        row: the batch row.
        start, stop: the indices.
        position, end: of the first index, and one beyond the position of the last. In a ``flat`` run all indices have
            one position, so that ``end`` is ``position + 1``.
        first, last: segments ``first .. last - 1``: of queries their own, of keys those that may see them.
        flat: whether all indices have one position.
    """

    row: Tensor
    start: Tensor
    stop: Tensor
    position: Tensor
    end: Tensor
    first: Tensor
    last: Tensor
    flat: Tensor

    def at(self, index: Tensor) -> Runs:
        """The runs at ``index``, an integer or Bool tensor."""
        return Runs(*[column[index] for column in self])

    def within(self, low: Tensor, high: Tensor) -> Runs:
        """The parts at positions ``low .. high - 1``, of which none may be empty."""
        position, end = torch.maximum(self.position, low), torch.minimum(self.end, high)
        start = torch.where(self.flat, self.start, self.start + (position - self.position))
        stop = torch.where(self.flat, self.stop, self.stop - (self.end - end))
        return self._replace(start=start, stop=stop, position=position, end=end)

    def spread(self, have: int, rows: int) -> Runs:
        """The runs of ``have`` batch rows, 1 or ``rows``, for all of ``rows``."""
        if have == rows:
            return self
        count = len(self.row)
        repeated = Runs(*[column.repeat(rows) for column in self])
        return repeated._replace(row=torch.arange(rows, device="cpu").repeat_interleave(count))


def find_runs(
    length: int,
    offset: int,
    positions: Tensor | None,
    segments: Tensor | None,
    ends: Tensor | None,
    wanted: Tensor | None,
) -> tuple[Runs, int]:
    """The runs of what is ``wanted``, and the number of batch rows that they describe.

    Args:
        length: number of indices.
        offset: the position of index 0 where ``positions`` are not given.
        positions: ``Int[B|1, length]``, like the other tensors on the CPU.
        segments: the segment of each index.
        ends: one beyond the last segment that may see a key; ``None``: its own alone.
        wanted: Bool, what is left out is in no run; ``None``: nothing is left out.
    """
    given = [value for value in (positions, segments, ends, wanted) if value is not None]
    rows = max([value.shape[0] for value in given], default=1)
    if not given:
        return Runs(*torch.tensor([[0], [0], [length], [offset], [offset + length], [0], [1]]), NEVER), 1
    cut = torch.zeros(rows, length + 1, dtype=torch.bool, device="cpu")
    inner = cut[:, 1:-1]
    for value in (segments, ends, wanted):
        if value is not None:
            inner |= value[:, 1:] != value[:, :-1]
    flat = None
    if positions is not None:
        step = positions.diff(dim=1)
        level, unit = step == 0, (step == 1) & (positions[:, 1:] > positions[:, :-1])  # the largest plus 1 wraps
        if level.any():
            flat = level & ~inner
            beside = torch.zeros_like(flat)
            beside[:, 1:] |= flat[:, :-1]
            beside[:, :-1] |= flat[:, 1:]
            unit = unit & ~beside
            inner |= ~(unit | flat)
        else:
            inner |= ~unit
    cut[:, 0] = cut[:, -1] = True
    row, edge = cut.nonzero().unbind(1)
    starts = edge < length
    stop = edge.roll(-1)[starts]
    row, start = row[starts], edge[starts]
    if wanted is not None:
        real = wanted.expand(rows, -1)[row, start]
        row, start, stop = row[real], start[real], stop[real]

    def value(of: Tensor) -> Tensor:
        return of.expand(rows, -1)[row, start].long()

    level = torch.zeros_like(row, dtype=torch.bool)
    if flat is not None:
        level = (stop > start + 1) & flat.expand(rows, -1)[row, start.clamp(max=length - 2)]
    position = start + offset if positions is None else value(positions)
    first = torch.zeros_like(start) if segments is None else value(segments)
    last = first + 1 if ends is None else value(ends)
    end = torch.where(level, position + 1, position + stop - start)
    return Runs(row, start, stop, position, end, first, last, level), rows


NEVER = torch.zeros(1, dtype=torch.bool, device="cpu")
