"""From blocks to pieces: cutting a mask into what a kernel can do in one sequence.

A block is a row of ``MaskLayout.to_blocks()``: inside it query i sees key j iff ``d = i - j + shift`` (both counted
from the block's start) satisfies ``d >= 0`` when causal and ``|d| < window``. The kernels know no shift: they put the
last query of a sequence on its last key. So the queries of a block up to its last key form one sequence, with filler
queries behind them where keys go on, and those beyond its last key another one, which only looks back. Queries that all
stand before the first key only look ahead, from wherever they are put. All sequences of a call share one window
size, to the left and to the right; sequences that need another one make another call. There are at most five. The
fillers of a sequence are fewer than the most queries and the most keys of a block together, however far apart they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: How many keys before and after its position a query sees, as the kernels take it; -1: all.
WindowSize = tuple[int, int]
EVERYTHING: WindowSize = (-1, -1)
#: Causal, both ways, everything, looking back only, and looking ahead only.
MAX_CALLS = 5


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


def pieces_by_window_size(
    blocks: Iterable[Sequence[int]], window: int | None, *, q_len: int, kv_len: int
) -> dict[WindowSize, list[Piece]]:
    """The sequences of each kernel call, sorted by query.

    Args:
        blocks: rows ``batch, q_start, q_stop, k_start, k_stop, shift, causal``.
        window: of the blocks.
        q_len: number of queries Q.
        kv_len: number of keys K.

    Returns:
        By how many keys before and after its position a query sees, -1 meaning all.
    """
    return _grouped(_pieces(blocks, window, q_len, kv_len))


class _Found(NamedTuple):
    """A piece, and the window size that it needs.

    ``window_size`` is ``None`` for a single query that sees all keys of its piece: any call that reaches them can take
    it. ``behind`` is how far a piece beyond its last key looks back, counted from its end; the left side of its call
    follows from all of them. ``ahead`` is how far a piece before its first key looks ahead, once its last query stands
    on its last key; likewise.
    """

    piece: Piece
    window_size: WindowSize | None = None
    behind: int | None = None
    ahead: int | None = None


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
        if window is not None and not causal and queries + shift <= 0:
            keys = min(keys, queries + shift + window - 1)  # the rest is beyond the last query's sight
            ahead = shift + window - 1 - keys + queries
            piece = Piece(q0, queries, 0, k0, keys)  # whose first query has the shortest sight
            found.append(_Found(piece, EVERYTHING) if ahead >= queries - 1 else _Found(piece, ahead=ahead))
            continue
        # A block whose keys all lie behind its queries is causal or not as it suits the others.
        looks_back = bool(causal) or (any_causal and shift >= keys - 1)
        head = min(queries, max(0, keys - shift))
        if head:
            side = -1 if window is None else min(window - 1, q_len + kv_len)  # the kernels count in int32
            fillers = keys - shift - head
            found.append(_Found(Piece(q0, head, fillers, k0, keys), (side, 0 if looks_back else side)))
        if head == queries:
            continue
        tail, first = queries - head, 0 if window is None else max(0, head + shift - window + 1)
        piece = Piece(q0 + head, tail, 0, k0 + first, keys - first)
        if window is None:
            found.append(_Found(piece, None if tail == 1 else EVERYTHING))
        else:
            behind = window - 1 - (head + shift - keys) - tail
            if tail == 1:
                found.append(_Found(piece))
            else:  # the last query has the shortest sight
                found.append(_Found(piece, EVERYTHING) if behind >= piece.keys - 1 else _Found(piece, behind=behind))
    return found


def _farthest(q_start: int, q_stop: int, k_start: int, k_stop: int, shift: int) -> int:
    return max(q_stop - q_start - 1 + shift, k_stop - k_start - 1 - shift)


def _grouped(found: list[_Found]) -> dict[WindowSize, list[Piece]]:
    """The pieces of each call, sorted by query."""
    groups: dict[WindowSize, list[Piece]] = defaultdict(list)
    # All that look ahead share the farthest sight, fillers moving each to where it needs that.
    right = max((x.ahead for x in found if x.ahead is not None), default=0)
    # Query i' of a tail stands `left + fillers` places before what the last query sees first: all share the least left.
    left = min((x.behind for x in found if x.behind is not None), default=0)
    for piece, window_size, behind, ahead in found:
        if ahead is not None:
            groups[-1, right].append(piece._replace(fillers=right - ahead))
        elif behind is not None:
            groups[left, -1].append(piece._replace(fillers=behind - left))
        elif window_size is not None:
            groups[window_size].append(piece)
    for piece, window_size, behind, ahead in found:
        if window_size is None and behind is None and ahead is None:
            takes_it = (r for r in groups if r[0] < 0 or r[0] >= piece.keys - 1)
            groups[next(takes_it, EVERYTHING)].append(piece)
    return {window_size: sorted(pieces) for window_size, pieces in groups.items()}
