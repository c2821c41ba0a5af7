"""Queries and keys as runs: stretches of indices whose positions step by one and whose documents are one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Runs of indices, one entry each, in order: int64 CPU tensors ``[N]``.

    Attributes:
        row: the batch row.
        start, stop: the indices.
        position, end: of the first index, and one beyond the position of the last. In a ``flat`` run all indices have
            one position, so that ``end`` is ``position + 1``.
        first, last: segments ``first .. last - 1``: of queries their own, of keys those that may see them.
        flat: Bool, whether all indices have one position; ``None``: nowhere.
    """

    row: Tensor
    start: Tensor
    stop: Tensor
    position: Tensor
    end: Tensor
    first: Tensor
    last: Tensor
    flat: Tensor | None = None

    def at(self, index: Tensor) -> Runs:
        """The runs at ``index``, an integer or Bool tensor."""
        return self._mapped(lambda column: column[index])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Runs:
        return Runs(*[change(column) for column in self if column is not None])

    def within(self, low: Tensor, high: Tensor) -> Runs:
        """The parts at positions ``low .. high - 1``, of which none may be empty."""
        position, end = torch.maximum(self.position, low), torch.minimum(self.end, high)
        start, stop = self.start + (position - self.position), self.stop - (self.end - end)
        if self.flat is not None:
            start, stop = torch.where(self.flat, self.start, start), torch.where(self.flat, self.stop, stop)
        return self._replace(start=start, stop=stop, position=position, end=end)

    def with_later(self, *others: Runs) -> Runs:
        """These runs and then the others."""
        joined = zip(*[list(of) for of in (self, *others)], strict=True)
        return Runs(*[torch.cat([x for x in columns if x is not None]) for columns in joined if columns[0] is not None])

    def spread(self, have: int, rows: int) -> Runs:
        """The runs of ``have`` batch rows, 1 or ``rows``, for all of ``rows``."""
        if have == rows:
            return self
        count = len(self.row)
        repeated = self._mapped(lambda column: column.repeat(rows))
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
        return Runs(*torch.tensor([[0], [0], [length], [offset], [offset + length], [0], [1]], device="cpu")), 1
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

    def at_start(of: Tensor) -> Tensor:
        return of.expand(rows, -1)[row, start].long()

    position = start + offset if positions is None else at_start(positions)
    end = position + (stop - start)
    flats: Tensor | None = None
    if flat is not None:
        flats = (stop > start + 1) & flat.expand(rows, -1)[row, start.clamp(max=length - 2)]
        end = torch.where(flats, position + 1, end)
    first = torch.zeros_like(start) if segments is None else at_start(segments)
    return Runs(row, start, stop, position, end, first, first + 1 if ends is None else at_start(ends), flats), rows
