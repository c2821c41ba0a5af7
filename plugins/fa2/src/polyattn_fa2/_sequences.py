"""From blocks to sequences: the rows of queries and keys of each kernel call, and where sequences begin.

A block is a row of ``MaskLayout.to_blocks()``: inside it query i sees key j iff ``d = i - j + shift`` (both counted
from the block's start) satisfies ``d >= 0`` when causal and ``|d| < window``. The kernels know no shift: they put the
last query of a sequence on its last key. So the queries of a block up to its last key form one sequence, with filler
queries behind them where keys go on, and those beyond its last key another one, which only looks back. All sequences
of a call share the same reach to the left and to the right; sequences that need another reach make another call. There
are at most three.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Reach = tuple[int, int]
EVERYTHING: Reach = (-1, -1)


class Piece(NamedTuple):
    """One sequence.

    Attributes:
        q_start: first query, in rows of the flattened ``[B * Q]``.
        queries: how many.
        fillers: queries behind them that are there for alignment only.
        k_start: first key, in rows of the flattened ``[B * K]``.
        keys: how many.
    """

    q_start: int
    queries: int
    fillers: int
    k_start: int
    keys: int


class Call(NamedTuple):
    """One kernel call: a row of ``Sequences.calls``.

    Attributes:
        queries: real queries, in all sequences.
        slots: queries with fillers.
        keys: keys.
        sequences: how many.
        max_q: the longest sequence of queries, fillers included.
        max_k: at least the longest sequence of keys.
        left: how many keys before its position a query sees; -1: all.
        right: how many keys after its position a query sees; -1: all.
    """

    queries: int
    slots: int
    keys: int
    sequences: int
    max_q: int
    max_k: int
    left: int
    right: int


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """The kernel calls of a layout. Index tensors list one call after the other.

    Attributes:
        calls: int64 CPU ``[calls, 8]``, columns of :class:`Call`.
        q_offsets: int32 ``[sum of sequences + 1]``, each call's offsets from 0; ``None`` in a fixed call.
        k_offsets: likewise.
        q_rows: int64, the row of the flattened ``[B * Q]`` of each query; ``None``: one call takes all in order.
        q_slots: int64, the place of each query within its call's slots; ``None``: no fillers.
        k_rows: int64, the row of the flattened ``[B * K]`` of each key; ``None``: one call takes all in order.
        distinct: whether no key is in two sequences.
    """

    calls: Tensor
    q_offsets: Tensor | None = None
    k_offsets: Tensor | None = None
    q_rows: Tensor | None = None
    q_slots: Tensor | None = None
    k_rows: Tensor | None = None
    distinct: bool = True


def uniform(batch: int, q_len: int, kv_len: int, reach: Reach, *, fixed: bool, device: torch.device) -> Sequences:
    """Every batch row as one sequence; ``fixed``: for a kernel that takes ``[B, S, H, D]``. Reads nothing."""
    call = Call(batch * q_len, batch * q_len, batch * kv_len, batch, q_len, kv_len, *reach)
    calls = torch.tensor([call], dtype=torch.int64, device="cpu")
    if fixed:
        return Sequences(calls)
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Sequences(calls, rows * q_len, rows * kv_len)


def from_blocks(
    blocks: Iterable[Sequence[int]], window: int | None, *, q_len: int, kv_len: int, batch: int, repeat: bool
) -> Sequences:
    """The sequences of a block table, on the CPU.

    Args:
        blocks: rows ``batch, q_start, q_stop, k_start, k_stop, shift, causal``.
        window: of the blocks.
        q_len: number of queries Q.
        kv_len: number of keys K.
        batch: number of batch rows.
        repeat: whether the blocks of one batch row stand for all of them.
    """
    groups = _grouped(_pieces(blocks, window, q_len, kv_len))
    table = {reach: torch.tensor(pieces, dtype=torch.int64) for reach, pieces in groups.items()}
    if repeat:
        table = {reach: _repeated(pieces, batch, q_len, kv_len) for reach, pieces in table.items()}
    return _joined(table, batch * q_len, batch * kv_len)


def from_validity(kv_valid: Tensor, active: Tensor | None, *, q_len: int, batch: int) -> Sequences:
    """The sequences of a mask that hides invalid keys and nothing else, wherever its holes are, on the CPU.

    No distance is compared, so that the keys that are left may close ranks.

    Args:
        kv_valid: Bool CPU ``[B|1, K]``.
        active: Bool CPU ``[B|1, Q]``, or ``None``: all queries are.
        q_len: number of queries Q.
        batch: number of batch rows B.
    """
    valid = kv_valid.expand(batch, -1)
    wanted = torch.ones(1, q_len, dtype=torch.bool) if active is None else active
    rows = (wanted & valid.any(1, keepdim=True)).expand(batch, -1)
    keys = valid & rows.any(1, keepdim=True)
    q_lengths, k_lengths = (x.sum(1)[rows.any(1)] for x in (rows, keys))
    if q_lengths.numel() == 0:
        return _joined({}, rows.numel(), keys.numel())
    q_rows, k_rows = (x.flatten().nonzero()[:, 0] for x in (rows, keys))
    call = Call(
        len(q_rows),
        len(q_rows),
        len(k_rows),
        len(q_lengths),
        int(q_lengths.max()),
        int(k_lengths.max()),
        *EVERYTHING,
    )
    return Sequences(
        torch.tensor([call], dtype=torch.int64),
        _offsets(q_lengths),
        _offsets(k_lengths),
        None if len(q_rows) == rows.numel() else q_rows,
        None,
        None if len(k_rows) == keys.numel() else k_rows,
    )


class _Found(NamedTuple):
    """A piece, and the reach that it needs.

    ``reach`` is ``None`` for a single query that sees all keys of its piece: any call that reaches them can take it.
    ``behind`` is how far a piece beyond its last key looks back, counted from its end; the left reach of its call
    follows from all of them.
    """

    piece: Piece
    reach: Reach | None
    behind: int | None = None


def _pieces(blocks: Iterable[Sequence[int]], window: int | None, q_len: int, kv_len: int) -> list[_Found]:
    real = [tuple(block) for block in blocks if block[1] < block[2] and block[3] < block[4]]
    if window is not None and all(window > _farthest(*block[1:6]) for block in real):
        window = None
    any_causal = any(block[6] for block in real)
    found: list[_Found] = []
    for row, q_start, q_stop, k_start, k_stop, shift, causal in real:
        q0, k0 = row * q_len + q_start, row * kv_len + k_start
        queries, keys = q_stop - q_start, k_stop - k_start
        if queries == 1 or (window is None and not causal):
            found.append(_Found(Piece(q0, queries, 0, k0, keys), None if queries == 1 else EVERYTHING))
            continue
        # A block whose keys all lie behind its queries is causal or not as it suits the others.
        looks_back = bool(causal) or (any_causal and shift >= keys - 1)
        head = min(queries, max(0, keys - shift))
        if head:
            reach = -1 if window is None else window - 1
            fillers = keys - shift - head
            found.append(_Found(Piece(q0, head, fillers, k0, keys), (reach, 0 if looks_back else reach)))
        if head == queries:
            continue
        tail, first = queries - head, 0 if window is None else max(0, head + shift - window + 1)
        piece = Piece(q0 + head, tail, 0, k0 + first, keys - first)
        if window is None:
            found.append(_Found(piece, None if tail == 1 else EVERYTHING))
        else:
            gap = head + shift - keys
            found.append(_Found(piece, None, window - 1 - gap - tail) if tail > 1 else _Found(piece, None))
    return found


def _farthest(q_start: int, q_stop: int, k_start: int, k_stop: int, shift: int) -> int:
    return max(q_stop - q_start - 1 + shift, k_stop - k_start - 1 - shift)


def _grouped(found: list[_Found]) -> dict[Reach, list[Piece]]:
    """The pieces of each call, sorted by query."""
    groups: dict[Reach, list[Piece]] = defaultdict(list)
    # Query i' of a tail stands `left + fillers` places before what the last query sees first: all share the least left.
    left = min((x.behind for x in found if x.behind is not None), default=0)
    for piece, reach, behind in found:
        if behind is not None:
            groups[left, -1].append(piece._replace(fillers=behind - left))
        elif reach is not None:
            groups[reach].append(piece)
    for piece, reach, behind in found:
        if reach is None and behind is None:
            takes_it = (r for r in groups if r[0] < 0 or r[0] >= piece.keys - 1)
            groups[next(takes_it, EVERYTHING)].append(piece)
    return {reach: sorted(pieces) for reach, pieces in groups.items()}


def _repeated(pieces: Tensor, batch: int, q_len: int, kv_len: int) -> Tensor:
    step = torch.tensor([q_len, 0, 0, kv_len, 0], dtype=torch.int64)
    return (pieces + torch.arange(batch)[:, None, None] * step).flatten(0, 1)


def _joined(groups: dict[Reach, Tensor], q_rows: int, k_rows: int) -> Sequences:
    """The calls of tables of pieces ``[N, 5]``; ``q_rows`` and ``k_rows`` are B * Q and B * K."""
    groups = {reach: pieces for reach, pieces in groups.items() if len(pieces)}
    if not groups:
        none = torch.zeros(0, dtype=torch.int64)
        return Sequences(none.view(0, len(Call._fields)), none.int(), none.int(), none, None, none)
    calls, q_offsets, k_offsets, slots = [], [], [], []
    for (left, right), pieces in groups.items():
        _, queries, fillers, _, keys = pieces.unbind(1)
        padded = queries + fillers
        max_q, max_k = int(padded.max()), int(keys.max())
        if right >= max_k and right < max_q - 1:
            # The kernels take a reach of max_k or more for unbounded, which it is not for queries far before the keys.
            max_k = right + 1
        totals = (int(queries.sum()), int(padded.sum()), int(keys.sum()))
        calls.append(Call(*totals, len(pieces), max_q, max_k, left, right))
        q_offsets.append(_offsets(padded))
        k_offsets.append(_offsets(keys))
        slots.append(_ranges(q_offsets[-1][:-1].long(), queries))
    q_start, queries, fillers, k_start, keys = torch.cat(list(groups.values())).unbind(1)
    by_key = k_start.argsort()
    return Sequences(
        torch.tensor(calls, dtype=torch.int64),
        torch.cat(q_offsets),
        torch.cat(k_offsets),
        None if len(calls) == 1 and _is_everything(q_start, queries, q_rows) else _ranges(q_start, queries),
        torch.cat(slots) if bool(fillers.any()) else None,
        None if len(calls) == 1 and _is_everything(k_start, keys, k_rows) else _ranges(k_start, keys),
        distinct=bool((k_start[by_key][1:] >= (k_start + keys)[by_key][:-1]).all()),
    )


def _is_everything(starts: Tensor, sizes: Tensor, count: int) -> bool:
    """Whether the ranges are all of ``count`` rows, in order."""
    before = sizes.cumsum(0) - sizes
    return int(sizes.sum()) == count and bool((starts == before).all())


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """``starts[0], starts[0] + 1, ...`` of every range, one after the other."""
    before = sizes.cumsum(0) - sizes
    return torch.repeat_interleave(starts - before, sizes) + torch.arange(int(sizes.sum()))
