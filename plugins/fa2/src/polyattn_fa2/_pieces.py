"""From bands to pieces: cutting a mask into what a kernel can do in one sequence.

A block is a row of ``MaskLayout.to_bands()``: inside it query i sees key j, both counted from the block's start, where
``low <= i - j <= high``. In a sequence of n queries and m keys a kernel puts query i at position ``i + m - n`` of the
keys and shows it ``left`` keys before and ``right`` after that. So a band needs ``left + right = high - low`` and the
right place: *fillers* behind the queries move them to earlier positions, and queries that would stand behind the last
key form a piece of their own, which only looks back. All sequences of a call share one window size; sequences that need
another one make another call.

A query that lies in several blocks sees several runs of keys. The blocks are dealt out to *parts* so that each query
lies in one block of a part at most; the results of the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: How many keys before and after its position a query sees, as the kernels take it; -1: all.
WindowSize = tuple[int, int]
EVERYTHING: WindowSize = (-1, -1)


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


class Block(NamedTuple):
    """A block in rows of the flattened tensors; a bound that hides nothing is ``None``."""

    q_start: int
    queries: int
    k_start: int
    keys: int
    low: int | None
    high: int | None


def pieces_by_call(
    bands: Iterable[Sequence[int]], right: int, *, q_len: int, kv_len: int
) -> list[tuple[WindowSize, int, list[Piece]]]:
    """The sequences of each kernel call, sorted by query.

    Args:
        bands: rows ``batch, q_start, q_stop, k_start, k_stop, low, high``, sorted by batch and query.
        right: how many keys after its position a query of most blocks sees, where that is bounded.
        q_len: number of queries Q.
        kv_len: number of keys K.

    Returns:
        The window size of each call, its part, and its pieces.
    """
    return [
        (size, part, pieces)
        for part, blocks in enumerate(_parts(bands, q_len, kv_len))
        for size, pieces in _grouped([found for block in blocks for found in _pieces(block, right)]).items()
    ]


def _parts(bands: Iterable[Sequence[int]], q_len: int, kv_len: int) -> list[list[Block]]:
    """The blocks in as few parts as possible, in each of which no query lies twice."""
    parts: list[list[Block]] = []
    for row, q_start, q_stop, k_start, k_stop, low, high in bands:
        queries, keys = q_stop - q_start, k_stop - k_start
        if not (queries and keys):
            continue
        bounds = (low if low > 1 - keys else None, high if high < queries - 1 else None)
        block = Block(row * q_len + q_start, queries, row * kv_len + k_start, keys, *bounds)
        for part in parts:
            if part[-1].q_start + part[-1].queries <= block.q_start:
                part.append(block)
                break
        else:
            parts.append([block])
    return parts


class _Found(NamedTuple):
    """A piece, and what it needs of its call.

    Attributes:
        piece: the sequence.
        left, right: the sides of the window; ``None`` where it hides nothing on that side.
        reach: the least ``left`` that hides nothing, where it is ``None``.
        looks_back: whether fillers may move it, so that a smaller ``left`` serves it too.
    """

    piece: Piece
    left: int | None = None
    right: int | None = None
    reach: int = 0
    looks_back: bool = False


def _pieces(block: Block, right: int) -> list[_Found]:
    q0, queries, k0, keys, low, high = block
    if queries == 1 or (low is None and high is None):
        return [_Found(Piece(q0, queries, 0, k0, keys))]
    if low is None:
        assert high is not None
        return [_behind(q0, queries, k0, keys, high)]
    if high is not None:
        # Without fillers the last query stands on the last key, and none has to be cut off.
        straight = queries - keys - low
        right = straight if right < straight <= high - low else min(right, high - low)
    fillers = keys - queries + low + right
    head = queries if fillers >= 0 else queries + fillers
    piece = Piece(q0, head, max(fillers, 0), k0, keys)
    left = None if high is None else high - low - right
    found = [_Found(piece, left, right, keys - 1 - max(fillers, 0))]
    if head < queries:
        first = 0 if high is None else max(0, head - high)
        tail, rest = queries - head, keys - first
        seen_by_all = high is None or tail == 1
        last = Piece(q0 + head, tail, 0, k0 + first, rest)
        found.append(_Found(last) if seen_by_all else _behind(*last[:2], *last[3:], (high or 0) - head + first))
    return found


def _behind(q0: int, queries: int, k0: int, keys: int, high: int) -> _Found:
    """Queries that see the keys up to the last one; the last query has the shortest sight."""
    piece, left = Piece(q0, queries, 0, k0, keys), high + keys - queries
    return _Found(piece) if left >= keys - 1 else _Found(piece, left, looks_back=True)


def _grouped(found: list[_Found]) -> dict[WindowSize, list[Piece]]:
    """The pieces of each call, sorted by query."""
    groups: dict[WindowSize, list[Piece]] = defaultdict(list)
    # Query i of such a piece stands `left + fillers` places before what the last query sees first: all share the least.
    left = min((x.left for x in found if x.looks_back and x.left is not None), default=0)
    for x in found:
        if x.looks_back and x.left is not None:
            groups[left, -1].append(x.piece._replace(fillers=x.left - left))
        elif x.left is not None and x.right is not None:
            groups[x.left, x.right].append(x.piece)
    for x in found:
        if x.left is None and x.right is not None:
            wide = (size for size in groups if size[1] == x.right and (size[0] < 0 or size[0] >= x.reach))
            groups[next(wide, (-1, x.right))].append(x.piece)
    for x in found:
        if x.left is None and x.right is None:
            one = x.piece.queries == 1  # which stands on its last key
            wide = (size for size in groups if one and (size[0] < 0 or size[0] >= x.piece.keys - 1))
            groups[next(wide, EVERYTHING)].append(x.piece)
    return {size: sorted(pieces) for size, pieces in groups.items()}
