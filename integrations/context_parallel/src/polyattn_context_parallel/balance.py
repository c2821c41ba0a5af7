"""The rules by which tokens are shared out to ranks."""

from __future__ import annotations

from collections.abc import Callable

from polyattn import MaskLayout
from polyattn_context_parallel.intervals import Demand, Partition, documents_of


def contiguous(layout: MaskLayout, ranks: int) -> Partition:
    """One piece for each rank; the lengths differ by 1 at most."""
    length = layout.q_len
    pieces = [(length * r // ranks, length * (r + 1) // ranks, r) for r in range(ranks)]
    return Partition.of(pieces, length, ranks)


def zigzag(layout: MaskLayout, ranks: int) -> Partition:
    """Two pieces for each rank, as far from the start as from the end: a causal mask gives all the same work."""
    length, count = layout.q_len, 2 * ranks
    pieces = [(length * i // count, length * (i + 1) // count, min(i, count - 1 - i)) for i in range(count)]
    return Partition.of(pieces, length, ranks)


def documents(layout: MaskLayout, ranks: int) -> Partition:
    """Documents whole on one rank where they fit, the longest first; the others zigzag over as few ranks as hold them.

    Numbers of tokens differ by 1 at most. Among the ranks with room, the one with the least work so far is chosen.
    """
    length = layout.q_len
    parts = documents_of(layout)
    whole = Partition.of([(start, stop, i) for i, (start, stop) in enumerate(parts)], length, len(parts))
    work = Demand.of(layout, whole).pairs.tolist() if parts else []
    room = [length // ranks + (r < length % ranks) for r in range(ranks)]
    load = [0.0] * ranks
    pieces: list[tuple[int, int, int]] = []
    for index in sorted(range(len(parts)), key=lambda i: parts[i][0] - parts[i][1]):
        start, stop = parts[index]
        size = stop - start
        fitting = [r for r in range(ranks) if room[r] >= size]
        shares = {min(fitting, key=load.__getitem__): size} if fitting else _shares(size, room, load)
        low, high = start, stop
        for rank, share in shares.items():
            head = share if fitting else share // 2
            pieces += [(low, low + head, rank), (high - share + head, high, rank)]
            low, high = low + head, high - share + head
            room[rank] -= share
            load[rank] += work[index] * share / size
    return Partition.of(pieces, length, ranks)


def _shares(size: int, room: list[int], load: list[float]) -> dict[int, int]:
    """How many tokens of a document each of the roomiest ranks takes, in proportion to its room."""
    order = sorted((r for r in range(len(room)) if room[r]), key=lambda r: (-room[r], load[r]))
    chosen, total = [], 0
    for rank in order:
        if total >= size:
            break
        chosen.append(rank)
        total += room[rank]
    shares, held, given = {}, 0, 0
    for rank in chosen:
        held += room[rank]
        shares[rank] = (
            size * held // total - given
        )  # differences of rounded sums: they add up, and none exceeds its room
        given += shares[rank]
    return shares


BALANCES: dict[str, Callable[[MaskLayout, int], Partition]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "documents": documents,
}
