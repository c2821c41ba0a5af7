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
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._layout.structured import StructuredMask

#: Above this many runs of one segment its positions are scattered, and a dense mask describes it better.
MAX_RUNS = 8
#: Sums of positions and a larger window may leave int64.
MAX_WINDOW = 2**62


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
    """Indices ``start .. stop - 1`` of one segment at consecutive positions, the first one at ``position``."""

    start: int
    stop: int
    position: int
    segment: int

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.position + self.stop - self.start

    def between(self, low: int | None, high: int | None) -> Run:
        """The part at positions ``low .. high - 1``; may be empty."""
        if low is None and high is None:
            return self
        position = self.position if low is None else min(max(self.position, low), self.end)
        end = self.end if high is None else max(min(self.end, high), position)
        start = self.start + position - self.position
        return Run(start, start + end - position, position, self.segment)


def find_blocks(mask: StructuredMask, q_len: int, kv_len: int, batch: int, active: Tensor | None) -> list[Block] | None:
    """The blocks of a mask whose tensors are on the host, or ``None`` where it has no such form.

    Args:
        mask: the structure.
        q_len: number of queries Q.
        kv_len: number of keys K.
        batch: number of batch rows to list; rows of size-1 tensors repeat.
        active: ``Bool[B|1, Q]``; queries before the first and after the last active one are left out.
    """
    if mask.window is not None and mask.window > MAX_WINDOW:
        return None
    tensors = list(mask.tensors().values()) + ([] if active is None else [active])
    distinct = min(batch, max((value.shape[0] for value in tensors), default=1))
    rows = []
    for b in range(distinct):
        row = _row_blocks(mask, b, q_len, kv_len, active)
        if row is None:
            return None
        rows.append(row)
    if distinct < batch:
        return [block._replace(batch=b) for b in range(batch) for block in rows[b % distinct]]
    return list(itertools.chain.from_iterable(rows))


def to_table(blocks: list[Block]) -> Tensor:
    """The blocks as a table, behind an empty block; a mask that shows nothing is two empty blocks."""
    empty = Block(0, 0, 0, 0, 0, 0, 0)
    return torch.tensor([empty, *(blocks or [empty])], dtype=torch.int64, device="cpu")


def _row_blocks(mask: StructuredMask, b: int, q_len: int, kv_len: int, active: Tensor | None) -> list[Block] | None:
    def row(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[b % value.shape[0]]

    span = range(q_len)
    if active is not None:
        indices = active[b % active.shape[0]].nonzero()[:, 0].tolist()
        span = range(indices[0], indices[-1] + 1) if indices else range(0)
    q_positions, kv_positions = (mask.q_positions, mask.kv_positions) if mask.positional else (None, None)
    queries = _runs(span, kv_len - q_len, row(q_positions), row(mask.q_segments), None)
    keys = _runs(range(kv_len), 0, row(kv_positions), row(mask.kv_segments), row(mask.kv_valid))
    if queries is None or keys is None:
        return None
    keys_of: dict[int, list[Run]] = defaultdict(list)
    for run in keys:
        keys_of[run.segment].append(run)
    prefixes = row(mask.prefix_lengths)
    blocks = []
    for run in queries:
        prefix = None if prefixes is None else int(prefixes[run.segment] if prefixes.dim() else prefixes)
        for piece, low, high, causal in _pieces(mask, run, prefix):
            candidates = (_block(b, piece, k.between(low, high), causal, mask.window) for k in keys_of[run.segment])
            found = [block for block in candidates if block is not None]
            if len(found) > 1:
                return None
            blocks += found
    return blocks


def _runs(
    span: range, offset: int, positions: Tensor | None, segments: Tensor | None, valid: Tensor | None
) -> list[Run] | None:
    """The runs of indices in ``span``, in order and without invalid ones; ``None`` where they are scattered."""
    if not span or (positions is None and segments is None and valid is None):
        return [Run(span.start, span.stop, span.start + offset, 0)] if span else []
    size = len(span)
    cut = torch.zeros(size - 1, dtype=torch.bool, device="cpu")
    for value in (segments, valid):
        if value is not None:
            cut |= value.narrow(0, span.start, size).diff() != 0
    if positions is not None:
        before, after = positions.narrow(0, span.start, size)[:-1], positions.narrow(0, span.start, size)[1:]
        cut |= (after != before + 1) | (after < before)  # the largest number plus 1 wraps to the least
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), cut.nonzero()[:, 0] + 1]) + span.start
    at = starts.tolist()
    place = [start + offset for start in at] if positions is None else positions[starts].tolist()
    segment = [0] * len(at) if segments is None else segments[starts].tolist()
    real = [True] * len(at) if valid is None else valid[starts].tolist()
    runs = [Run(*run) for run in itertools.compress(zip(at, [*at[1:], span.stop], place, segment, strict=True), real)]
    scattered = max(Counter(run.segment for run in runs).values(), default=0) > MAX_RUNS
    return None if scattered else runs


def _pieces(mask: StructuredMask, run: Run, prefix: int | None) -> Iterator[tuple[Run, int | None, int | None, bool]]:
    """Cut a run of queries where the rule changes: at its prefix and between chunks.

    Yields each piece, the half-open range of key positions that prefix and chunk leave to it, and whether the
    causal rule still acts in it.
    """
    size = mask.chunk_size
    if size is None and prefix is None:
        yield run, None, None, mask.causal
        return
    cuts = {run.position, run.end}
    if prefix is not None and run.position < prefix < run.end:
        cuts.add(prefix)
    if size is not None:
        cuts.update(range((run.position // size + 1) * size, run.end, size))
    for position, end in itertools.pairwise(sorted(cuts)):
        below = prefix is not None and position < prefix
        high = prefix if below else None
        low = None
        if size is not None:
            low = position // size * size
            high = low + size if high is None else min(low + size, high)
        yield run.between(position, end), low, high, mask.causal and not below


def _block(b: int, q: Run, k: Run, causal: bool, window: int | None) -> Block | None:
    """The block of a piece of queries and a run of keys, without the ends of both that see or show nothing."""
    ahead = 0 if causal else None if window is None else window - 1
    behind = None if window is None else window - 1
    if k.start == k.stop:
        return None
    q = q.between(None if ahead is None else k.position - ahead, None if behind is None else k.end + behind)
    k = k.between(None if behind is None else q.position - behind, None if ahead is None else q.end + ahead)
    if q.start == q.stop:
        return None
    acts = causal and k.end - 1 > q.position
    shift = q.position - k.position if acts or window is not None else 0
    return Block(b, q.start, q.stop, k.start, k.stop, shift, int(acts))


def key_ranges(table: Tensor, batch: int, q_len: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The half-open run of keys that each query sees: starts and stops, int64 CPU tensors ``[batch, Q]``."""
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
    start, stop = torch.zeros(2, batch, q_len, dtype=torch.int64, device="cpu").unbind()
    at = b[block], q_start[block] + i
    start[at], stop[at] = k_start[block] + low, k_start[block] + high
    return start, stop


def covered_keys(start: Tensor, stop: Tensor, kv_len: int) -> Tensor:
    """Which keys lie in any of a batch row's ranges: Bool ``[batch, K]``, in time linear in queries and keys."""
    live = (stop > start).to(torch.int32)
    change = torch.zeros(start.shape[0], kv_len + 1, dtype=torch.int32, device="cpu")
    change.scatter_add_(1, start, live).scatter_add_(1, stop, -live)
    return change[:, :kv_len].cumsum(1) > 0
