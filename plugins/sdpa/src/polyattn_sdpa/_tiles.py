"""From bands to tiles: the queries and keys that one fused call each computes.

A band is a row of ``MaskLayout.to_bands()``: inside it query i sees key j, both counted from the band's start, where
``low <= i - j <= high``. A band that hides nothing or is plainly causal is one tile. Any other is walked in strips of
query rows; a strip attends to the few keys that it can see under a small mask that depends on ``i - j`` alone, so
neighbouring strips share it. Work and memory are linear in the length for a fixed window.

Several bands may also be one tile: their keys lie behind each other, under one mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Query rows of a strip. On CPU 192 is where the fused op starts to work in larger pieces; 128 takes a tenth longer.
STRIP = 192

#: The keys of a masked strip start at a multiple of this, so that the rows of its scores are aligned.
ALIGNMENT = 16


class Band(NamedTuple):
    """Query i sees key j, both counted from the band's start, where ``low <= i - j <= high``."""

    batch: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int
    high: int

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.low <= self.k_start - self.k_stop + 1 and self.high >= self.q_stop - self.q_start - 1

    @property
    def is_diagonal(self) -> bool:
        """Whether the i-th query sees the i-th key, of as many."""
        return self.low == self.high == 0 and self.q_stop - self.q_start == self.k_stop - self.k_start

    def part(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Band | None:
        """What lies in a rectangle, without ends that see or show nothing; ``None`` where that is nothing."""
        q0, q1 = max(q_start, self.q_start), min(q_stop, self.q_stop)
        k0, k1 = max(k_start, self.k_start), min(k_stop, self.k_stop)
        if q0 >= q1 or k0 >= k1:
            return None
        # In indices of the whole tensors the band is low + apart <= q - k <= high + apart.
        apart = self.q_start - self.k_start
        low, high = self.low + apart, self.high + apart
        q0, q1 = max(q0, k0 + low), min(q1, k1 + high)
        k0, k1 = max(k0, q0 - high), min(k1, q1 - low)
        if low > high or q0 >= q1 or k0 >= k1:
            return None
        return Band(self.batch, q0, q1, k0, k1, max(low - q0 + k0, k0 - k1), min(high - q0 + k0, q1 - q0))


class Tile(NamedTuple):
    """One fused call.

    Attributes:
        batch: batch row of the layout.
        q_start: first query, in the whole tensor.
        q_stop: the query behind the last.
        keys: where its keys start and stop, in order.
        causal: the kernel's own top-left causal flag.
        pattern: what fixes its mask, if it has one: each band as its rows, its columns, ``low`` and ``high``, all
            counted from the tile's first query and key.
        blind: from which to before which row, counted from the tile's first, it sees nothing of these keys.
        adds: whether an earlier tile has some of its queries.
        diagonal: its i-th query sees the i-th key of each place.
    """

    batch: int
    q_start: int
    q_stop: int
    keys: tuple[tuple[int, int], ...]
    causal: bool = False
    pattern: tuple[tuple[int, ...], ...] = ()
    blind: tuple[tuple[int, int], ...] = ()
    adds: bool = False
    diagonal: bool = False

    @property
    def width(self) -> int:
        """The number of its keys."""
        return sum(stop - start for start, stop in self.keys)


def strips(band: Band, rows: int = STRIP) -> list[Tile]:
    """The tiles of one band; every query that sees a key lies in exactly one."""
    batch, q0, q1, k0, k1, low, high = band
    count, keys = q1 - q0, k1 - k0
    if not (low <= 0 <= high and low <= count - keys <= high):  # a query or a key at an end sees nothing
        whole = band.part(q0, q1, k0, k1)
        return [] if whole is None else strips(whole, rows)
    if low <= 1 - keys and high >= count - 1:
        return [Tile(batch, q0, q1, ((k0, k1),))]
    if low == 0 and high >= count - 1:
        return [Tile(batch, q0, q1, ((k0, k1),), causal=True)]
    found, start = [], 0
    if low == 0:  # the first rows of a window are an ordinary causal square
        start = high + 1
        found.append(Tile(batch, q0, q0 + start, ((k0, min(k1, k0 + start)),), causal=True))
    for r0 in range(start, count, rows):
        r1 = min(count, r0 + rows)
        first, stop = max(0, r0 - high), min(keys, r1 - low)
        if r0 - (stop - 1) >= low and r1 - 1 - first <= high:
            found.append(Tile(batch, q0 + r0, q0 + r1, ((k0 + first, k0 + stop),)))
            continue
        first -= min(first, (k0 + first) % ALIGNMENT)  # hidden by the mask
        pattern = _bounded(0, r1 - r0, 0, stop - first, low - r0 + first, high - r0 + first)
        found.append(Tile(batch, q0 + r0, q0 + r1, ((k0 + first, k0 + stop),), pattern=(pattern,)))
    return found


def joined(bands: Sequence[Band]) -> Tile:
    """One tile of several bands, no pair of a query and a key in two of them."""
    q_start, q_stop = min(band.q_start for band in bands), max(band.q_stop for band in bands)
    if all(band.is_diagonal and band[1:3] == (q_start, q_stop) for band in bands):
        places = sorted((band.k_start, band.k_stop) for band in bands)
        return Tile(bands[0].batch, q_start, q_stop, tuple(places), diagonal=True)
    keys: list[tuple[int, int]] = []
    for start, stop in sorted({(band.k_start, band.k_stop) for band in bands}):
        if keys and start <= keys[-1][1]:
            keys[-1] = (keys[-1][0], max(keys[-1][1], stop))
        else:
            keys.append((start, stop))
    whole = all((band.q_start, band.q_stop) == (q_start, q_stop) and band.is_full for band in bands)
    if whole and sum(band.k_stop - band.k_start for band in bands) == sum(stop - start for start, stop in keys):
        return Tile(bands[0].batch, q_start, q_stop, tuple(keys))
    column, place = {}, 0
    for start, stop in keys:
        column[start] = place
        place += stop - start
    starts, at, pattern = [start for start, _ in keys], 0, []
    for band in sorted(bands, key=lambda band: band.k_start):
        while at + 1 < len(starts) and starts[at + 1] <= band.k_start:
            at += 1
        first, row = column[starts[at]] + band.k_start - starts[at], band.q_start - q_start
        size = (band.q_stop - band.q_start, band.k_stop - band.k_start)
        pattern.append(_bounded(row, row + size[0], first, first + size[1], band.low, band.high))
    blind = tuple(_gaps(sorted((r0, r1) for r0, r1, *_ in pattern)))
    return Tile(bands[0].batch, q_start, q_stop, tuple(keys), pattern=tuple(pattern), blind=blind)


def _gaps(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What lies between ranges that begin at 0, in order."""
    reached = 0
    for start, stop in ranges:
        if start > reached:
            yield reached, start
        reached = max(reached, stop)


def _bounded(r0: int, r1: int, c0: int, c1: int, low: int, high: int) -> tuple[int, ...]:
    """One entry of a pattern, its bounds cut to what ``i - j`` can be, so that equal masks have equal patterns."""
    return r0, r1, c0, c1, max(low, c0 - c1), min(high, r1 - r0)


def mask_of(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a tile with a pattern: 0 where the query sees the key, ``-inf`` elsewhere."""
    mask = torch.full((tile.q_stop - tile.q_start, tile.width), -torch.inf, dtype=dtype, device=device)
    for r0, r1, c0, c1, low, high in tile.pattern:
        part = mask[r0:r1, c0:c1]
        if low <= c0 - c1 + 1 and high >= r1 - r0 - 1:
            part.zero_()
            continue
        rows, columns = (torch.arange(n, dtype=torch.int32, device=device) for n in part.shape)
        apart = rows[:, None] - columns[None, :]
        part.masked_fill_((apart >= low) & (apart <= high), 0.0)
    return mask


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as the fused kernels take it: 0 where visible, ``-inf`` elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
