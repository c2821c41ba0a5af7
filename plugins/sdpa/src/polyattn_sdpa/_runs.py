"""Several runs of keys for a query: which bands make one fused call.

A call costs some thousand scores beside its own, and merging its output with what other calls computed for the same
queries costs a pass over it. So

* a long band is a call, or one for each of its strips; long bands that the same queries see whole are one;
* long bands of a few keys that all their queries see are one call, as far as they go together;
* long bands of one key for each query, diagonals, are products, no call, as far as they go together;
* the rest is cut into groups of few rows. What all rows of a group see is one call without a mask, the other keys are
  one call under a mask; where the former is little, both are one.

A plan is the table of bands, cut, with the number of its call before each: int64 CPU ``[M, 8]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyattn_sdpa._tiles import STRIP, Band, Tile, joined, strips

#: A long band of which a query sees at most so many keys shares its calls.
THIN = 64

#: Rows of a group of long bands of a few keys: the mask of a strip hides more of them, the more rows it has.
THIN_ROWS = 64

#: With at most so many keys that all rows of a group see, these join the masked call.
FEW_COMMON = 128

#: A call of R queries and K keys takes the time of ``(R + ROW_COST) * (K + KEY_COST) + CALL_COST`` scores in a large
#: one, forward and backward, and each band of a mask so much more. Fitted on two threads, FP32, 4 heads of 64, over 32
#: to 2048 queries and keys: 22 ns a score, 23 rows, 26 keys and 2000 scores in the kernel without a mask; 24 ns, 21
#: rows, 20 keys and 2600 scores with one. Slicing, gathering and merging take as much again as the constant.
ROW_COST, KEY_COST, CALL_COST, BAND_COST = 25, 25, 5000, 500

#: What a query and its key of a diagonal take, in scores of a large call.
DIAGONAL_COST = 40

Call = list[Band]


def planned(bands: Tensor, most: float) -> Tensor | None:
    """The plan of a table of bands ``[N, 7]``, see ``MaskLayout.to_bands``; behind a first row of zeros.

    ``None`` where its tiles cost more than ``most`` scores.
    """
    rows, spent = [[0] * 8], 0
    for number, call in enumerate(_calls(_read(bands))):
        rows += [[number, *band] for band in call]
        spent += sum(_cost(tile) for tile in _tiles(call))
        if spent > most:
            return None
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def tiles_of(table: Tensor) -> list[Tile]:
    """The tiles of a plan, or of a table of bands, which is planned first."""
    if table.shape[1] > len(Band._fields):
        numbered = [(row[0], Band._make(row[1:])) for row in table.tolist() if row[2] < row[3]]
        calls = ([band for _, band in call] for _, call in itertools.groupby(numbered, key=lambda row: row[0]))
        return _in_turn([tile for call in calls for tile in _tiles(call)])
    tiles: list[Tile] = []
    batch = reached = 0
    for row in table.tolist():
        band = Band._make(row)
        if band.batch == batch and band.q_start < reached:  # a second run of keys
            return _in_turn([tile for call in _calls(_read(table)) for tile in _tiles(call)])
        batch, reached = band.batch, band.q_stop
        if band.q_start < reached:
            tiles += strips(band)
    return tiles


def _tiles(call: Call) -> list[Tile]:
    single = len(call) == 1 and not call[0].is_diagonal
    return strips(call[0]) if single else [joined(call)]


def _cost(tile: Tile) -> int:
    """What a tile takes, forward and backward, in scores of a large call."""
    rows = tile.q_stop - tile.q_start
    if tile.diagonal:
        return DIAGONAL_COST * tile.width + CALL_COST
    scores = (rows // 2 if tile.causal else rows) + ROW_COST
    return scores * (tile.width + KEY_COST) + CALL_COST + BAND_COST * len(tile.pattern)


def _read(bands: Tensor) -> list[Band]:
    return [Band._make(row) for row in bands.tolist() if row[1] < row[2]]


def _in_turn(tiles: list[Tile]) -> list[Tile]:
    """The tiles, told which of them find an earlier output of their queries."""
    length = max((tile.q_stop for tile in tiles), default=0)
    found, written, batch = [], bytearray(length), -1
    for tile in sorted(tiles, key=lambda tile: tile.batch):
        if tile.batch != batch:
            written, batch = bytearray(length), tile.batch
        rows = slice(tile.q_start, tile.q_stop)
        found.append(tile._replace(adds=True) if 1 in written[rows] else tile)
        written[rows] = b"\1" * (tile.q_stop - tile.q_start)
    return found


def _calls(bands: list[Band]) -> Iterator[Call]:
    for _, row in itertools.groupby(bands, key=lambda band: band.batch):
        parts = [part for band in row for part in _simpler(band)]
        yield from _calls_of_row(_stacked(sorted(parts, key=lambda band: band.q_start)))


def _simpler(band: Band) -> Iterator[Band]:
    """A band, where much of it is seen whole as that and what lies beside it."""
    if band.is_full:
        yield band
        return
    q0, q1, k0, k1, low, high = band[1:]
    # The first and the last row that see all keys, and the keys that all rows see before their causal edge.
    first, last = q0 + max(0, low + k1 - k0 - 1), min(q1, q0 + high + 1)
    causal, before = high >= q1 - q0 - 1, k0 - low
    if last - first >= STRIP:
        cuts = [(q0, first, k0, k1), (first, last, k0, k1), (last, q1, k0, k1)]
    elif causal and before - k0 > FEW_COMMON:
        cuts = [(q0, q1, k0, before), (q0, q1, before, k1)]
    else:
        cuts = [(q0, q1, k0, k1)]
    yield from (part for cut in cuts if (part := band.part(*cut)) is not None)


def _stacked(bands: list[Band]) -> list[Band]:
    """The bands in order, where those behind each other that see the same keys whole are one."""
    found: dict[tuple[int, ...], Band] = {}
    last: dict[tuple[int, int], tuple[int, ...]] = {}
    for band in bands:
        keys = (band.k_start, band.k_stop)
        above = found.get(last.get(keys, ()))
        if band.is_full and above is not None and above.q_stop == band.q_start:
            rows = band.q_stop - above.q_start
            found[last[keys]] = above._replace(q_stop=band.q_stop, low=above.k_start - above.k_stop, high=rows)
            continue
        found[band[1:5]] = band
        if band.is_full:
            last[keys] = band[1:5]
    return list(found.values())


def _calls_of_row(bands: list[Band]) -> Iterator[Call]:
    wide: dict[tuple[int, int], Call] = {}
    thin: list[Band] = []
    narrow: list[Band] = []
    short: list[Band] = []
    diagonal: list[Band] = []
    for band in bands:
        if band.q_stop - band.q_start < STRIP:
            short.append(band)
        elif band.is_diagonal:
            diagonal.append(band)
        elif min(band.k_stop - band.k_start, band.high - band.low + 1) <= THIN:
            (thin if band.is_full else narrow).append(band)
        elif band.is_full:
            wide.setdefault((band.q_start, band.q_stop), []).append(band)
        else:
            yield [band]
    yield from wide.values()
    for together in (thin, diagonal):
        for start, stop, alive in _pieces(together):
            yield _cut(alive, start, stop)
    yield from _grouped(short, STRIP)
    yield from _grouped(narrow, THIN_ROWS)


def _pieces(bands: Sequence[Band]) -> Iterator[tuple[int, int, list[Band]]]:
    """The queries between two places where a band starts or stops, with the bands there; bands lie in order."""
    cuts = sorted({place for band in bands for place in band[1:3]})
    alive: list[Band] = []
    at = 0
    for start, stop in itertools.pairwise(cuts):
        alive = [band for band in alive if band.q_stop > start]
        while at < len(bands) and bands[at].q_start <= start:
            alive.append(bands[at])
            at += 1
        if alive:
            yield start, stop, alive


def _cut(bands: Sequence[Band], start: int, stop: int) -> Call:
    """What queries ``start .. stop - 1`` see of the bands."""
    parts = [band.part(start, stop, band.k_start, band.k_stop) for band in bands]
    return [part for part in parts if part is not None]


def _grouped(bands: Sequence[Band], rows: int) -> Iterator[Call]:
    """The calls of groups of at most ``rows`` queries."""
    groups: list[tuple[int, int, list[Band]]] = []
    for start, stop, alive in _pieces(bands):
        for first in range(start, stop, rows):
            last = min(stop, first + rows)
            if groups and groups[-1][1] == first and last - groups[-1][0] <= rows:
                begin, _, members = groups[-1]
                known = {id(band) for band in members}
                groups[-1] = (begin, last, members + [band for band in alive if id(band) not in known])
            else:
                groups.append((first, last, list(alive)))
    for start, stop, members in groups:
        yield from _calls_of_group(_cut(members, start, stop))


def _calls_of_group(parts: Call) -> list[Call]:
    if len(parts) == 1:
        return [parts]
    batch, start, stop = parts[0].batch, min(band.q_start for band in parts), max(band.q_stop for band in parts)
    common, rest = _split_keys(parts, stop - start)
    if not common or (rest and sum(b - a for a, b in common) <= FEW_COMMON):
        return [parts]
    shared = [Band(batch, start, stop, a, b, a - b, stop - start) for a, b in common]
    pieces = [band.part(start, stop, a, b) for band in parts for a, b in rest]
    masked = [piece for piece in pieces if piece is not None]
    return [shared, masked] if masked else [shared]


Ranges = list[tuple[int, int]]


def _split_keys(parts: Call, rows: int) -> tuple[Ranges, Ranges]:
    """The keys that all ``rows`` see, and those that some rows see."""
    change: dict[int, list[int]] = {}
    for band in parts:
        height = band.q_stop - band.q_start
        for place, sign in ((band.k_start, 1), (band.k_stop, -1)):
            counts = change.setdefault(place, [0, 0])
            counts[0] += sign * height
            counts[1] += sign * height if band.is_full else 0
    common: Ranges = []
    rest: Ranges = []
    some = every = 0
    for start, stop in itertools.pairwise(sorted(change)):
        some += change[start][0]
        every += change[start][1]
        if some == 0:
            continue
        ranges = common if every == rows else rest
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return common, rest
