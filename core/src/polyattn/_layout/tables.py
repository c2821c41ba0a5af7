"""Tables of blocks: rectangles of queries and keys, and what can be read off them.

Inside a block query ``i`` sees key ``j``, both counted from the block's start, where ``low <= i - j <= high``. Every
query of a block sees one unbroken run of its keys and at least one of them, and every key is seen by one of its
queries. No pair of a query and a key lies in two blocks. Rows are sorted by batch row, first query and first key,
behind an empty block of zeros, so that a table has at least two rows: a traced graph then holds for every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._layout.indexing import ragged


class Table(NamedTuple):
    """A table and what the host knows of it.

    Attributes:
        bands: int64 CPU ``[N, 8]``, columns ``batch, q_start, q_stop, k_start, k_stop, low, high, shift``; ``shift`` is
            the distance of the positions of the first query and the first key.
        one_run: whether no query lies in two blocks; a graph that asks this holds for tables of any number of runs.
        runs: the largest number of blocks that a query lies in.
        unit: whether the positions of each block's queries and of its keys step by one, so that
            ``i - j + shift`` is their distance.
    """

    bands: Tensor
    one_run: bool = True
    runs: int = 1
    unit: bool = True

    @classmethod
    def empty(cls) -> Table:
        """The table of a mask that shows nothing."""
        return cls(torch.zeros(2, 8, dtype=torch.int64, device="cpu"))

    @classmethod
    def of(cls, columns: Sequence[Tensor], *, unit: bool, alone: bool = False) -> Table:
        """The table of blocks in any order; neighbours that the same queries see whole become one.

        ``alone``: no query lies in two of them, and they are in order.
        """
        if columns[0].numel() == 0:
            return cls.empty()
        rows = torch.stack(list(columns), 1)
        one_run = alone or len(rows) == 1
        if not one_run:
            rows = _in_order(rows)
            one_run = _one_run(rows)
        if not one_run:
            count = len(rows)
            rows = _with_joined_keys(rows)
            one_run, unit = _one_run(rows), unit and len(rows) == count
        runs = 1 if one_run else _most_runs(rows)
        return cls(torch.nn.functional.pad(rows, (0, 0, 1, 0)), one_run, runs, unit)

    def narrow(self, left: int | None, right: int | None) -> Table:
        """Under a window in positions, for a ``unit`` table. Reads no value: a block that shows nothing is empty."""
        batch, q_start, q_stop, k_start, k_stop, low, high, shift = self.bands.unbind(1)
        low = low if right is None else torch.maximum(low, -right - shift)
        high = high if left is None else torch.minimum(high, left - shift)
        # Without the ends that see or show nothing.
        first, last = low.clamp(min=0), torch.minimum(q_stop - q_start, k_stop - k_start + high)
        key, end = (first - high).clamp(min=0), torch.minimum(k_stop - k_start, last - low)
        live = (first < last) & (key < end)
        first, last, key, end = (torch.where(live, place, 0) for place in (first, last, key, end))
        moved, height, width = first - key, last - first, end - key
        low, high = low - moved, high - moved
        low, high = torch.where(low <= 1 - width, -width, low), torch.where(high >= height - 1, height, high)
        ends = (q_start + first, q_start + last, k_start + key, k_start + end)
        return self._replace(bands=torch.stack([batch, *ends, low, high, shift + moved], 1))

    def in_positions(self, *, causal: bool) -> Tensor:
        """The table in positions, ``[N, 7]``: ``shift`` and whether the causal rule hides a key of the block."""
        low, shift = self.bands[:, 5], self.bands[:, 7]
        hides = (low == -shift) & (low > self.bands[:, 3] - self.bands[:, 4]) & causal
        return torch.cat([self.bands[:, :5], shift[:, None], hides[:, None]], 1)

    def repeat(self, times: int) -> Table:
        """The blocks of one batch row for so many rows that are like it."""
        if times == 1:
            return self
        live = self.bands[1:][self.bands[1:, 2] > 0]
        if len(live) == 0:
            return self
        many = live.repeat(times, 1)
        many[:, 0] = torch.arange(times, device="cpu").repeat_interleave(len(live))
        return self._replace(bands=torch.cat([self.bands[:1], many]))

    def intervals(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """The runs of keys that each query sees: ``batch * q_len + query``, start, stop. Those that touch are one."""
        batch, q_start, q_stop, k_start, k_stop, low, high, _ = self.bands.unbind(1)
        block, i = ragged(q_stop - q_start)
        width = (k_stop - k_start)[block]
        start = k_start[block] + torch.minimum((i - high[block]).clamp(min=0), width)
        stop = k_start[block] + torch.minimum((i - low[block] + 1).clamp(min=0), width)
        row = batch[block] * q_len + q_start[block] + i
        live = stop > start
        row, start, stop = row[live], start[live], stop[live]
        return (row, start, stop) if self.one_run else merged(row, start, stop, kv_len)

    def covers(self, axis: str, length: int, rows: int) -> bool:
        """Whether the blocks hold every query (``axis="q"``) or every key (``"k"``) of ``rows`` batch rows."""
        queries, keys = self.bands[:, 1:3], self.bands[:, 3:5]
        start, stop = (queries if axis == "q" else keys).unbind(1)
        # Blocks of one run share no query, and no key where the keys of each are its queries.
        if self.one_run and (axis == "q" or len(queries) == 2 or torch.equal(queries, keys)):
            return int((stop - start).sum()) == rows * length
        if rows > 1:
            base = self.bands[:, 0] * length
            start, stop = base + start, base + stop
        if axis == "k":
            start, order = start.sort()
            stop = stop[order]
        reached = stop.cummax(0).values
        return bool((start[1:] <= reached[:-1]).all()) and int(reached[-1]) == rows * length


def merged(row: Tensor, start: Tensor, stop: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """The union of intervals of each row, none empty: sorted by row and start, those that touch joined."""
    if row.numel() == 0:
        return row, start, stop
    base = row * (kv_len + 1)  # rows lie on one line, a gap of one apart
    start, order = (base + start).sort()
    reached = (base + stop)[order].cummax(0).values
    first = torch.ones_like(start, dtype=torch.bool)
    first[1:] = start[1:] > reached[:-1]
    start, stop = start[first], reached[torch.cat([first[1:], first.new_ones(1)])]
    row = torch.div(start, kv_len + 1, rounding_mode="floor")
    return row, start - row * (kv_len + 1), stop - row * (kv_len + 1)


def padded_intervals(row: Tensor, start: Tensor, stop: Tensor, batch: int, q_len: int, max_runs: int) -> Tensor | None:
    """Intervals by row as ``[batch, q_len, runs, 2]``; ``None`` where a row has more than ``max_runs``."""
    place = torch.arange(row.numel(), device="cpu") - torch.searchsorted(row, row)
    runs = int(place.max()) + 1 if place.numel() else 1
    if runs > max_runs:
        return None
    found = torch.zeros(batch * q_len, runs, 2, dtype=torch.int64, device="cpu")
    found[row, place] = torch.stack((start, stop), 1)
    return found.view(batch, q_len, runs, 2)


def covered_keys(row: Tensor, start: Tensor, stop: Tensor, batch: int, q_len: int, kv_len: int) -> Tensor:
    """Which keys lie in any of a batch row's intervals: Bool ``[batch, K]``, in time linear in intervals and keys."""
    base = torch.div(row, max(1, q_len), rounding_mode="floor") * (kv_len + 1)
    change = torch.zeros(batch * (kv_len + 1), dtype=torch.int32, device="cpu")
    one = torch.ones_like(row, dtype=torch.int32)
    change.index_add_(0, base + start, one).index_add_(0, base + stop, -one)
    return change.view(batch, kv_len + 1)[:, :kv_len].cumsum(1) > 0


def _in_order(rows: Tensor) -> Tensor:
    """Rows of a table by batch row, first query and first key."""
    batch, query, key = (rows[1:, at] - rows[:-1, at] for at in (0, 1, 3))
    if bool(((batch > 0) | ((batch == 0) & ((query > 0) | ((query == 0) & (key >= 0))))).all()):
        return rows
    for at in (3, 1, 0):
        rows = rows[rows[:, at].argsort(stable=True)]
    return rows


def _one_run(rows: Tensor) -> bool:
    before, after = rows[:-1], rows[1:]
    return bool(((after[:, 0] != before[:, 0]) | (after[:, 1] >= before[:, 2])).all())


def _most_runs(rows: Tensor) -> int:
    """The largest number of blocks that a query lies in."""
    row, start, stop = rows[:, :3].unbind(1)
    span = int(stop.max()) + 1
    _, order = torch.cat([row * span + stop, row * span + start]).sort(stable=True)
    step = torch.ones_like(order)
    step[: len(row)] = -1
    return int(step[order].cumsum(0).max())


def _with_joined_keys(rows: Tensor) -> Tensor:
    """Neighbouring runs of keys that the same queries see whole are one run."""
    whole = (rows[:, 5] <= rows[:, 3] - rows[:, 4]) & (rows[:, 6] >= rows[:, 2] - rows[:, 1])
    before, after = rows[:-1], rows[1:]
    joined = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
    joined[1:] = (before[:, :3] == after[:, :3]).all(1) & (before[:, 4] == after[:, 3]) & whole[:-1] & whole[1:]
    first, last = ~joined, ~torch.cat([joined[1:], joined.new_zeros(1)])
    result = rows[first]
    result[:, 4] = rows[last, 4]
    result[:, 5] = torch.where(whole[first], result[:, 3] - result[:, 4], result[:, 5])
    return result
