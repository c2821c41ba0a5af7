"""The structured lowering: a mask as rectangles of queries and keys, on the host.

Queries are cut into pieces where their rule changes (documents, a prefix, chunks, jumps of positions), keys into runs
of unit step. A piece and a run whose segments meet make a block: the queries that see one of the keys, and the keys
that one of the queries sees. No step loops over rows or runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._layout.indexing import ragged
from polyattn._layout.runs import Runs, find_runs
from polyattn._layout.structured import COMBINED, StructuredMask
from polyattn._layout.tables import Table

#: Beyond every distance of two positions that a table can hold.
FAR = 2**61
#: Positions of a table lie in ``-LARGEST .. LARGEST``.
LARGEST = 2**60
#: The most pairs of a piece of queries and a run of keys; where there are more, a dense mask describes it better.
MAX_PAIRS = 2**21


class Pieces(NamedTuple):
    """Runs of queries under one rule: they see keys at positions ``low .. high - 1`` and ``least <= q - k <= most``."""

    runs: Runs
    low: Tensor
    high: Tensor
    least: Tensor
    most: Tensor

    def bounds(self) -> tuple[Tensor, ...]:
        """What each run is ruled by."""
        return self.low, self.high, self.least, self.most

    def at(self, index: Tensor) -> Pieces:
        """The pieces at ``index``, an integer or Bool tensor."""
        return Pieces(self.runs.at(index), *[bound[index] for bound in self.bounds()])


def find_table(
    mask: StructuredMask, q_len: int, kv_len: int, rows: int, active: Tensor | None, *, exact: bool = False
) -> Table | None:
    """The blocks of the first ``rows`` batch rows of a mask on the host; ``None`` where it has no such form.

    Queries before the first and after the last ``active`` one (``Bool[B|1, Q]``) are left out; with ``exact`` all that
    are not active.
    """
    if not mask.given() <= COMBINED:
        return None
    if 0 in (q_len, kv_len, rows):
        return Table.empty()
    if active is None and mask.given() <= {"causal", "window"}:
        return _one_block(mask, q_len, kv_len).repeat(rows)
    compared = mask.q_positions is not None and mask.positional
    q_positions, k_positions = (mask.q_positions, mask.kv_positions) if compared else (None, None)
    if _too_far(q_positions) or (k_positions is not q_positions and _too_far(k_positions)):
        return None
    asked = _keys_asked_for(mask)
    wanted = active if exact else _span(active)
    q_runs, q_rows = find_runs(q_len, kv_len - q_len, q_positions, mask.q_segments, None, wanted)
    alike = q_len == kv_len and q_positions is k_positions and mask.q_segments is mask.kv_segments
    if alike and wanted is None and asked is None and mask.kv_segment_ends is None:
        k_runs, k_rows = q_runs, q_rows
    else:
        k_runs, k_rows = find_runs(kv_len, 0, k_positions, mask.kv_segments, mask.kv_segment_ends, asked)
    if 0 in (len(q_runs.row), len(k_runs.row)):
        return Table.empty()
    pieces = _pieces(mask, q_runs.spread(q_rows, rows))
    level = pieces.runs.flat
    ascending = None if level is None or mask.q_segments is not None or asked is not None else _ascending(k_positions)
    beside = None
    if level is not None and ascending is not None:
        beside, pieces = _among_ascending(pieces.at(level), ascending), pieces.at(~level)
    most = min(MAX_PAIRS, max(2**12, rows * q_len * kv_len >> 6))
    found = _join(mask, pieces, k_runs.spread(k_rows, rows), most)
    if found is None:
        return None
    pairs, runs, once = found
    columns, unit = _blocks(pairs, runs)
    if beside is not None:
        columns = [torch.cat(both) for both in zip(columns, beside, strict=True)]
    once = once and beside is None and mask.prefix_lengths is None and mask.sink_lengths is None
    return Table.of(columns, unit=unit and beside is None, alone=once)


def _one_block(mask: StructuredMask, q_len: int, kv_len: int) -> Table:
    """The table of a mask that is a band of distances, in plain numbers: most layouts are made for one forward."""
    (left, right), shift = mask.reach, kv_len - q_len
    low = (0 if mask.causal else -FAR if right is None else -right) - shift
    high = (FAR if left is None else left) - shift
    first, last = max(0, low), min(q_len, kv_len + high)
    key, end = max(0, first - high), min(kv_len, last - low)
    if first >= last or key >= end:
        return Table.empty()
    height, width, moved = last - first, end - key, first - key
    low, high = max(low - moved, -FAR), min(high - moved, FAR)
    bounds = (-width if low <= 1 - width else low, height if high >= height - 1 else high)
    rows = [[0] * 8, [0, first, last, key, end, *bounds, shift + moved]]
    return Table(torch.tensor(rows, dtype=torch.int64, device="cpu"))


def _too_far(positions: Tensor | None) -> bool:
    if positions is None or positions.dtype is not torch.int64:
        return False
    return int(positions.max()) > LARGEST or int(positions.min()) < -LARGEST


def _span(active: Tensor | None) -> Tensor | None:
    """The queries from the first to the last active one."""
    return None if active is None else (active.cumsum(1) > 0) & (active.flip(1).cumsum(1) > 0).flip(1)


def _keys_asked_for(mask: StructuredMask) -> Tensor | None:
    """The valid keys of segments that some query has: padding in a segment of its own may lie anywhere."""
    valid, q, k = mask.kv_valid, mask.q_segments, mask.kv_segments
    if q is None or k is None or q is k:
        return valid
    q, k = (x.long().expand(max(len(q), len(k)), -1).contiguous() for x in (q, k))
    q = q.sort(1).values
    nearest = q.gather(1, torch.searchsorted(q, k).clamp(max=q.shape[1] - 1))
    ends = k + 1 if mask.kv_segment_ends is None else mask.kv_segment_ends
    asked = (nearest >= k) & (nearest < ends)
    return asked if valid is None else asked & valid


def _pieces(mask: StructuredMask, runs: Runs) -> Pieces:
    """Runs of queries cut where the rule changes: at their prefix, between chunks, and at the ends of the window.

    Beside its window a query sees the keys at positions below the sink, before and after what the window reaches.
    """
    far = torch.full_like(runs.row, FAR)
    pieces = Pieces(runs, -far, far, torch.zeros_like(far) if mask.causal else -far, far)
    if mask.prefix_lengths is not None:
        pieces = _cut_at_prefix(pieces, _per_piece(mask.prefix_lengths, runs))
    if mask.chunk_size is not None:
        pieces = _cut_at_chunks(pieces, min(mask.chunk_size, FAR))
    if mask.window is None:
        return pieces
    left, right = (FAR if side is None else min(side, FAR) for side in mask.reach)
    near = pieces._replace(least=pieces.least.clamp(min=-right), most=pieces.most.clamp(max=left))
    if mask.sink_lengths is None:
        return near
    high = torch.minimum(pieces.high, _per_piece(mask.sink_lengths, pieces.runs))
    behind = pieces._replace(high=high, least=pieces.least.clamp(min=left + 1))
    ahead = pieces._replace(high=high, most=pieces.most.clamp(max=-right - 1)).at(pieces.least < 0)
    return _joined(near, behind, ahead)


def _per_piece(lengths: Tensor, runs: Runs) -> Tensor:
    """What is given per batch row ``[B|1]`` or per segment ``[B|1, segments]``, of each run."""
    row = runs.row if lengths.shape[0] > 1 else torch.zeros_like(runs.row)
    return (lengths[row] if lengths.dim() == 1 else lengths[row, runs.first]).long()


def _cut_at_prefix(pieces: Pieces, prefix: Tensor) -> Pieces:
    """Below its prefix a query sees all of it; above, the keys up to its own position."""
    runs = pieces.runs
    below, above = runs.position < prefix, runs.end > prefix
    under = pieces._replace(high=torch.minimum(pieces.high, prefix), least=torch.full_like(prefix, -FAR)).at(below)
    under = under._replace(runs=under.runs.within(under.runs.position, under.high))
    over = pieces.at(above)
    over = over._replace(runs=over.runs.within(prefix[above], over.runs.end))
    return _joined(under, over)


def _cut_at_chunks(pieces: Pieces, size: int) -> Pieces:
    runs = pieces.runs
    first = torch.div(runs.position, size, rounding_mode="floor")
    count = torch.div(runs.end - 1, size, rounding_mode="floor") - first + 1
    index, place = ragged(count)
    cut = pieces.at(index)
    low = (first[index] + place) * size
    return cut._replace(
        runs=cut.runs.within(low, low + size),
        low=torch.maximum(cut.low, low),
        high=torch.minimum(cut.high, low + size),
    )


def _joined(first: Pieces, *others: Pieces) -> Pieces:
    runs = first.runs.with_later(*[part.runs for part in others])
    bounds = zip(first.bounds(), *[of.bounds() for of in others], strict=True)
    return Pieces(runs, *[torch.cat(columns) for columns in bounds])


def _join(mask: StructuredMask, pieces: Pieces, keys: Runs, most: int) -> tuple[Pieces, Runs, bool] | None:
    """Each piece of queries with each run of keys that it may see, by query and key, and whether with one at most.

    ``None``: there are too many.
    """
    queries = pieces.runs
    if queries is keys and _one_a_document(keys):
        return pieces, keys, True
    if mask.q_segments is None:
        rows = torch.arange(len(keys.row), device="cpu")
        if len(keys.row) <= len(queries.row) and int(queries.row.max()) < len(rows) and bool((keys.row == rows).all()):
            return pieces, keys.at(queries.row), True
        first, last, base = keys.row, keys.row + 1, queries.row
    else:
        known = queries.first.unique()
        count = len(known) + 1
        base = queries.row * count + torch.searchsorted(known, queries.first)
        first = keys.row * count + torch.searchsorted(known, keys.first)
        last = keys.row * count + torch.searchsorted(known, keys.last)
    base, order = base.sort(stable=True)
    low = torch.searchsorted(base, first)
    met = (torch.searchsorted(base, last) - low).clamp(min=0)
    if int(met.sum()) > most:
        return None
    key, place = ragged(met)
    query = order[low[key] + place]
    # By query, and by key for each: keys are in order already.
    query, order = query.sort(stable=True)
    pieces, keys = pieces.at(query), keys.at(key[order])
    if mask.kv_segment_ends is not None:
        pieces, keys = _with_joined_keys(query, pieces, keys)
    return pieces, keys, False


def _one_a_document(runs: Runs) -> bool:
    """Whether no two runs of a batch row are of one segment, seen at once where segments go up."""
    return len(runs.row) == 1 or bool(((runs.row[1:] > runs.row[:-1]) | (runs.first[1:] > runs.first[:-1])).all())


def _with_joined_keys(query: Tensor, pieces: Pieces, keys: Runs) -> tuple[Pieces, Runs]:
    """Runs of keys that go on in the next node of a tree, in place and in position, are one run for who sees both."""
    goes_on = (query[1:] == query[:-1]) & (keys.start[1:] == keys.stop[:-1]) & (keys.position[1:] == keys.end[:-1])
    if keys.flat is not None:
        goes_on &= ~(keys.flat[1:] | keys.flat[:-1])
    first, last = torch.ones_like(query, dtype=torch.bool), torch.ones_like(query, dtype=torch.bool)
    first[1:], last[:-1] = ~goes_on, ~goes_on
    return pieces.at(first), keys.at(first)._replace(stop=keys.stop[last], end=keys.end[last])


def _blocks(pieces: Pieces, keys: Runs) -> tuple[list[Tensor], bool]:
    """The blocks of pairs of queries and keys, without ends that see or show nothing, and whether none is flat."""
    q = pieces.runs
    first, last = torch.maximum(keys.position, pieces.low), torch.minimum(keys.end, pieces.high)
    begin, end = torch.maximum(q.position, first + pieces.least), torch.minimum(q.end, last + pieces.most)
    first, last = torch.maximum(first, begin - pieces.most), torch.minimum(last, end - pieces.least)
    live = (first < last) & (begin < end)
    if not bool(live.all()):
        first, last, begin, end = (x[live] for x in (first, last, begin, end))
        pieces, keys = pieces.at(live), keys.at(live)
    q, k = pieces.runs.within(begin, end), keys.within(first, last)
    # Bounds that cut nothing are written as wide as the block.
    shift, width, height = begin - first, k.stop - k.start, q.stop - q.start
    low = torch.where(begin - (last - 1) < pieces.least, pieces.least - shift, -width)
    high = torch.where(end - 1 - first > pieces.most, pieces.most - shift, height)
    unit = not any(flat is not None and bool(flat.any()) for flat in (q.flat, k.flat))
    return [q.row, q.start, q.stop, k.start, k.stop, low, high, shift], unit


def _ascending(positions: Tensor | None) -> Tensor | None:
    """The positions of the keys ``[K]``, where they never go down and are those of every batch row."""
    if positions is None or len(positions) > 1 or not bool((positions[:, 1:] >= positions[:, :-1]).all()):
        return None
    return positions[0]


def _among_ascending(pieces: Pieces, positions: Tensor) -> list[Tensor]:
    """The blocks of queries of one position each, which see an unbroken run of keys that are sorted by position."""
    runs = pieces.runs
    low = torch.maximum(pieces.low, runs.position - pieces.most)
    high = torch.minimum(pieces.high, runs.position - pieces.least + 1)
    positions = positions.long()
    start, stop = torch.searchsorted(positions, low), torch.searchsorted(positions, high)
    live = start < stop
    row, q_start, q_stop = (column[live] for column in (runs.row, runs.start, runs.stop))
    start, stop = start[live], stop[live]
    return [row, q_start, q_stop, start, stop, start - stop, q_stop - q_start, torch.zeros_like(row)]
