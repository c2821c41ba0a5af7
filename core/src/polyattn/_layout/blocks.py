"""The structured lowering: a mask as rectangles of queries and keys, on the host.

A table of blocks is an int64 CPU tensor ``[N, 7]`` with the columns of :class:`Block`; its first row is all zeros
(an empty block), so that N is at least 2. Inside a block query i sees key j where ``d = (i - q_start) -
(j - k_start) + shift``, the distance of their positions, satisfies ``d >= 0`` if ``causal`` is 1, and
``|d| < window`` if the mask has one. Every query lies in at most one block, sees one run of its keys and at least
one of them; every key of a block is seen by a query of it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn._layout.structured import StructuredMask

#: Above this many runs of one segment its positions are scattered, and a dense mask describes it better.
MAX_RUNS = 8
#: Sums of distances and a larger window may leave int64, and distances beyond twice this count as that far.
MAX_WINDOW = 2**61
#: Beyond every distance of two positions.
_FAR = 2**65
#: The fields that blocks can express.
_LOWERED = {"causal", "window", "chunk_size", "prefix_lengths", "kv_valid"} | {
    *("q_positions", "kv_positions", "q_segments", "kv_segments")
}


class Block(NamedTuple):
    """One row of the table. ``causal`` is 0 also where no key of the block lies after any of its queries."""

    batch: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    shift: int
    causal: int


class Run(NamedTuple):
    """Indices from ``start`` on of one segment, at the consecutive positions ``position .. end - 1``."""

    start: int
    position: int
    end: int
    segment: int = 0


def find_blocks(mask: StructuredMask, q_len: int, kv_len: int, rows: int, active: Tensor | None) -> list[Block] | None:
    """The blocks of the first ``rows`` batch rows of a mask on the host; ``None`` where it has no such form.

    Queries before the first and after the last ``active`` one (``Bool[B|1, Q]``) are left out.
    """
    if not mask.given() <= _LOWERED or (mask.window is not None and mask.window > MAX_WINDOW):
        return None
    if 0 in (q_len, kv_len, rows):
        return []
    compared = mask.q_positions is not None and mask.positional
    q_positions, kv_positions = (mask.q_positions, mask.kv_positions) if compared else (None, None)
    wanted = _span(active), _keys_asked_for(mask)
    queries = _runs(rows, q_len, kv_len - q_len, q_positions, mask.q_segments, wanted[0])
    same = q_len == kv_len and q_positions is kv_positions and mask.q_segments is mask.kv_segments
    alike = same and wanted[0] is None and wanted[1] is None
    keys = queries if alike else _runs(rows, kv_len, 0, kv_positions, mask.kv_segments, wanted[1])
    prefixes: list[Any] = [None] if mask.prefix_lengths is None else mask.prefix_lengths.tolist()
    blocks: list[Block] = []
    for b, (q_runs, k_runs) in enumerate(zip(queries, keys, strict=True)):
        if _scattered(q_runs) or (k_runs is not q_runs and _scattered(k_runs)):
            return None
        found = _row_blocks(mask, b, q_runs, k_runs, prefixes[b % len(prefixes)])
        if found is None:
            return None
        blocks += found
    return blocks


def narrow(blocks: list[Block], window: int) -> list[Block]:
    """The blocks of a mask under a window of at most ``MAX_WINDOW``; those that then show nothing are left out."""
    narrowed = [
        _block(
            block.batch,
            Run(block.q_start, block.shift, block.shift + block.q_stop - block.q_start),
            Run(block.k_start, 0, block.k_stop - block.k_start),
            bool(block.causal),
            window,
        )
        for block in blocks
    ]
    return [block for block in narrowed if block is not None]


def to_table(blocks: list[Block], repeats: int) -> Tensor:
    """The blocks as a table, behind an empty block; a mask that shows nothing is two empty blocks.

    With ``repeats`` above 1 the blocks are those of one batch row, which stands for so many.
    """
    empty = Block(0, 0, 0, 0, 0, 0, 0)
    table = torch.tensor([empty, *(blocks or [empty])], dtype=torch.int64, device="cpu")
    if repeats <= 1 or not blocks:
        return table
    many = table[1:].repeat(repeats, 1)
    many[:, 0] = torch.arange(repeats, device="cpu").repeat_interleave(len(blocks))
    return torch.cat([table[:1], many])


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
    asked = q.gather(1, torch.searchsorted(q, k).clamp(max=q.shape[1] - 1)) == k
    return asked if valid is None else asked & valid


def _row_blocks(
    mask: StructuredMask, b: int, queries: list[Run], keys: list[Run], prefixes: int | list[int] | None
) -> list[Block] | None:
    keys_of: dict[int, list[Run]] = defaultdict(list)
    for run in keys:
        keys_of[run.segment].append(run)
    blocks: list[Block] = []
    whole = mask.chunk_size is None and prefixes is None
    for run in queries:
        prefix = prefixes[run.segment] if isinstance(prefixes, list) else prefixes
        pieces = [(run, -_FAR, _FAR, mask.causal)] if whole else _pieces(mask, run, prefix)
        for piece, low, high, causal in pieces:
            before = len(blocks)
            for k in keys_of[run.segment]:
                block = _block(b, piece, k, causal, mask.window, low, high)
                if block is not None:
                    blocks.append(block)
            if len(blocks) > before + 1:
                return None
    return blocks


def _runs(
    rows: int, length: int, offset: int, positions: Tensor | None, segments: Tensor | None, wanted: Tensor | None
) -> list[list[Run]]:
    """The runs of each of the batch rows, in order; what is not wanted is in none.

    Tensors are ``[B|1, length]``; ``offset`` is the position of index 0 where ``positions`` are not given.
    """
    given = [value for value in (positions, segments, wanted) if value is not None]
    if not given:
        return [[Run(0, offset, offset + length)]] * rows
    distinct = max([value.shape[0] for value in given])
    starts = torch.zeros(distinct, length, dtype=torch.bool, device="cpu")
    cut = starts[:, 1:]
    for value in (segments, wanted):
        if value is not None:
            cut |= value.diff(dim=1) != 0
    if positions is not None:
        before, after = positions[:, :-1], positions[:, 1:]
        cut |= (after != before + 1) | (after < before)  # the largest number plus 1 wraps to the least
    if wanted is not None:
        cut &= wanted[:, :-1] | wanted[:, 1:]
    starts[:, 0] = True
    row, start = starts.nonzero().unbind(1)
    stop = start.roll(-1)  # where the next run starts: at 0, if it is of another row
    stop = torch.where(stop == 0, length, stop)
    if wanted is not None:
        real = wanted.expand(distinct, -1)[row, start]
        row, start, stop = row[real], start[real], stop[real]
    position = start + offset if positions is None else positions.expand(distinct, -1)[row, start]
    segment = torch.zeros_like(start) if segments is None else segments.expand(distinct, -1)[row, start]
    found: list[list[Run]] = [[] for _ in range(distinct)]
    for at, first, last, place, of in torch.stack([row, start, stop, position, segment], 1).tolist():
        found[at].append(Run(first, place, place + last - first, of))
    return found if distinct == rows else found * rows


def _scattered(runs: list[Run]) -> bool:
    return len(runs) > MAX_RUNS and max(Counter([run.segment for run in runs]).values()) > MAX_RUNS


def _pieces(mask: StructuredMask, run: Run, prefix: int | None) -> list[tuple[Run, int, int, bool]]:
    """A run of queries cut where the rule changes: at its prefix and between chunks.

    Each piece comes with the half-open range of key positions that prefix and chunk leave to it, and with whether the
    causal rule still acts in it.
    """
    size = mask.chunk_size
    cuts = {run.position, run.end}
    if prefix is not None and run.position < prefix < run.end:
        cuts.add(prefix)
    if size is not None:
        cuts.update(range((run.position // size + 1) * size, run.end, size))
    pieces = []
    for position, end in itertools.pairwise(sorted(cuts)):
        below = prefix is not None and position < prefix
        low, high = -_FAR, prefix if prefix is not None and below else _FAR
        if size is not None:
            low = position // size * size
            high = min(low + size, high)
        piece = Run(run.start + position - run.position, position, end)
        pieces.append((piece, low, high, mask.causal and not below))
    return pieces


def _block(
    b: int, q: Run, k: Run, causal: bool, window: int | None, low: int = -_FAR, high: int = _FAR
) -> Block | None:
    """The block of queries and of keys at positions ``low .. high - 1``, without ends that see or show nothing."""
    behind = _FAR if window is None else window - 1
    ahead = 0 if causal else behind
    first, last = max(k.position, low), min(k.end, high)
    begin, end = max(q.position, first - ahead), min(q.end, last + behind)
    if first >= last or begin >= end:
        return None
    first, last = max(first, begin - behind), min(last, end + ahead)
    return Block(
        b,
        q.start + begin - q.position,
        q.start + end - q.position,
        k.start + first - k.position,
        k.start + last - k.position,
        min(max(begin - first, -2 * MAX_WINDOW), 2 * MAX_WINDOW),
        int(causal and last - 1 > begin),
    )


def key_intervals(table: Tensor, batch: int, q_len: int, window: int | None) -> Tensor:
    """The half-open run of keys that each query sees, start and stop: an int64 CPU tensor ``[batch, Q, 2]``."""
    b, q_start, q_stop, k_start, k_stop, shift, causal = table.unbind(1)
    sizes = q_stop - q_start
    block = torch.repeat_interleave(sizes)
    i = torch.arange(block.numel(), device="cpu") - (sizes.cumsum(0) - sizes)[block]
    keys = (k_stop - k_start)[block]
    distance = i + shift[block]  # to the first key of the block
    low, high = torch.zeros_like(keys), torch.where(causal[block] == 1, torch.minimum(keys, distance + 1), keys)
    if window is not None:  # sums are kept within int64: see MAX_WINDOW
        low = (distance.clamp(min=0) - (window - 1)).clamp(min=0)
        high = torch.minimum(high, torch.minimum(distance, keys - window) + window)
    intervals = torch.zeros(batch, q_len, 2, dtype=torch.int64, device="cpu")
    intervals[b[block], q_start[block] + i] = k_start[block, None] + torch.stack((low, high), 1)
    return intervals


def covered_keys(intervals: Tensor, kv_len: int) -> Tensor:
    """Which keys lie in any of a batch row's intervals: Bool ``[batch, K]``, in time linear in queries and keys."""
    start, stop = intervals.unbind(2)
    live = (stop > start).to(torch.int32)
    change = torch.zeros(start.shape[0], kv_len + 1, dtype=torch.int32, device="cpu")
    change.scatter_add_(1, start, live).scatter_add_(1, stop, -live)
    return change[:, :kv_len].cumsum(1) > 0
