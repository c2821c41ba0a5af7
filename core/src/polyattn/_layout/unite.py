"""The union of tables of blocks as a table, in which no pair of a query and a key lies twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn._layout.indexing import ragged
from polyattn._layout.tables import Table, merged

#: The most pieces of rows and blocks, and the most pairs of edges in them; a dense mask describes more of them better.
MAX_PIECES = 2**21
MAX_EDGES = 2**25


def unite(tables: Sequence[Table], q_len: int, kv_len: int) -> Table | None:
    """The table of what one of ``tables`` shows; ``None`` where it would be too long.

    The rows are cut where an edge of a block starts or stops to move and where two edges cross. Between two cuts every
    edge moves on a straight line and none passes another, so the union of the intervals at the first row of a piece
    goes on to its last row, where its slopes are read.
    """
    blocks = torch.cat([table.bands[1:] for table in tables])
    blocks = blocks[blocks[:, 2] > blocks[:, 1]]
    if len(blocks) == 0:
        return Table.empty()
    lines = _Lines(blocks, q_len)
    cuts = lines.turns().unique()
    for last in (False, True):
        found = lines.pieces(cuts)
        if found is None:
            return None
        block, piece = found
        first, final = cuts[piece], cuts[piece + 1] - 1
        begins, ends = lines.edges(block, first), lines.edges(block, final)
        if not last:
            crossed = _crossings(piece, begins, ends, first, final)
            if crossed is None:
                return None
            cuts = torch.cat([cuts, crossed]).unique()
    return _as_table(piece, cuts, begins, ends, q_len, kv_len)


class _Lines:
    """Blocks on one line of all rows of a batch: row ``q`` of batch row ``b`` at ``b * (q_len + 1) + q``."""

    def __init__(self, blocks: Tensor, q_len: int) -> None:
        batch, q_start, q_stop, self.k_start, k_stop, self.low, self.high, _ = blocks.unbind(1)
        self.width = k_stop - self.k_start
        self.start, self.stop = batch * (q_len + 1) + q_start, batch * (q_len + 1) + q_stop

    def turns(self) -> Tensor:
        """The rows where a block begins or ends, and where its edges start or stop to move, with their neighbours."""
        turns = torch.stack([self.high, self.high + self.width, self.low - 1, self.low + self.width - 1])
        turns = torch.stack([turns - 1, turns, turns + 1]).flatten(0, 1) + self.start
        inside = torch.minimum(torch.maximum(turns, self.start), self.stop)
        return torch.cat([inside.flatten(), self.start, self.stop])

    def pieces(self, cuts: Tensor) -> tuple[Tensor, Tensor] | None:
        """Each block with each piece between two cuts that lies in it, by piece; ``None``: too many."""
        low = torch.searchsorted(cuts, self.start)
        count = torch.searchsorted(cuts, self.stop) - low
        if int(count.sum()) > MAX_PIECES:
            return None
        block, place = ragged(count)
        piece, order = (low[block] + place).sort(stable=True)
        return block[order], piece

    def edges(self, block: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of keys that a row sees of a block."""
        i, width, first = row - self.start[block], self.width[block], self.k_start[block]
        start = (i - self.high[block]).clamp(min=0)
        stop = (i - self.low[block] + 1).clamp(min=0)
        start = torch.minimum(start, width)
        return first + start, first + torch.maximum(torch.minimum(stop, width), start)


Edges = tuple[Tensor, Tensor]


def _crossings(piece: Tensor, begins: Edges, ends: Edges, first: Tensor, final: Tensor) -> Tensor | None:
    """The rows around which two edges of a piece meet or pass; ``None``: too many pairs of edges."""
    _, count = torch.unique_consecutive(piece, return_counts=True)
    most = 2 * int(count.max())
    if len(count) * most * most > MAX_EDGES:
        return None
    at, place = ragged(count)
    here = torch.zeros(2, len(count), most, dtype=torch.int64, device="cpu")
    real = torch.zeros(len(count), most, dtype=torch.bool, device="cpu")
    for side in (0, 1):
        column = place + side * (most // 2)
        here[0, at, column], here[1, at, column] = begins[side], ends[side]
        real[at, column] = True
    apart = here[:, :, :, None] - here[:, :, None, :]
    sign = apart.sign()
    both = real[:, :, None] & real[:, None, :]
    start, stop = torch.zeros_like(count), torch.zeros_like(count)
    start[at], stop[at] = first, final
    # Two edges come nearer by at most one key a row: they meet as many rows on as they are keys apart.
    passed = (sign[0] * sign[1] < 0) & both
    meeting = start[passed.nonzero()[:, 0]] + apart[0][passed].abs()
    touching = (((sign[0] == 0) != (sign[1] == 0)) & both).any(-1).any(-1)
    return torch.cat([meeting - 1, meeting, meeting + 1, start[touching] + 1, stop[touching]])


def _as_table(piece: Tensor, cuts: Tensor, begins: Edges, ends: Edges, q_len: int, kv_len: int) -> Table:
    """The bands of the united intervals between the first and the last row of each piece."""
    at, start, stop = merged(piece, *begins, kv_len)
    _, end_start, end_stop = merged(piece, *ends, kv_len)
    slot = torch.arange(len(at), device="cpu") - torch.searchsorted(at, at)
    # The n-th intervals of all rows behind each other, so that what goes on in the next rows stands beside it.
    order = slot.sort(stable=True).indices
    at, slot, start, stop, end_start, end_stop = (
        column[order] for column in (at, slot, start, stop, end_start, end_stop)
    )
    row, after = cuts[at], cuts[at + 1]
    # How both edges move from row to row: inside a piece, and from its last row to the next piece.
    single = after - row == 1
    inside = torch.stack([end_start > start, end_stop > stop])
    step = torch.stack([start[1:] - end_start[:-1], stop[1:] - end_stop[:-1]])
    goes_on = (after[:-1] == row[1:]) & (slot[:-1] == slot[1:]) & ((step == 0) | (step == 1)).all(0)
    to_next = step == 1
    as_before = torch.ones_like(goes_on)
    as_before[1:] = ~goes_on[:-1] | (to_next[:, 1:] == to_next[:, :-1]).all(0)
    as_before = torch.where(single[:-1], as_before, (to_next == inside[:, :-1]).all(0))
    goes_on &= as_before & (single[1:] | (to_next == inside[:, 1:]).all(0))
    first, last = torch.ones_like(single), torch.ones_like(single)
    first[1:], last[:-1] = ~goes_on, ~goes_on
    moves = torch.where(single[first], torch.cat([to_next, inside[:, -1:]], 1)[:, first], inside[:, first])
    row, height = row[first], after[last] - row[first]
    moves &= height > 1
    batch = torch.div(row, q_len + 1, rounding_mode="floor")
    q_start = row - batch * (q_len + 1)
    low = torch.where(moves[1], 1 - (stop - start)[first], start[first] - end_stop[last])
    high = torch.where(moves[0], 0, height)
    columns = (batch, q_start, q_start + height, start[first], end_stop[last], low, high, torch.zeros_like(height))
    return Table.of(columns, unit=False)
