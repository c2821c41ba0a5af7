"""Random layouts of several runs of keys: trees, sinks, windows of two sides, and unions of all kinds of structure."""

from __future__ import annotations

import random

import torch

from polyattn import LayoutError, MaskLayout, StructuredMask

WINDOWS = (None, None, 1, 2, 3, 7, (2, 0), (1, 3), (-1, 2))


def random_tree(draw: random.Random, *, largest: int = 5) -> MaskLayout:
    """A tree of up to 8 nodes, whole or some of its queries and keys."""
    nodes = draw.randint(1, 8)
    lengths = [draw.randint(0, largest) for _ in range(nodes)]
    lengths[0] = max(lengths[0], 1)
    layout = MaskLayout.tree(
        [draw.randint(-1, node - 1) for node in range(nodes)],
        lengths,
        causal=draw.random() < 0.7,
        window=draw.choice((None, None, 1, 3, 6, (2, 1), (None, 2))),
    )
    if draw.random() < 0.4:
        layout = layout.select_queries(_some(draw, layout.q_len))
    if draw.random() < 0.3:
        layout = layout.select_keys(_some(draw, layout.kv_len))
    return layout


def random_structure(draw: random.Random, q_len: int, kv_len: int, batch: int) -> MaskLayout:
    """A layout of one structure, for every batch row the same or for each another."""
    rows = draw.choice((1, batch))
    window = draw.choice(WINDOWS)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def bools(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) < 0.7

    def packed() -> MaskLayout:
        if q_len != kv_len:
            return MaskLayout.causal(q_len, kv_len, window=window, sink_tokens=1)
        lengths = [_parts(draw, kv_len) for _ in range(rows)]
        sinks = draw.choice((0, 0, 1, 2))
        return MaskLayout.packed(lengths, window=window, causal=draw.random() < 0.7, sink_tokens=sinks)

    def positions() -> MaskLayout:
        mask = StructuredMask(
            causal=draw.random() < 0.5,
            window=window,
            q_positions=integers(6, rows, q_len).sort(1).values,
            kv_positions=integers(6, 1, kv_len).sort(1).values,
            q_segments=integers(2, 1, q_len),
            kv_segments=integers(2, 1, kv_len),
            kv_segment_ends=integers(3, 1, kv_len) if draw.random() < 0.4 else None,
        )
        return MaskLayout(q_len, kv_len, visibility=mask)

    kinds = (
        lambda: MaskLayout.causal(q_len, kv_len, window=window, sink_tokens=draw.choice((0, 0, 1, 3))),
        packed,
        lambda: MaskLayout.prefix_lm([draw.randint(0, kv_len) for _ in range(rows)], q_len, kv_len).with_window(window),
        lambda: MaskLayout.chunked(draw.randint(1, 6), q_len, kv_len, causal=draw.random() < 0.7),
        lambda: MaskLayout.padded(bools(rows, kv_len), q_len=q_len, causal=draw.random() < 0.5, window=window),
        lambda: MaskLayout.full(q_len, kv_len, active_queries=bools(rows, q_len)),
        lambda: MaskLayout.block_causal(draw.randint(1, 5), q_len, kv_len),
        lambda: MaskLayout(q_len, kv_len, visibility=StructuredMask(causal=False, window=window)),
        positions,
    )
    return draw.choice(kinds)()


def random_union(draw: random.Random, *, longest: int = 24, batch: int = 2) -> MaskLayout:
    """What one of two or three structures lets be seen."""
    q_len = draw.randint(1, longest)
    kv_len = q_len + draw.choice((0, 0, draw.randint(0, longest // 3)))
    layout = random_structure(draw, q_len, kv_len, batch)
    for _ in range(draw.randint(1, 2)):
        layout = layout | random_structure(draw, q_len, kv_len, batch)
    return layout


def random_layout(draw: random.Random) -> MaskLayout:
    """A tree, or twice as often a union; some narrowed by another window."""
    layout = random_tree(draw) if draw.random() < 1 / 3 else random_union(draw)
    if draw.random() < 0.2:
        try:
            return layout.with_window(draw.choice((1, 2, (1, 2))))
        except LayoutError:  # a part that knows no distances has no window
            return layout
    return layout


def _some(draw: random.Random, length: int) -> list[int]:
    return sorted(draw.sample(range(length), draw.randint(1, length)))


def _parts(draw: random.Random, length: int) -> list[int]:
    parts = []
    while length > 0:
        parts.append(draw.randint(1, length))
        length -= parts[-1]
    return parts
