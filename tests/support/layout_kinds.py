"""A layout of every kind beside what it shows, pair by pair, and what the operations make of that."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn import MaskLayout, StructuredMask

Sides = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a layout shows, and by which positions a later window measures.

    Attributes:
        seen: ``Bool[B, H, Q, K]``.
        q: positions of the queries, ``Int[B, Q]``.
        k: positions of the keys, ``Int[B, K]``.
        tokens: the positions that ``token_positions`` gives, ``Int[B, Q]``.
        kept: ``Bool[B, 1, Q, K]``, the pairs that no window hides: sinks.
    """

    seen: Tensor
    q: Tensor
    k: Tensor
    tokens: Tensor
    kept: Tensor

    def window(self, left: int | None, right: int | None) -> Seen:
        distance = (self.q[:, :, None] - self.k[:, None])[:, None]
        near = torch.ones_like(distance, dtype=torch.bool)
        near &= left is None or distance <= left
        near &= right is None or -distance <= right
        return dataclasses.replace(self, seen=self.seen & (near | self.kept))

    def map(self, seen: Callable[[Tensor], Tensor], q: Callable, k: Callable) -> Seen:
        return Seen(seen(self.seen), q(self.q), k(self.k), q(self.tokens), seen(self.kept))


@dataclasses.dataclass(frozen=True)
class Plain:
    """The parts of a union; one of anything else."""

    parts: tuple[Seen, ...]

    @property
    def seen(self) -> Tensor:
        return torch.stack(torch.broadcast_tensors(*(part.seen for part in self.parts))).any(0)

    @property
    def tokens(self) -> Tensor | None:
        """Where the tokens stand; ``None`` where the parts disagree, which is refused."""
        first, *others = torch.broadcast_tensors(*(part.tokens for part in self.parts))
        return first if all(torch.equal(first, other) for other in others) else None

    def queries(self, index: Any) -> Plain:
        return self._map(lambda x: x[:, :, index], lambda x: x[:, index], lambda x: x)

    def keys(self, index: Any) -> Plain:
        return self._map(lambda x: x[..., index], lambda x: x, lambda x: x[:, index])

    def heads(self, index: slice) -> Plain:
        return self._map(lambda x: x[:, index] if x.shape[1] > 1 else x, lambda x: x, lambda x: x)

    def rows(self, index: Any) -> Plain:
        return self._map(*3 * [lambda x: x[index] if len(x) > 1 else x])

    def window(self, left: int | None, right: int | None) -> Plain:
        return Plain(tuple(part.window(left, right) for part in self.parts))

    def both(self, other: Plain) -> Plain:
        return Plain(tuple(dataclasses.replace(part, seen=part.seen & other.seen) for part in self.parts))

    def either(self, other: Plain) -> Plain:
        return Plain(self.parts + other.parts)

    def _map(self, seen: Callable, q: Callable, k: Callable) -> Plain:
        return Plain(tuple(part.map(seen, q, k) for part in self.parts))


Rule = Callable[[int, int, int, int], bool]


def plain(
    sizes: tuple[int, int, int, int],
    rule: Rule,
    *,
    q: Sequence[Sequence[int]] | None = None,
    k: Sequence[Sequence[int]] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    kept: Rule = lambda b, h, i, j: False,
) -> Plain:
    """What a rule ``(batch row, head, query, key) -> bool`` shows; queries stand at the last positions if not given."""
    batch, heads, q_len, kv_len = sizes
    q = [range(kv_len - q_len, kv_len)] if q is None else q
    at = torch.tensor([list(row) for row in q]).expand(batch, -1)
    keys = torch.tensor([list(row) for row in ([range(kv_len)] if k is None else k)]).expand(batch, -1)

    def table(of: Rule, heads: int) -> Tensor:
        pairs = itertools.product(range(batch), range(heads), range(q_len), range(kv_len))
        return torch.tensor([bool(of(*pair)) for pair in pairs]).view(batch, heads, q_len, kv_len)

    where = at if tokens is None else torch.tensor([list(row) for row in tokens]).expand(batch, -1)
    return Plain((Seen(table(rule, heads), at, keys, where, table(kept, 1)),))


def _causal(shift: int = 0) -> Rule:
    return lambda b, h, i, j: j <= i + shift


DOCUMENTS = [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1]]
PLACES = [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]]
PIECES = [0, 1, 0, 0, 2, 1, 1, 2, 0]
PIECE_PLACES = [[0, 0, 1, 2, 0, 1, 2, 1, 3]]
HOLES = [[1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0, 0]]
#: Nodes of a tree of three levels, of two trees, and of a prefix with two answers; then their depths.
TREE, TREE_NODES, TREE_DEPTHS = [-1, 0, 0, 1], [0, 0, 0, 1, 1, 2, 2, 3, 3], [[0, 1, 2, 3, 4, 3, 4, 5, 6]]
FOREST, FOREST_NODES, FOREST_DEPTHS = [-1, 0, -1, 2], [0, 0, 1, 1, 2, 2, 2, 3, 3], [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
PREFIX, PREFIX_NODES, PREFIX_DEPTHS = [-1, 0, 0], [0, 0, 0, 1, 1, 2, 2, 2, 2], [[0, 1, 2, 3, 4, 3, 4, 5, 6]]
ACTIVE = [[1, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 0]]


def _lengths(nodes: Sequence[int]) -> list[int]:
    return [nodes.count(node) for node in sorted(set(nodes))]


def _above(parents: Sequence[int], nodes: Sequence[int], depths: Sequence[int]) -> Rule:
    def sees(b: int, h: int, i: int, j: int) -> bool:
        node = nodes[i]
        while node not in {-1, nodes[j]}:
            node = parents[node]
        return node != -1 and depths[j] <= depths[i]

    return sees


def _bits(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def scattered(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A mask_mod of rows and heads, which pickles."""
    return (q_idx * 5 + kv_idx * 3 + b * 2 + h) % 4 < 2


def _scattered(b: int, h: int, i: int, j: int) -> bool:
    return (i * 5 + j * 3 + b * 2 + h) % 4 < 2


def _scattered_mask(batch: int, heads: int) -> Tensor:
    return plain((batch, heads, 9, 9), _scattered).seen


ONE, TWO = (1, 1, 9, 9), (2, 1, 9, 9)
#: Keys of each query: one twice, none at all, and later ones.
LISTED = [[0, 0, 3], [1, -1, 8], [-1, -1, -1], [2, 3, 4], [8, 0, 5], [5, 1, -1], [6, 6, 6], [0, 1, 7], [8, 2, 3]]
BLOCKS = [[[[i % 5, (3 * i + b) % 5 if i % 3 else -1] for i in range(9)]] for b in range(2)]
RING = (9, 10, 2, 3, 4, 5, 6, 7, 8)
EARLY = [[0, 1, 1, 2, 3, 5, 6, 7, 8]]
KINDS: dict[str, tuple[MaskLayout, Plain]] = {
    "full": (MaskLayout.full(5, 9), plain((1, 1, 5, 9), lambda b, h, i, j: True)),
    "causal": (MaskLayout.causal(5, 9), plain((1, 1, 5, 9), _causal(4))),
    "window": (MaskLayout.causal(9, window=4), plain(ONE, lambda b, h, i, j: 0 <= i - j < 4)),
    "window both ways": (MaskLayout.full(9).with_window(3), plain(ONE, lambda b, h, i, j: abs(i - j) < 3)),
    "window of two sides": (
        MaskLayout.full(9).with_window((1, 3)),
        plain(ONE, lambda b, h, i, j: -3 <= i - j <= 1),
    ),
    "padded right": (
        MaskLayout.padded(lengths=[9, 5], kv_len=9),
        plain(TWO, lambda b, h, i, j: j <= i and j < (9, 5)[b]),
    ),
    "padded left": (
        MaskLayout.padded(lengths=[9, 5], kv_len=9, side="left", window=4),
        plain(
            TWO,
            lambda b, h, i, j: 0 <= i - j < 4 and j >= (0, 4)[b],
            tokens=[range(9), [0, 0, 0, 0, 0, 1, 2, 3, 4]],
        ),
    ),
    "padded with holes": (
        MaskLayout.padded(_bits(HOLES), causal=False),
        plain(TWO, lambda b, h, i, j: HOLES[b][j], tokens=[range(9), [0, 0, 1, 2, 3, 4, 5, 6, 7]]),
    ),
    "packed": (
        MaskLayout.packed([[4, 5], [2, 7]]),
        plain(TWO, lambda b, h, i, j: j <= i and DOCUMENTS[b][i] == DOCUMENTS[b][j], tokens=PLACES),
    ),
    "documents in pieces": (
        MaskLayout.packed(document_ids=PIECES),
        plain(
            ONE,
            lambda b, h, i, j: j <= i and PIECES[i] == PIECES[j],
            q=PIECE_PLACES,
            k=PIECE_PLACES,
        ),
    ),
    "prefix_lm": (
        MaskLayout.prefix_lm([4, 7], 5, 9),
        plain((2, 1, 5, 9), lambda b, h, i, j: j <= i + 4 or j < (4, 7)[b]),
    ),
    "chunked": (
        MaskLayout.chunked(4, 6, 9),
        plain((1, 1, 6, 9), lambda b, h, i, j: j <= i + 3 and (i + 3) // 4 == j // 4),
    ),
    "block causal": (
        MaskLayout.block_causal(2, 9),
        plain(
            ONE,
            lambda b, h, i, j: j // 2 <= i // 2,
            q=[[i // 2 for i in range(9)]],
            k=[[i // 2 for i in range(9)]],
            tokens=[range(9)],
        ),
    ),
    "tree": (
        MaskLayout.tree(TREE, _lengths(TREE_NODES)),
        plain(ONE, _above(TREE, TREE_NODES, TREE_DEPTHS[0]), q=TREE_DEPTHS, k=TREE_DEPTHS),
    ),
    "forest": (
        MaskLayout.tree(FOREST, _lengths(FOREST_NODES), window=4),
        plain(ONE, _above(FOREST, FOREST_NODES, FOREST_DEPTHS[0]), q=FOREST_DEPTHS, k=FOREST_DEPTHS).window(3, None),
    ),
    "shared prefix": (
        MaskLayout.shared_prefix(3, [2, 4]),
        plain(ONE, _above(PREFIX, PREFIX_NODES, PREFIX_DEPTHS[0]), q=PREFIX_DEPTHS, k=PREFIX_DEPTHS),
    ),
    "sink tokens": (
        MaskLayout.causal(9, window=4, sink_tokens=2),
        plain(ONE, lambda b, h, i, j: j <= i and (i - j < 4 or j < 2), kept=lambda b, h, i, j: j < 2),
    ),
    "sink tokens of documents": (
        MaskLayout.packed([[4, 5], [2, 7]], window=3, sink_tokens=1),
        plain(
            TWO,
            lambda b, h, i, j: j <= i and DOCUMENTS[b][i] == DOCUMENTS[b][j] and (i - j < 3 or PLACES[b][j] == 0),
            q=PLACES,
            k=PLACES,
            kept=lambda b, h, i, j: PLACES[b][j] == 0,
        ),
    ),
    "union": (
        MaskLayout.causal(9, window=2) | MaskLayout.prefix_lm([3, 5], 9),
        plain(ONE, lambda b, h, i, j: 0 <= i - j < 2).either(plain(TWO, lambda b, h, i, j: j <= i or j < (3, 5)[b])),
    ),
    "union of other positions": (
        MaskLayout.tree(TREE, _lengths(TREE_NODES)) | MaskLayout.causal(9, window=2, active_queries=_bits(ACTIVE)),
        plain(ONE, _above(TREE, TREE_NODES, TREE_DEPTHS[0]), q=TREE_DEPTHS, k=TREE_DEPTHS).either(
            plain(TWO, lambda b, h, i, j: 0 <= i - j < 2 and ACTIVE[b][i])
        ),
    ),
    "dense": (MaskLayout.dense(_scattered_mask(2, 1)), plain(TWO, _scattered)),
    "dense with positions": (
        MaskLayout.dense(_scattered_mask(1, 1), q_positions=torch.tensor(EARLY), kv_positions=torch.tensor(EARLY)),
        plain(ONE, _scattered, q=EARLY, k=EARLY),
    ),
    "dense for each head": (MaskLayout.dense(_scattered_mask(2, 3)), plain((2, 3, 9, 9), _scattered)),
    "mask_mod": (
        MaskLayout.from_mod(scattered, q_len=9, kv_len=9, batch=2, heads=3),
        plain((2, 3, 9, 9), _scattered),
    ),
    "inactive rows": (
        MaskLayout.causal(9, window=5, active_queries=_bits(ACTIVE)),
        plain(TWO, lambda b, h, i, j: 0 <= i - j < 5 and ACTIVE[b][i]),
    ),
    "cache": (
        MaskLayout.cached(torch.tensor([9, 7]), 5, 9),
        plain(
            (2, 1, 5, 9),
            lambda b, h, i, j: j <= (9, 7)[b] - 5 + i,
            q=[range(4, 9), range(2, 7)],
            k=[range(9), range(9)],
        ),
    ),
    "ring of a cache": (
        MaskLayout.cached(torch.tensor([11]), 5, 9, window=5, ring=True),
        plain(
            (1, 1, 5, 9),
            lambda b, h, i, j: 0 <= 6 + i - RING[j] < 5,
            q=[range(6, 11)],
            k=[RING],
        ),
    ),
    "selected": (
        MaskLayout.selected(torch.tensor([[LISTED]]), 9),
        plain(ONE, lambda b, h, i, j: j in LISTED[i]),
    ),
    "selected for each head, causal": (
        MaskLayout.selected(torch.tensor([[LISTED, LISTED[::-1]]]), 9, causal=True),
        plain((1, 2, 9, 9), lambda b, h, i, j: j in (LISTED[i], LISTED[8 - i])[h] and j <= i),
    ),
    "selected in blocks": (
        MaskLayout.selected(torch.tensor(BLOCKS), 9, block=2, active_queries=_bits(ACTIVE)),
        plain((2, 1, 9, 9), lambda b, h, i, j: j // 2 in BLOCKS[b][0][i] and ACTIVE[b][i]),
    ),
    "positions": (
        MaskLayout(
            9,
            9,
            visibility=StructuredMask(
                causal=True, window=3, q_positions=torch.tensor(EARLY), kv_positions=torch.tensor(EARLY)
            ),
        ),
        plain(ONE, lambda b, h, i, j: 0 <= EARLY[0][i] - EARLY[0][j] < 3, q=EARLY, k=EARLY),
    ),
}


def painted(layout: MaskLayout) -> Tensor:
    """How often the bands show each pair, ``Int[B, Q, K]``; each band holds a pair in each of its rows and columns."""
    counts = torch.zeros(layout.batch, layout.q_len, layout.kv_len, dtype=torch.int32)
    for batch, q_start, q_stop, k_start, k_stop, low, high in layout.to_bands().tolist():
        apart = torch.arange(q_stop - q_start)[:, None] - torch.arange(k_stop - k_start)
        inside = (apart >= low) & (apart <= high)
        assert not inside.numel() or (inside.any(0).all() and inside.any(1).all())
        counts[batch, q_start:q_stop, k_start:k_stop] += inside.int()
    return counts


def painted_in_positions(layout: MaskLayout) -> Tensor:
    """The same for the table of :meth:`MaskLayout.to_blocks` of one structure, by its documented rule."""
    counts = torch.zeros(layout.batch, layout.q_len, layout.kv_len, dtype=torch.int32)
    left, right = layout.visibility.reach
    for batch, q_start, q_stop, k_start, k_stop, shift, causal in layout.to_blocks(max_runs=None).tolist():
        apart = torch.arange(q_stop - q_start)[:, None] - torch.arange(k_stop - k_start) + shift
        inside = (apart >= 0) | (not causal)
        inside &= left is None or apart <= left
        inside &= right is None or -apart <= right
        counts[batch, q_start:q_stop, k_start:k_stop] += inside.int()
    return counts
