"""Every constructor and operation of a layout inside ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyattn import AttentionRequest, LayoutError, MaskLayout, StructuredMask, attention, backends


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


VALID = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]])
SQUARE = torch.ones(6, 6, dtype=torch.bool).tril()
INDEX = torch.tensor([4, 1, 3])


def mod(_b, _h, q_idx, kv_idx):
    return kv_idx <= q_idx


CONSTRUCTORS = {
    "full": lambda: MaskLayout.full(6),
    "full of other lengths": lambda: MaskLayout.full(4, 6),
    "full, some inactive": lambda: MaskLayout.full(6, active_queries=VALID),
    "by default": lambda: MaskLayout(6, 6),
    "causal": lambda: MaskLayout.causal(4, 6, window=2, active_queries=VALID[:, :4]),
    "padded": lambda: MaskLayout.padded(VALID),
    "padded by lengths": lambda: MaskLayout.padded(lengths=[4, 6], kv_len=6),
    "padded on the left": lambda: MaskLayout.padded(lengths=[4, 6], kv_len=6, side="left"),
    "padded by a tensor": lambda: MaskLayout.padded(lengths=torch.tensor([4, 6]), kv_len=6, validate=False),
    "packed": lambda: MaskLayout.packed([2, 4]),
    "packed rows": lambda: MaskLayout.packed([[2, 4], [1, 2, 3]], window=2, causal=False),
    "packed by offsets": lambda: MaskLayout.packed(cu_seqlens=[0, 2, 6]),
    "packed by documents": lambda: MaskLayout.packed(document_ids=[0, 0, 1, 1, 1, 1]),
    "packed by positions": lambda: MaskLayout.packed(position_ids=[0, 1, 0, 1, 2, 3]),
    "packed by a tensor of lengths": lambda: MaskLayout.packed(torch.tensor([2, 4]), kv_len=6, validate=False),
    "packed by a tensor of offsets": lambda: MaskLayout.packed(
        cu_seqlens=torch.tensor([0, 2, 6]), kv_len=6, validate=False
    ),
    "packed by a tensor of documents": lambda: MaskLayout.packed(document_ids=IDS, validate=False),
    "packed by a tensor of positions": lambda: MaskLayout.packed(position_ids=POSITIONS, validate=False),
    "prefix": lambda: MaskLayout.prefix_lm(3, 6),
    "prefixes": lambda: MaskLayout.prefix_lm([3, 1], 6),
    "prefixes by a tensor": lambda: MaskLayout.prefix_lm(torch.tensor([3, 1]), 6, validate=False),
    "chunked": lambda: MaskLayout.chunked(4, 6),
    "two-sided window": lambda: MaskLayout.packed([2, 4], causal=False, window=(2, 1)),
    "sink tokens": lambda: MaskLayout.packed([2, 4], window=1, sink_tokens=1),
    "tree": lambda: MaskLayout.tree([-1, 0, 0], [2, 2, 2], window=3),
    "shared prefix": lambda: MaskLayout.shared_prefix(2, [1, 3]),
    "block causal": lambda: MaskLayout.block_causal(4, 6),
    "cached": lambda: MaskLayout.cached(torch.tensor([4, 6]), 2, 6),
    "cached in a ring": lambda: MaskLayout.cached(torch.tensor([9]), 2, 6, window=4, ring=True),
    "selected": lambda: MaskLayout.selected(torch.tensor([[[[0, 3], [-1, -1], [1, 1]]]]), 6, causal=True),
    "selected in blocks": lambda: MaskLayout.selected(torch.tensor([[[[0], [1]]]]), 6, block=4, validate=False),
    "dense": lambda: MaskLayout.dense(SQUARE, q_positions=IDS, kv_positions=IDS),
    "drop mask": lambda: MaskLayout.from_drop_mask(~SQUARE, active_queries=VALID),
    "mask_mod": lambda: MaskLayout.from_mod(mod, q_len=6, kv_len=6, active_queries=VALID, q_positions=IDS),
    "every field": lambda: MaskLayout(6, 6, visibility=StructuredMask(
        causal=True, window=3, q_positions=IDS, kv_positions=IDS, kv_valid=VALID, q_segments=IDS, kv_segments=IDS,
        prefix_lengths=torch.tensor([[1, 2, 3]]), chunk_size=4,
    )),
}  # fmt: skip

OPERATIONS = {
    "and": lambda layout: layout & MaskLayout.packed([1, 5]),
    "and full": lambda layout: MaskLayout.full(6) & layout,
    "and dense": lambda layout: layout & MaskLayout.dense(SQUARE),
    "and mask_mod": lambda layout: MaskLayout.from_mod(mod, q_len=6, kv_len=6) & layout,
    "or": lambda layout: layout | MaskLayout.causal(6, window=2),
    "window": lambda layout: layout.with_window(2),
    "two-sided window": lambda layout: layout.with_window((1, None)),
    "window by positions": lambda layout: layout.with_window(2, q_positions=POSITIONS, kv_positions=POSITIONS),
    "queries by a slice": lambda layout: layout.select_queries(slice(1, 5, 2)),
    "queries by a list": lambda layout: layout.select_queries([4, 1]).with_window(2),
    "queries by a tensor": lambda layout: layout.select_queries(INDEX, validate=False),
    "keys by a slice": lambda layout: layout.select_keys(slice(4, 0, -1)),
    "keys by a list": lambda layout: layout.select_keys([4, 1]),
    "heads": lambda layout: layout.select_heads(slice(0, 1)),
    "batch": lambda layout: layout.expand(2).select_batch([1, 0, 1]),
    "expand": lambda layout: layout.expand(2),
    "to": lambda layout: layout.to("cpu"),
}
#: Made inside the graph, and made outside.
INSIDE = (CONSTRUCTORS["packed"],)
OUTSIDE = (MaskLayout.dense(SQUARE.expand(1, 4, 6, 6)),)
#: Tracing a function takes several times as long, so it meets the operations that treat it in a way of its own.
FUNCTION = MaskLayout.from_mod(mod, q_len=6, kv_len=6)
OF_FUNCTIONS = {"window", "queries by a slice", "keys by a list", "heads", "expand"}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_works_inside_a_graph(name):
    def seen():
        return CONSTRUCTORS[name]().to_dense()

    assert torch.equal(torch.compile(seen, backend="eager", fullgraph=True)(), seen())


@pytest.mark.parametrize(
    ("backend", "layout", "kv_heads", "rest"),
    [
        ("eager", MaskLayout.causal, 2, {}),
        ("sdpa", MaskLayout.causal, 2, {}),
        ("sdpa", MaskLayout.full, 4, {}),
        ("sdpa", MaskLayout.causal, 2, {"training": True, "dropout_p": 0.5}),
    ],
)
def test_every_size_may_be_symbolic(backend, layout, kv_heads, rest):
    q, k, v = torch.randn(2, 4, 5, 8), *torch.randn(2, 2, kv_heads, 5, 8)
    chosen = backends.get(backend)

    def call(q, k, v):
        return attention(q, k, v, layout(q.shape[2]), backend=chosen, **rest).output

    results = []
    for run in (call, torch.compile(call, backend="eager", dynamic=True, fullgraph=True)):
        torch.manual_seed(0)
        results.append(run(q, k, v))
    assert torch.allclose(*results, atol=1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_works_inside_a_graph(name):
    def seen():
        layouts = (*[make() for make in INSIDE], *OUTSIDE, *([FUNCTION] if name in OF_FUNCTIONS else []))
        return [OPERATIONS[name](layout).to_dense() for layout in layouts]

    compiled = torch.compile(seen, backend="eager", fullgraph=True)()
    assert all(torch.equal(*pair) for pair in zip(compiled, seen(), strict=True))


def test_every_question_is_answered_inside_a_graph():
    index = torch.tensor([0, 3, 5])

    def answers():
        layouts = (*[make() for make in INSIDE], *OUTSIDE, FUNCTION)
        return [
            (layout.dense_rows(1, 4), layout.rows_without_keys(), layout.unseen_keys(),
             layout.to_mask_mod()(index * 0, index * 0, index, index - 1), layout.key_intervals())
            for layout in layouts
        ]  # fmt: skip

    for found, wanted in zip(torch.compile(answers, backend="eager", fullgraph=True)(), answers(), strict=True):
        assert all(bool((one == other).all()) for one, other in zip(found[:4], wanted[:4], strict=True))


def test_ints_that_change_between_calls_are_read_as_ints_inside_a_graph():
    counter = CompileCounter()

    def seen(first, second, x):
        packed = MaskLayout.packed([first, second])
        offsets = MaskLayout.packed(cu_seqlens=[0, first, first + second])
        return x + (packed & offsets & MaskLayout.prefix_lm(first, first + second)).to_dense()

    compiled = torch.compile(seen, backend=counter, fullgraph=True)
    for first in (2, 3, 4):
        assert torch.equal(compiled(first, 8 - first, torch.zeros(8)), seen(first, 8 - first, torch.zeros(8)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: MaskLayout.packed([2, -1]),
        lambda: MaskLayout.packed(cu_seqlens=[0, 4, 2]),
        lambda: MaskLayout.packed(document_ids=[0, -1]),
        lambda: MaskLayout.packed(position_ids=[0, 2]),
        lambda: MaskLayout.prefix_lm(9, 6),
        lambda: MaskLayout.full(6).select_keys([6]),
    ],
)
def test_ints_are_checked_inside_a_graph_as_outside(wrong):
    with pytest.raises(LayoutError):
        wrong()
    # Dynamo wraps what a traced function raises.
    with pytest.raises((torch._dynamo.exc.Unsupported, LayoutError)):
        torch.compile(lambda: wrong().to_dense(), backend="eager", fullgraph=True)()


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.full(4, 8),
        MaskLayout.packed([3, 5]).select_queries(slice(1, 7)),
        MaskLayout.causal(4, 8).select_keys(slice(0, 5)),
        MaskLayout(2, 4, visibility=StructuredMask(q_positions=torch.tensor([[9, 3]]))),
    ],
    ids=["full", "packed", "causal", "positions that nothing compared"],
)
def test_a_window_put_on_inside_a_graph_measures_the_distances_that_it_measures_outside(layout):
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (layout.q_len, layout.kv_len, layout.kv_len))
    backend, request = backends.get("sdpa"), AttentionRequest.of(q, k, v)

    def attend(q, k, v):
        return backend.prepare(layout.with_window(3), request)(q, k, v).output

    found = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    want = attention(q, k, v, MaskLayout.dense(layout.with_window(3).to_dense()), backend="eager").output
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
