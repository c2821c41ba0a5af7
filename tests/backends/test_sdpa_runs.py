"""The sdpa backend on layouts whose queries see several runs of keys: trees, sinks, windows of two sides, unions."""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
import random

import pytest
import torch

import polyattn
from polyattn import AttentionRequest, MaskLayout, StructuredMask
from polyattn_conformance.reference import reference_attention
from polyattn_sdpa import _backend, _ops, _runs
from polyattn_sdpa._tiles import mask_of
from random_layouts import random_layout

SDPA = polyattn.backends.get("sdpa")


@pytest.fixture
def always_tiles(monkeypatch):
    """Small layouts are walked in tiles, which their cost would forbid."""
    monkeypatch.setattr(_backend, "DENSE_COST", float("inf"))


@pytest.fixture
def short_strips(monkeypatch, always_tiles):
    """A few rows are many, so that small layouts have long bands, narrow bands and groups."""
    for name, value in {"STRIP": 5, "THIN": 2, "THIN_ROWS": 3, "FEW_COMMON": 1}.items():
        monkeypatch.setattr(_runs, name, value)


def tensors(layout, *, seed=0, batch=1, heads=4, kv_heads=2, width=8, v_width=8, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, layout.q_len, width), (kv_heads, layout.kv_len, width), (kv_heads, layout.kv_len, v_width))
    made = [torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def with_gradients(output, lse, qkv):
    """The output, the LSE, and gradients of q, k and v from both."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    loss = (output * weights).sum() + lse[lse.isfinite()].sin().sum()
    return [output, lse, *torch.autograd.grad(loss, qkv)]


def check(layout, qkv, *, hide=True):
    """sdpa equals plain attention under the dense mask, whatever stands in what no query sees."""
    visible = layout.to_dense()
    want = with_gradients(*reference_attention(*qkv, visible), qkv)
    shown = [visible.any(3), *[visible.any(2)] * 2] if hide else [torch.ones((), dtype=torch.bool)] * 3
    given = [
        torch.where(seen.unsqueeze(-1), x.detach(), torch.nan).requires_grad_()
        for seen, x in zip(shown, qkv, strict=True)
    ]
    request = AttentionRequest.of(*given, needs_lse=True, needs_lse_grad=True)
    prepared = SDPA.prepare(layout, request)
    result = prepared(*given)
    for got, expected in zip(with_gradients(result.output, result.lse, given), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    return prepared


def random_case(seed):
    draw = random.Random(seed)
    layout = random_layout(draw)
    kv_heads = draw.choice((1, 2))
    sizes = {"heads": kv_heads * draw.choice((1, 2, 3)), "kv_heads": kv_heads, "v_width": draw.choice((8, 5))}
    return layout, tensors(layout, seed=seed, batch=layout.batch if layout.batch > 1 else draw.choice((1, 2)), **sizes)


@pytest.mark.parametrize("seed", range(150))
def test_random_trees_and_unions_equal_plain_attention(seed, always_tiles):
    assert check(*random_case(seed)).state.path == "tiles"


@pytest.mark.parametrize("seed", range(150, 300))
def test_they_do_so_where_their_bands_are_long(seed, short_strips):
    assert check(*random_case(seed)).state.path == "tiles"


def painted(layout, table):
    """How often the tiles of a table have each pair of a query and a key, ``[B, Q, K]``."""
    pairs = torch.zeros(layout.batch, layout.q_len, layout.kv_len, dtype=torch.int64)
    for tile in _runs.tiles_of(table):
        shown = torch.ones(tile.q_stop - tile.q_start, tile.width, dtype=torch.int64)
        if tile.pattern:
            shown = (mask_of(tile, torch.float32, torch.device("cpu")) == 0).long()
            blind = [row for start, stop in tile.blind for row in range(start, stop)]
            assert (~shown.any(1)).nonzero().flatten().tolist() == blind
        if tile.diagonal:
            shown = torch.eye(len(shown), dtype=torch.int64).repeat(1, len(tile.keys))
        place = 0
        for start, stop in tile.keys:
            part = shown.tril() if tile.causal else shown[:, place : place + stop - start]
            pairs[tile.batch, tile.q_start : tile.q_stop, start:stop] += part
            place += stop - start
    return pairs


@pytest.mark.parametrize("seed", range(60))
def test_tiles_have_each_visible_pair_once_planned_before_or_in_the_call(seed, short_strips):
    layout = random_layout(random.Random(seed))
    if layout.active_queries is not None:  # those between active ones may be covered
        layout = MaskLayout(layout.q_len, layout.kv_len, visibility=layout.visibility)
    bands = layout.to_bands()
    want = layout.to_dense().squeeze(1).long()
    assert torch.equal(painted(layout, bands), want)
    assert torch.equal(painted(layout, _runs.planned(bands, float("inf"))), want)


def tile_list(layout):
    return [(tile.q_start, tile.q_stop, *tile.keys, tile.causal, len(tile.pattern)) for tile in _runs.tiles_of(layout)]


@pytest.mark.parametrize(
    "layout, tiles",
    [
        (MaskLayout.causal(500), [(0, 500, (0, 500), True, 0)]),
        (MaskLayout.packed([3, 400]), [(0, 3, (0, 3), True, 0), (3, 403, (3, 403), True, 0)]),
        (
            MaskLayout.causal(500, window=100),
            [
                (0, 100, (0, 100), True, 0),
                (100, 292, (0, 292), False, 1),
                (292, 484, (192, 484), False, 1),
                (484, 500, (384, 500), False, 1),
            ],
        ),
        (
            MaskLayout.causal(400, 600),
            [(0, 192, (0, 392), False, 1), (192, 384, (0, 584), False, 1), (384, 400, (0, 600), False, 1)],
        ),
        (
            MaskLayout.packed([300], causal=False, window=50),
            [(0, 192, (0, 241), False, 1), (192, 300, (128, 300), False, 1)],
        ),
        (
            MaskLayout.prefix_lm(200, 500),
            [(0, 200, (0, 200), False, 0), (200, 392, (0, 392), False, 1), (392, 500, (0, 500), False, 1)],
        ),
        (MaskLayout.chunked(300, 500), [(0, 300, (0, 300), True, 0), (300, 500, (300, 500), True, 0)]),
    ],
    ids=lambda value: value.describe() if isinstance(value, MaskLayout) else "",
)
def test_one_run_of_keys_has_the_fewest_tiles(layout, tiles):
    assert tile_list(layout.to_bands()) == tiles


def test_a_shared_prefix_is_one_call_for_all_responses():
    tiles = tile_list(MaskLayout.shared_prefix(400, [200, 200, 300]).to_bands())
    assert tiles == [
        (0, 400, (0, 400), True, 0),
        (400, 600, (400, 600), True, 0),
        (600, 800, (600, 800), True, 0),
        (800, 1100, (800, 1100), True, 0),
        (400, 1100, (0, 400), False, 0),
    ]


def test_sink_tokens_are_one_call_beside_the_windows_own():
    window, sinks = (tile_list(MaskLayout.causal(900, window=100, sink_tokens=n).to_bands()) for n in (0, 4))
    # Queries that still have some of the sinks in their window see the others.
    assert sinks == [*window, (103, 900, (0, 4), False, 0), (100, 103, (0, 3), True, 0)]


def test_short_nodes_share_a_call_for_what_all_see_and_one_for_the_rest():
    tiles = tile_list(MaskLayout.tree([-1, 0, 1, 1, 0], [200, 20, 20, 20, 20]).to_bands())
    # Nodes of 20 tokens behind a root of 200: the root, then what each sees of its own branch.
    assert tiles[1:] == [(200, 280, (0, 200), False, 0), (200, 280, (200, 280), False, 5)]


def sees_nothing_of_a_masked_part():
    """All see 200 keys; of the keys behind, the first and the last queries see some, those between them none."""

    def part(keys, queries):
        valid = torch.zeros(1, 270, dtype=torch.bool)
        valid[:, keys] = True
        active = torch.zeros(1, 40, dtype=torch.bool)
        active[:, queries] = True
        return MaskLayout.padded(valid, q_len=40, causal=False, active_queries=active)

    return part(slice(200), slice(40)) | part(slice(250, 260), slice(10)) | part(slice(260, 270), slice(30, 40))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_kernel_returns_for_a_row_that_a_mask_hides_whole_is_not_merged(dtype, always_tiles):
    layout = sees_nothing_of_a_masked_part()
    qkv = tensors(layout, heads=2)
    table = check(layout, qkv).state.table
    (open_step, masked), _ = _ops._walk(qkv[0], qkv[1], table, None, False)
    assert open_step.mask is None
    assert masked.adds
    assert masked.blind == ((10, 30),)
    # Scores far below 0, beside which the kernel's 0 is a large logarithm.
    q, k, v = (x.detach().to(dtype) for x in qkv)
    q, k = q.abs() * 10, -k.abs() * 10
    got = polyattn.attention(q, k, v, layout, backend="sdpa", return_lse=True)
    want = reference_attention(q.double(), k.double(), v.double(), layout.to_dense())
    torch.testing.assert_close((got.output, got.lse), tuple(x.to(dtype) for x in want))


def draft_step(length, steps, valid=None):
    """A query sees the keys up to its place of the first step, and its own key of each later one."""
    place, number = torch.arange(length)[None], torch.arange(steps).repeat_interleave(length)[None]

    def part(step, window):
        mask = StructuredMask(
            causal=True,
            window=window,
            kv_valid=None if valid is None else valid.repeat(1, steps),
            q_positions=place,
            kv_positions=place.repeat(1, steps),
            q_segments=torch.full_like(place, step),
            kv_segments=number,
        )
        return MaskLayout(length, steps * length, visibility=mask, active_queries=valid)

    return functools.reduce(operator.or_, [part(0, None), *[part(step, 1) for step in range(1, steps)]])


def test_the_diagonals_of_a_draft_are_products_beside_one_causal_call():
    table = _runs.planned(draft_step(500, 4).to_bands(), float("inf"))
    causal, products = _runs.tiles_of(table)
    assert (causal.causal, causal.diagonal, products.diagonal) == (True, False, True)
    assert products.keys == ((500, 1000), (1000, 1500), (1500, 2000))
    assert products.adds


@pytest.mark.parametrize("sizes", [{}, {"heads": 2}, {"kv_heads": 1, "v_width": 5}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_diagonals_are_exact_forward_and_backward_with_the_lse(sizes, padded):
    valid = torch.arange(400) < torch.tensor([[400], [310]]) if padded else None
    layout = draft_step(400, 4, valid)
    prepared = check(layout, tensors(layout, batch=2, **sizes))
    assert any(tile.diagonal for tile in _runs.tiles_of(prepared.state.table))


def test_queries_that_see_nothing_but_diagonals_are_exact():
    steps = draft_step(400, 3)
    layout = steps & MaskLayout.padded(torch.arange(1200)[None] >= 400, q_len=400, causal=False)
    assert all(tile.diagonal for tile in _runs.tiles_of(check(layout, tensors(layout)).state.table))


def deep_tree(tokens):
    """Two children to each node, four levels, level by level: a leaf's queries lie in a call for each level."""
    return MaskLayout.tree([(node - 1) // 2 if node else -1 for node in range(15)], [tokens] * 15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("make", [lambda: deep_tree(200), lambda: draft_step(400, 5)], ids=["tree", "diagonals"])
def test_half_precision_adds_any_number_of_parts_in_float32(dtype, make):
    layout = make()
    qkv = tensors(layout, heads=2, kv_heads=1, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    weights = torch.randn(1, 2, layout.q_len, 8, generator=torch.Generator().manual_seed(1))
    output, _ = reference_attention(*exact, layout.to_dense())
    want = [output, *torch.autograd.grad((output * weights).sum(), exact)]

    def errors(backend, mask):
        output = polyattn.attention(*qkv, mask, backend=backend).output
        assert output.dtype is dtype
        got = [output, *torch.autograd.grad((output * weights).sum(), qkv)]
        return torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)])

    eager = errors("eager", MaskLayout.dense(layout.to_dense()))
    for upcast in (None, True, False):
        sdpa = polyattn.backends.resolve("sdpa", {"upcast_backward": upcast})
        assert (errors(sdpa, layout) <= 1.5 * eager).all(), upcast


def test_a_query_of_many_parts_rounds_its_output_once(monkeypatch):
    layout = deep_tree(200)
    qkv = tensors(layout, heads=2, dtype=torch.bfloat16, grad=False)
    dtypes = []
    add = _ops.merge_into
    monkeypatch.setattr(_ops, "merge_into", lambda output, *rest: (dtypes.append(output.dtype), add(output, *rest)))
    polyattn.attention(*qkv, layout, backend="sdpa")
    assert set(dtypes) == {torch.float32}


class TestThePath:
    def prepare(self, layout):
        return SDPA.prepare(layout, AttentionRequest.of(*tensors(layout)))

    @pytest.mark.parametrize(
        "layout, runs",
        [
            (MaskLayout.shared_prefix(256, [128] * 4), 2),
            (deep_tree(200), 4),
            (MaskLayout.causal(2000, window=100, sink_tokens=4), 2),
            (MaskLayout.packed([1000, 1000], window=100, sink_tokens=4), 2),
            (MaskLayout.causal(1000, window=64) | MaskLayout.padded(torch.arange(1000)[None] < 100), 2),
        ],
        ids=lambda value: "" if isinstance(value, int) else value.describe(),
    )
    def test_structure_of_several_runs_is_tiles_and_says_how_many(self, layout, runs):
        prepared = self.prepare(layout)
        assert prepared.state.path == "tiles"
        assert f"up to {runs} runs of keys for a query" in SDPA.describe(prepared)

    @pytest.mark.parametrize("length", [6, 600])
    def test_a_dense_call_is_taken_where_tiles_would_cost_more(self, length):
        valid = torch.rand(1, length, generator=torch.Generator().manual_seed(0)) < 0.5
        valid[:, 0] = True
        scattered = MaskLayout.padded(valid, q_len=length)
        few = scattered if length == 6 else scattered.select_queries(slice(0, 8))
        assert few.max_runs > 1
        assert self.prepare(few).state.path == "dense"

    def test_windows_of_two_sides_and_block_causal_are_one_run(self):
        for layout in (
            MaskLayout.block_causal(50, 600),
            MaskLayout.packed([300, 300], causal=False, window=(20, 60)),
            MaskLayout.packed([300, 300], causal=False, window=(None, 60)),
        ):
            prepared = check(layout, tensors(layout, heads=2), hide=False)
            assert prepared.state.path == "tiles"
            assert "runs" not in SDPA.describe(prepared)


def test_batch_rows_of_other_structure_and_inactive_queries():
    active = torch.ones(2, 700, dtype=torch.bool)
    active[0, 300:310] = active[1, :50] = False
    layout = MaskLayout.tree([[-1, 0, 0, -1], [-1, 0, 1, 0]], [[200, 200, 250, 50], [300, 30, 270, 100]])
    layout = MaskLayout(700, 700, visibility=layout.visibility, active_queries=active)
    assert check(layout, tensors(layout, batch=2)).state.path == "tiles"


def test_sink_logits_of_a_tree_equal_eager():
    layout = MaskLayout.shared_prefix(200, [200, 30, 30])
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [*tensors(layout), sinks]
    results = []
    for backend, mask in (("eager", MaskLayout.dense(layout.to_dense())), ("sdpa", layout)):
        output = polyattn.attention(*leaves[:3], mask, backend=backend, sinks=sinks).output
        results.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_trees_of_any_shape_compile_to_two_graphs(compiled_step):
    step, counter = compiled_step
    trees = [
        ([-1, 0, 0], [6, 3, 3]),
        ([-1, 0, 1, 0], [3, 3, 3, 3]),
        ([-1, 0, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 1, 1]),
        ([-1, -1, 0, 1], [4, 3, 2, 3]),
        ([-1, *[0] * 9], [3, *[1] * 9]),
    ]
    for parents, lengths in trees:
        layout = MaskLayout.tree(parents, lengths)
        qkv = tensors(layout)
        got, (want, _) = step(*qkv, layout), reference_attention(*qkv, layout.to_dense())
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), qkv), torch.autograd.grad(want.sum(), qkv))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("window", [1, 3, (2, 1)])
def test_a_tree_narrowed_inside_a_graph_is_exact(window):
    layout = MaskLayout.tree([-1, 0, 0, 1], [5, 4, 3, 4])
    qkv = tensors(layout)

    def step(q, k, v, layout):
        narrow = layout.with_window(window)
        return SDPA.prepare(narrow, AttentionRequest.of(q, k, v))(q, k, v).output

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*qkv, layout)
    want, _ = reference_attention(*qkv, layout.with_window(window).to_dense())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), qkv), torch.autograd.grad(want.sum(), qkv))


def test_a_plan_survives_pickle():
    layout = MaskLayout.shared_prefix(300, [100, 200])
    qkv = tensors(layout)
    prepared = SDPA.prepare(layout, AttentionRequest.of(*qkv))
    assert prepared.state.table.shape[1] == 8
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(*qkv).output, prepared(*qkv).output)


def test_each_branch_of_a_tree_equals_its_path_run_alone():
    parents, lengths = [-1, 0, 0, 1, 1], [250, 200, 30, 210, 20]
    layout = MaskLayout.tree(parents, lengths)
    q, k, v = tensors(layout, grad=False)
    output = polyattn.attention(q, k, v, layout, backend="sdpa").output
    starts = [0, *itertools.accumulate(lengths)]
    for leaf in (2, 3, 4):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, torch.arange(starts[node], starts[node + 1]))
            node = parents[node]
        rows = torch.cat(path)
        alone = polyattn.attention(*(x[:, :, rows] for x in (q, k, v)), MaskLayout.causal(len(rows)), backend="sdpa")
        torch.testing.assert_close(output[:, :, rows], alone.output, rtol=1e-10, atol=1e-10)
