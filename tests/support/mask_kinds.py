"""The masks of other libraries by their names: how each is said as a layout, and a plain rule for what it shows.

The rules are written from what the peers' documentation says that their masks mean. ``tools/masks.py`` writes the table
of docs/masks.md from this list; tests/core/test_mask_kinds.py compares each layout with its rule, pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from polyattn import MaskLayout, StructuredMask


def runs(starts, lengths):
    """The indices of runs of tokens, one run after the other."""
    return [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]


class Kind(NamedTuple):
    """A mask of a peer.

    Attributes:
        name: the peer's.
        said: the layout as a Python expression of the values and of ``runs``.
        sees: the rule, ``(values, batch row, head, query, key) -> bool``.
        values: what the names in the expression stand for, for each example.
        blocks: the largest number of runs of keys that a query of an example sees, as the layout's blocks list them;
            ``None`` where the layout has no blocks.
    """

    name: str
    said: str
    sees: Callable[[SimpleNamespace, int, int, int, int], bool]
    values: list[dict[str, Any]]
    blocks: int | None

    def layout(self, values: dict[str, Any]) -> MaskLayout:
        """The layout that the expression gives."""
        names = {"torch": torch, "MaskLayout": MaskLayout, "StructuredMask": StructuredMask, "runs": runs}
        return eval(self.said, names | values)  # one of the expressions below


def _place(index, starts, lengths):
    """The run that holds an index and the place in it; ``None`` for an index between the runs."""
    for run, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start <= index < start + length:
            return run, index - start
    return None


def _documents(allowed):
    """A rule for queries and keys in runs of their own: ``allowed(values, distance, other)`` inside one document.

    The distance is that of the places in query and key run, ``other`` that of the places counted from their ends.
    """

    def sees(v, b, h, q, k):
        starts = [sum(v.q_lengths[:i]) for i in range(len(v.q_lengths))]
        query, key = _place(q, starts, v.q_lengths), _place(k, v.kv_starts, v.kv_lengths)
        if query is None or key is None or query[0] != key[0]:
            return False
        near_start = query[1] - key[1]
        return allowed(v, near_start, near_start + v.kv_lengths[query[0]] - v.q_lengths[query[0]])

    return sees


def _paged(sees):
    """A rule whose keys lie in pages: slot ``s`` holds token ``s % page_size`` of the logical page that it is given."""

    def paged(v, b, h, q, k):
        page = v.pages[k // v.page_size]
        return page is not None and sees(v, b, h, q, page * v.page_size + k % v.page_size)

    return paged


def _clamped(at, size, kernel):
    return min(max(at, kernel // 2), size - 1 - kernel // 2)


def _near(q, k, size, kernel):
    """Whether key ``k`` lies in the ``kernel`` places around ``q``, moved inwards at both ends of ``size``."""
    return abs(_clamped(q, size, kernel) - k) <= kernel // 2


def _neighbours(v, b, h, q, k):
    height, width = v.canvas
    (q_row, q_column), (k_row, k_column) = (divmod(v.order[i], width) for i in (q, k))
    return _near(q_row, k_row, height, v.kernel[0]) and _near(q_column, k_column, width, v.kernel[1])


def _tiles(v, b, h, q, k):
    """A tile sees the tiles of its neighbourhood; text behind the picture sees and is seen by all."""
    if q >= v.vision or k >= v.vision:
        return True
    for size, kernel, stride in zip(v.canvas, v.kernel, v.strides, strict=True):
        at, key = q // v.tile // stride % size, k // v.tile // stride % size
        left, right = kernel // 2, (kernel - 1) // 2
        if not -left <= key - min(max(at, left), size - 1 - right) <= right:
            return False
    return True


def _axes(canvas, kernel, order):
    """Positions of the queries, moved inwards, and of the keys on each axis of a canvas, ``Int[1, N]``."""
    strides = [1]
    for size in reversed(canvas[1:]):
        strides.insert(0, strides[0] * size)
    at = [[i // stride % size for i in order] for size, stride in zip(canvas, strides, strict=True)]
    moved = [
        [min(max(i, size_of // 2), size - 1 - (size_of - 1) // 2) for i in row]
        for row, size, size_of in zip(at, canvas, kernel, strict=True)
    ]
    return {"q_axes": torch.tensor(moved)[:, None], "kv_axes": torch.tensor(at)[:, None]}


def _canvas(canvas, kernel, order=None):
    length = canvas[0] * canvas[1]
    order = list(range(length)) if order is None else order
    reach = [size // 2 + 1 for size in kernel]
    return {"canvas": canvas, "kernel": kernel, "order": order, "length": length, "windows": reach} | _axes(
        canvas, kernel, order
    )


def _sliding_tiles(canvas, kernel, tile, text):
    tiles = 1
    strides = []
    for size in reversed(canvas):
        strides.insert(0, tiles)
        tiles *= size
    vision = tiles * tile
    length = vision + text
    axes = _axes(canvas, kernel, [i // tile if i < vision else 0 for i in range(length)])
    is_text = torch.arange(length)[None] >= vision
    return {
        "canvas": canvas, "kernel": kernel, "tile": tile, "strides": strides, "vision": vision, "length": length,
        "is_text": is_text, "windows": [(size // 2, (size - 1) // 2) for size in kernel],
    } | axes  # fmt: skip


def _tree(v, b, h, q, k):
    """A token of a node sees what is earlier in its node, and the nodes above it."""
    starts = [sum(v.lengths[:i]) for i in range(len(v.lengths))]
    (node, place), (other, at) = (_place(i, starts, v.lengths) for i in (q + getattr(v, "skipped", 0), k))
    if node == other:
        return at <= place
    while node not in {-1, other}:
        node = v.parents[node]
    return node == other


def _diffusion(v, b, h, q, k):
    clean_q, clean_k = q >= v.length, k >= v.length
    block, other = q % v.length // v.block, k % v.length // v.block
    if clean_k:
        return other <= block if clean_q else other < block
    return not clean_q and block == other


PACKED = {
    "q_lengths": [3, 1, 4],
    "kv_lengths": [5, 2, 4],
    "kv_starts": [0, 5, 7],
    "q_places": [2, 3, 4, 6, 7, 8, 9, 10],
}
UNEQUAL = {
    "q_lengths": [3, 4, 2], "kv_lengths": [5, 2, 2], "spans": [5, 4, 2], "starts": [0, 5, 9], "kv_starts": [0, 5, 7],
}  # fmt: skip
SLOTS = {
    "q_lengths": [2, 1, 3], "kv_lengths": [2, 3, 4], "kv_starts": [0, 4, 8], "room": 4,
    "q_places": [0, 1, 6, 9, 10, 11], "used": torch.tensor([[i % 4 < (2, 3, 4)[i // 4] for i in range(12)]]),
}  # fmt: skip
GAPS = {
    "q_lengths": [2, 1, 2], "kv_lengths": [3, 2, 2], "kv_starts": [1, 5, 9], "spans": [1, 4, 4, 3],
    "q_places": [2, 3, 6, 9, 10],
    "used": torch.tensor([[1 <= i < 4 or 5 <= i < 7 or 9 <= i < 11 for i in range(12)]]),
}  # fmt: skip
# Seven pages of two slots: three hold the tokens of the first document, and so on, in any order; one is free.
PAGES = {"page_size": 2, "pages": [5, 0, None, 3, 1, 4, 2]}
SLOT_OF = {"slots": [10, 11, 0, 1, 12, 12, 6, 7, 2, 3, 8, 9, 4, 5]}
FREE = torch.zeros(1, 1, dtype=torch.bool)


def _with_free(values, last):
    """The values of keys in pages: one document more, of one key that stands for slots without a token."""
    paged = values | PAGES | SLOT_OF
    if "used" in values:
        paged["used"] = torch.cat([values["used"], FREE], 1)
    return paged | {"spans": [*last, 1]}


XFORMERS = [
    Kind(
        "LowerTriangularMask",
        "MaskLayout.causal(max(q_len, kv_len)).select_queries(slice(q_len)).select_keys(slice(kv_len))",
        lambda v, b, h, q, k: k <= q,
        [{"q_len": 5, "kv_len": 8}, {"q_len": 7, "kv_len": 4}],
        1,
    ),
    Kind(
        "LowerTriangularFromBottomRightMask",
        "MaskLayout.causal(q_len, kv_len)",
        lambda v, b, h, q, k: v.kv_len - 1 - k >= v.q_len - 1 - q,
        [{"q_len": 5, "kv_len": 8}, {"q_len": 7, "kv_len": 4}],
        1,
    ),
    Kind(
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "MaskLayout.causal(q_len, kv_len, window=window)",
        lambda v, b, h, q, k: 0 <= v.kv_len - k - (v.q_len - q) < v.window,
        [{"q_len": 5, "kv_len": 8, "window": 3}, {"q_len": 7, "kv_len": 4, "window": 2}],
        1,
    ),
    Kind(
        "LocalAttentionFromBottomRightMask",
        "MaskLayout.full(q_len, kv_len).with_window((left, right))",
        lambda v, b, h, q, k: q - v.left <= k + v.q_len - v.kv_len <= q + v.right,
        [{"q_len": 5, "kv_len": 8, "left": 1, "right": 2}, {"q_len": 6, "kv_len": 6, "left": 0, "right": 3}],
        1,
    ),
    Kind(
        "BlockDiagonalMask",
        "MaskLayout.packed(spans, causal=False)"
        ".select_queries(runs(starts, q_lengths)).select_keys(runs(starts, kv_lengths))",
        _documents(lambda v, distance, other: True),
        [UNEQUAL],
        1,
    ),
    Kind(
        "BlockDiagonalCausalMask",
        "MaskLayout.packed(spans).select_queries(runs(starts, q_lengths)).select_keys(runs(starts, kv_lengths))",
        _documents(lambda v, distance, other: distance >= 0),
        [UNEQUAL],
        1,
    ),
    Kind(
        "BlockDiagonalCausalLocalAttentionMask",
        "MaskLayout.packed(spans, window=window)"
        ".select_queries(runs(starts, q_lengths)).select_keys(runs(starts, kv_lengths))",
        _documents(lambda v, distance, other: 0 <= distance < v.window),
        [UNEQUAL | {"window": 3}],
        1,
    ),
    Kind(
        "BlockDiagonalCausalFromBottomRightMask",
        "MaskLayout.packed(kv_lengths).select_queries(q_places)",
        _documents(lambda v, distance, other: other >= 0),
        [PACKED],
        1,
    ),
    Kind(
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
        "MaskLayout.packed(kv_lengths, window=window).select_queries(q_places)",
        _documents(lambda v, distance, other: 0 <= other < v.window),
        [PACKED | {"window": 2}],
        1,
    ),
    Kind(
        "BlockDiagonalPaddedKeysMask",
        "(MaskLayout.packed([room] * len(kv_lengths), causal=False) & MaskLayout.padded(used, causal=False))"
        ".select_queries(q_places)",
        _documents(lambda v, distance, other: True),
        [SLOTS],
        1,
    ),
    Kind(
        "BlockDiagonalCausalWithOffsetPaddedKeysMask",
        "MaskLayout.packed([room] * len(kv_lengths)).select_queries(q_places)",
        _documents(lambda v, distance, other: other >= 0),
        [SLOTS],
        1,
    ),
    Kind(
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        "MaskLayout.packed([room] * len(kv_lengths), window=window).select_queries(q_places)",
        _documents(lambda v, distance, other: 0 <= other < v.window),
        [SLOTS | {"window": 2}],
        1,
    ),
    Kind(
        "BlockDiagonalLocalAttentionPaddedKeysMask",
        "(MaskLayout.packed([room] * len(kv_lengths), causal=False, window=(left, right))"
        " & MaskLayout.padded(used, causal=False)).select_queries(q_places)",
        _documents(lambda v, distance, other: -v.right <= other <= v.left),
        [SLOTS | {"left": 1, "right": 1}],
        1,
    ),
    Kind(
        "BlockDiagonalGappyKeysMask",
        "(MaskLayout.packed(spans, causal=False) & MaskLayout.padded(used, causal=False)).select_queries(q_places)",
        _documents(lambda v, distance, other: True),
        [GAPS],
        1,
    ),
    Kind(
        "BlockDiagonalCausalWithOffsetGappyKeysMask",
        "MaskLayout.packed(spans).select_queries(q_places)",
        _documents(lambda v, distance, other: other >= 0),
        [GAPS],
        1,
    ),
    Kind(
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
        "(MaskLayout.packed(spans, causal=False, window=(left, right))"
        " & MaskLayout.padded(used, causal=False)).select_queries(q_places)",
        _documents(lambda v, distance, other: -v.right <= other <= v.left),
        [GAPS | {"left": 1, "right": 0}, GAPS | {"left": 0, "right": 1}],
        1,
    ),
    Kind(
        "PagedBlockDiagonalPaddedKeysMask",
        "(MaskLayout.packed(spans, causal=False) & MaskLayout.padded(used, causal=False))"
        ".select_queries(q_places).select_keys(slots)",
        _paged(_documents(lambda v, distance, other: True)),
        [_with_free(SLOTS, [4, 4, 4])],
        2,
    ),
    Kind(
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
        "MaskLayout.packed(spans).select_queries(q_places).select_keys(slots)",
        _paged(_documents(lambda v, distance, other: other >= 0)),
        [_with_free(SLOTS, [4, 4, 4])],
        2,
    ),
    Kind(
        "PagedBlockDiagonalCausalLocalPaddedKeysMask",
        "MaskLayout.packed(spans, window=window).select_queries(q_places).select_keys(slots)",
        _paged(_documents(lambda v, distance, other: 0 <= other < v.window)),
        [_with_free(SLOTS, [4, 4, 4]) | {"window": 2}],
        2,
    ),
    Kind(
        "PagedBlockDiagonalGappyKeysMask",
        "(MaskLayout.packed(spans, causal=False) & MaskLayout.padded(used, causal=False))"
        ".select_queries(q_places).select_keys(slots)",
        _paged(_documents(lambda v, distance, other: True)),
        [_with_free(GAPS, GAPS["spans"])],
        2,
    ),
    Kind(
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
        "MaskLayout.packed(spans).select_queries(q_places).select_keys(slots)",
        _paged(_documents(lambda v, distance, other: other >= 0)),
        [_with_free(GAPS, GAPS["spans"])],
        2,
    ),
]


def _within(axes):
    return " & ".join(
        f"MaskLayout.full(length).with_window(windows[{i}], q_positions=q_axes[{i}], kv_positions=kv_axes[{i}])"
        for i in range(axes)
    )


_TEXT = "MaskLayout.full(length, active_queries=is_text) | MaskLayout.padded(is_text, causal=False)"
_IS_GLOBAL = torch.tensor([[i in {0, 7} for i in range(12)]])

ATTENTION_GYM = [
    Kind(
        "causal_mask",
        "MaskLayout.causal(length)",
        lambda v, b, h, q, k: k <= q,
        [{"length": 7}],
        1,
    ),
    Kind(
        "generate_sliding_window",
        "MaskLayout.causal(length, window=window_size + 1)",
        lambda v, b, h, q, k: 0 <= q - k <= v.window_size,
        [{"length": 9, "window_size": 3}, {"length": 5, "window_size": 0}],
        1,
    ),
    Kind(
        "generate_sink_mask",
        "MaskLayout.causal(length, window=window_size + 1, sink_tokens=sink_size)",
        lambda v, b, h, q, k: k <= q and (q - k <= v.window_size or k < v.sink_size),
        [{"length": 11, "window_size": 3, "sink_size": 2}],
        2,
    ),
    Kind(
        "generate_global_sliding_window",
        "MaskLayout.full(length).with_window(window_size + 1)"
        " | MaskLayout.full(length, active_queries=is_global) | MaskLayout.padded(is_global, causal=False)",
        lambda v, b, h, q, k: abs(q - k) <= v.window_size or bool(v.is_global[0, q] or v.is_global[0, k]),
        [{"length": 12, "window_size": 2, "is_global": _IS_GLOBAL}],
        3,
    ),
    Kind(
        "generate_dilated_sliding_window",
        "MaskLayout.packed(document_ids=torch.arange(length) % dilation, causal=False,"
        " window=window_size // dilation + 1)",
        lambda v, b, h, q, k: abs(q - k) <= v.window_size and abs(q - k) % v.dilation == 0,
        [{"length": 12, "window_size": 4, "dilation": 2}, {"length": 13, "window_size": 5, "dilation": 3}],
        5,
    ),
    Kind(
        "generate_prefix_lm_mask",
        "MaskLayout.prefix_lm(prefix_lengths, length)",
        lambda v, b, h, q, k: k <= q or k < v.prefix_lengths[b],
        [{"length": 8, "prefix_lengths": [3]}, {"length": 8, "prefix_lengths": [0, 8, 5]}],
        1,
    ),
    Kind(
        "generate_shared_prefix_mask_mod",
        "MaskLayout.tree(parents, lengths)",
        _tree,
        [{"parents": [-1, 0, 0, -1, 3, 3, 3], "lengths": [3, 2, 1, 2, 2, 3, 1]}],
        2,
    ),
    Kind(
        "generate_doc_mask_mod(noop_mask)",
        "MaskLayout.packed(lengths, causal=False)",
        lambda v, b, h, q, k: v.document[q] == v.document[k],
        [{"lengths": [2, 4, 1], "document": [0, 0, 1, 1, 1, 1, 2]}],
        1,
    ),
    Kind(
        "generate_doc_mask_mod(generate_sliding_window(...))",
        "MaskLayout.packed(lengths, window=window_size + 1)",
        lambda v, b, h, q, k: v.document[q] == v.document[k] and 0 <= q - k <= v.window_size,
        [{"lengths": [2, 5, 1], "document": [0, 0, 1, 1, 1, 1, 1, 2], "window_size": 1}],
        1,
    ),
    Kind(
        "generate_doc_mask_mod(generate_prefix_lm_mask(...))",
        "MaskLayout(length, length, visibility=StructuredMask(causal=True, q_positions=place, kv_positions=place,"
        " q_segments=document, kv_segments=document, prefix_lengths=prefix_lengths))",
        lambda v, b, h, q, k: (
            v.document[0, q] == v.document[0, k] and (k <= q or v.place[0, k] < v.prefix_lengths[0, v.document[0, q]])
        ),
        [
            {
                "length": 8,
                "document": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]),
                "place": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]),
                "prefix_lengths": torch.tensor([[2, 3, 0]]),
            }
        ],
        1,
    ),
    Kind(
        "generate_packed_causal_doc_mask_mod",
        "MaskLayout.packed(cu_seqlens=offsets)",
        lambda v, b, h, q, k: any(a <= k <= q < z for a, z in zip(v.offsets, v.offsets[1:], strict=False)),
        [{"offsets": [0, 2, 6, 9]}],
        1,
    ),
    Kind(
        "batchify_mask_mod",
        "MaskLayout.chunked(batchify_size, length, causal=False)",
        lambda v, b, h, q, k: q // v.batchify_size == k // v.batchify_size,
        [{"batchify_size": 3, "length": 11}],
        1,
    ),
    Kind(
        "batchify_mask_mod(causal_mask)",
        "MaskLayout.chunked(batchify_size, length)",
        lambda v, b, h, q, k: q // v.batchify_size == k // v.batchify_size and k <= q,
        [{"batchify_size": 4, "length": 11}],
        1,
    ),
    Kind(
        "generate_block_diffusion_mask",
        "MaskLayout.tree(2 * [*range(-1, blocks - 1)], 2 * blocks * [block], causal=False)"
        ".select_queries(noised_first).select_keys(noised_first)",
        _diffusion,
        [{"length": 9, "block": 3, "blocks": 3, "noised_first": [*range(9, 18), *range(9)]}],
        2,
    ),
    Kind(
        "generate_jetspec_tree_causal_mask_mod",
        "MaskLayout.tree(parents, lengths).select_queries(slice(lengths[0], None))",
        _tree,
        [{"parents": [-1, 0, 1, 2, 2, 4, 4, 1], "lengths": [5, *[1] * 7], "skipped": 5}],
        3,
    ),
    Kind(
        "generate_jetspec_training_mask_mod",
        "MaskLayout.shared_prefix(prefix, [block] * blocks).select_queries(slice(prefix, None))",
        lambda v, b, h, q, k: k < v.prefix or (0 <= q + v.prefix - k <= q % v.block),
        [{"prefix": 5, "block": 4, "blocks": 3}],
        2,
    ),
    Kind(
        "generate_vision_cross_attention_mask_mod",
        "MaskLayout(text, images * image_tokens, visibility=StructuredMask(q_segments=torch.arange(text)[None],"
        " kv_segments=first.repeat_interleave(image_tokens, 1),"
        " kv_segment_ends=end.repeat_interleave(image_tokens, 1)))",
        lambda v, b, h, q, k: v.first[0, k // v.image_tokens] <= q < v.end[0, k // v.image_tokens],
        [
            {
                "text": 12,
                "images": 3,
                "image_tokens": 2,
                "first": torch.tensor([[0, 1, 7]]),
                "end": torch.tensor([[7, 4, 12]]),
            }
        ],
        1,
    ),
    Kind(
        "generate_spatial_head_mask_mod",
        "MaskLayout.full(length).with_window(width) | MaskLayout.full(length, active_queries=is_prompt)"
        " | MaskLayout.padded(lengths=[first], kv_len=length, causal=False)",
        lambda v, b, h, q, k: q < v.prompt or k < v.first or abs(q - k) < v.width,
        [
            {"length": 14, "width": 3, "prompt": 2, "first": 5, "is_prompt": torch.arange(14)[None] < 2},
            {"length": 14, "width": 4, "prompt": 2, "first": 2, "is_prompt": torch.arange(14)[None] < 2},
        ],
        2,
    ),
    Kind(
        "generate_temporal_head_mask_mod",
        "MaskLayout.full(length).with_window(width, q_positions=place, kv_positions=place)"
        " | MaskLayout.full(length, active_queries=is_prompt) | MaskLayout.padded(is_prompt, causal=False)",
        lambda v, b, h, q, k: (
            q < v.prompt or k < v.prompt or abs((q - v.prompt) % v.frame - (k - v.prompt) % v.frame) < v.width
        ),
        [
            {
                "length": 14,
                "width": 2,
                "prompt": 2,
                "frame": 4,
                "place": (torch.arange(14)[None] - 2) % 4,
                "is_prompt": torch.arange(14)[None] < 2,
            }
        ],
        4,
    ),
    Kind("generate_natten", _within(2), _neighbours, [_canvas((4, 5), (3, 3)), _canvas((3, 6), (1, 5))], None),
    Kind(
        "generate_tiled_natten",
        _within(2),
        _neighbours,
        [_canvas((4, 4), (3, 3), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15])],
        None,
    ),
    Kind(
        "generate_morton_natten",
        _within(2),
        _neighbours,
        [
            _canvas(
                (4, 4),
                (1, 3),
                [
                    sum((i >> 2 * bit & 1) << bit | (i >> 2 * bit + 1 & 1) << 2 + bit for bit in range(2))
                    for i in range(16)
                ],
            )
        ],
        None,
    ),
    Kind(
        "generate_sta_mask_mod_2d",
        f"({_within(2)}) | {_TEXT}",
        _tiles,
        [_sliding_tiles((3, 4), (3, 2), 2, 0), _sliding_tiles((3, 3), (1, 2), 2, 3)],
        None,
    ),
    Kind(
        "generate_sta_mask_mod_3d",
        f"({_within(3)}) | {_TEXT}",
        _tiles,
        [_sliding_tiles((2, 3, 2), (1, 3, 2), 2, 3)],
        None,
    ),
    Kind(
        "generate_vsa_mask_mod",
        "MaskLayout.dense(torch.zeros(*chosen.shape[:3], tiles, dtype=torch.bool).scatter(3, chosen, True)"
        ".repeat_interleave(tile, 2).repeat_interleave(tile, 3))",
        lambda v, b, h, q, k: k // v.tile in v.chosen[b, h, q // v.tile].tolist(),
        [{"tile": 3, "tiles": 4, "chosen": torch.tensor([[[[0, 3], [1, 2], [2, 3]], [[0, 1], [0, 1], [1, 3]]]])}],
        None,
    ),
    Kind(
        "generate_vsa_block_map_mask_mod",
        "MaskLayout.dense(block_map.repeat_interleave(tile, 2).repeat_interleave(tile, 3))",
        lambda v, b, h, q, k: bool(v.block_map[b, h, q // v.tile, k // v.tile]),
        [{"tile": 3, "block_map": torch.tensor([[[[True, False], [True, True]], [[False, True], [True, False]]]] * 2)}],
        None,
    ),
    Kind(
        "generate_vsa_padding_mask_mod",
        "MaskLayout.padded(torch.arange(tile).repeat(1, len(sizes)) < sizes.repeat_interleave(tile),"
        " q_len=q_len, causal=False)",
        lambda v, b, h, q, k: k % v.tile < v.sizes[k // v.tile],
        [{"q_len": 5, "tile": 4, "sizes": torch.tensor([4, 2, 3])}],
        2,
    ),
]

PEERS = {"xformers": XFORMERS, "attention-gym": ATTENTION_GYM}

#: What stands beside the masks there and is none: its name, and how it is said or why it is not.
OTHERS = {
    "xformers": {
        "AttentionBias, AttentionBiasSubTensor": "the base classes; they show nothing themselves",
        "LowerTriangularMaskWithTensorBias": "`LowerTriangularMask`, and its numbers as `bias=`",
        "block_tables of the paged masks": "where pages lie is an address: `slots` above lists the token of each slot;"
        " a slot without one stands for a key of a document of its own",
    },
    "attention-gym": {
        "generate_alibi_bias, generate_sandwich_bias": "numbers that are added to scores: `bias=`, `[1, H, Q, K]`",
        "generate_graphormer_spatial_bias, generate_graphormer_edge_bias": "learned numbers that are added to scores:"
        " `bias=`, which has a gradient",
        "generate_tanh_softcap": "`softcap=`",
        "generate_mla_rope_score_mod": "a second product that is added to the score: both widths beside each other"
        " in queries and keys",
        "generate_activation_score_mod": "another function in the place of softmax: not attention as it is said here",
        "exclusive_sa": "takes the token's own value out of the output, after attention",
        "the selection of VSA and of compressed sparse attention": "which keys are listed is computed from the scores;"
        " what is listed is the mask: `generate_vsa_mask_mod`",
        "PagedAttention.get_mask_mod": "an address, as xformers' block tables: `select_keys(slots)`",
    },
}  # fmt: skip
