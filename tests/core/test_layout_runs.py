"""Layouts whose queries see several runs of keys: trees, sinks, windows of two sides, block causal and unions."""

from __future__ import annotations

import copy
import operator
import pickle
import random

import pytest
import torch

from polyattn import LayoutError, MaskLayout, StructuredMask
from random_layouts import random_layout, random_structure, random_tree, random_union


def rows(layout):
    return layout.draw().split("\n")


def painted(layout):
    """How often the bands show each pair, ``Int[B, Q, K]``."""
    counts = torch.zeros(layout.batch, layout.q_len, layout.kv_len, dtype=torch.int32)
    for batch, q_start, q_stop, k_start, k_stop, low, high in layout.to_bands().tolist():
        apart = torch.arange(q_stop - q_start)[:, None] - torch.arange(k_stop - k_start)
        inside = (apart >= low) & (apart <= high)
        assert not inside.numel() or (inside.any(0).all() and inside.any(1).all())
        counts[batch, q_start:q_stop, k_start:k_stop] += inside.int()
    return counts


@pytest.mark.parametrize("seed", range(6))
def test_bands_show_what_the_dense_form_shows_and_no_pair_twice(seed):
    draw = random.Random(seed)
    lowered = several = 0
    for _ in range(60):
        layout = random_layout(draw)
        if layout.to_bands() is None:
            continue
        want = layout.to_dense().expand(layout.batch, 1, -1, -1)[:, 0]
        active = torch.ones(1, layout.q_len) if layout.active_queries is None else layout.active_queries
        assert torch.equal(painted(layout) * active[..., None].int(), want.int()), layout
        assert torch.equal(layout.rows_without_keys()[:, 0], ~want.any(2))
        assert torch.equal(layout.unseen_keys()[:, 0], ~want.any(1))
        intervals = layout.key_intervals(max_runs=layout.max_runs)
        key = torch.arange(layout.kv_len)
        inside = (key >= intervals[..., :1]) & (key < intervals[..., 1:])
        assert torch.equal(inside.sum(2), want.long())
        lowered, several = lowered + 1, several + (layout.max_runs > 1)
    assert lowered > 40
    assert several > 5


@pytest.mark.parametrize("seed", range(3))
def test_a_union_shows_what_one_of_its_parts_shows(seed):
    draw = random.Random(seed)
    for _ in range(40):
        a = random_union(draw, batch=2)
        b = random_structure(draw, a.q_len, a.kv_len, 2) | random_structure(draw, a.q_len, a.kv_len, 2)
        shape = (2, 1, a.q_len, a.kv_len)
        for join in (operator.or_, operator.and_):
            want = join(a.to_dense().expand(shape), b.to_dense().expand(shape))
            assert torch.equal(join(a, b).to_dense().expand(shape), want)


def test_a_token_of_a_tree_sees_the_tokens_above_it():
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randint(1, 8)
        parents = [draw.randint(-1, node - 1) for node in range(count)]
        lengths = [draw.randint(1, 4) for _ in range(count)]
        causal, window = draw.random() < 0.7, draw.choice((None, 1, 3, (2, 1)))
        tokens = [(node, place) for node in range(count) for place in range(lengths[node])]
        above = {-1: []}
        for node in range(count):
            above[node] = [*above[parents[node]], node]
        depth = {node: sum(lengths[other] for other in above[parents[node]]) for node in range(count)}
        left, right = (window - 1, window - 1) if isinstance(window, int) else window or (999, 999)

        def sees(query, key):
            distance = depth[query[0]] + query[1] - depth[key[0]] - key[1]  # noqa: B023
            if key[0] not in above[query[0]] or not -right <= distance <= left:  # noqa: B023
                return False
            return not causal or distance >= 0  # noqa: B023

        layout = MaskLayout.tree(parents, lengths, causal=causal, window=window)
        want = torch.tensor([[sees(query, key) for key in tokens] for query in tokens])
        assert torch.equal(layout.to_dense()[0, 0], want)
        assert layout.token_positions().tolist() == [[depth[node] + place for node, place in tokens]]


def test_a_shared_prefix_is_a_tree_of_one_level():
    layout = MaskLayout.shared_prefix(2, [2, 1])
    assert rows(layout) == ["#----", "##---", "###--", "####-", "##--#"]
    assert layout.token_positions().tolist() == [[0, 1, 2, 3, 2]]
    assert layout.max_runs == 2


def test_rows_of_a_batch_hold_trees_of_their_own():
    layout = MaskLayout.tree([[-1, 0, 0], [-1, 0, 1]], [[1, 1, 1], [1, 1, 1]])
    assert layout.batch == 2
    assert layout.to_dense()[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]


def test_a_chain_of_nodes_is_one_run_of_keys():
    assert MaskLayout.tree([-1, 0, 1], [2, 3, 2]).max_runs == 1
    assert MaskLayout.tree([-1, 0, 1], [2, 3, 2]).to_bands().shape[0] == 4


def test_no_window_hides_sink_tokens():
    layout = MaskLayout.causal(6, window=2, sink_tokens=1)
    assert rows(layout) == ["#-----", "##----", "###---", "#-##--", "#--##-", "#---##"]
    assert rows(MaskLayout.causal(6, sink_tokens=1).with_window(2)) == rows(layout)
    packed = MaskLayout.packed([4, 4], window=1, sink_tokens=1)
    assert rows(packed)[2:6] == ["#-#-----", "#--#----", "----#---", "----##--"]
    both = MaskLayout(4, 4, visibility=StructuredMask(window=1, sink_lengths=torch.tensor([1])))
    assert rows(both) == ["#---", "##--", "#-#-", "#--#"]


def test_sinks_meet_padding_as_structure():
    valid = torch.tensor([[False, True, True, True, True]])
    layout = MaskLayout.causal(5, window=2, sink_tokens=2) & MaskLayout.padded(valid)
    assert isinstance(layout.visibility, StructuredMask)
    assert rows(layout) == ["-----", "-#---", "-##--", "-###-", "-#-##"]


@pytest.mark.parametrize(
    "window, want", [((1, 0), ["#---", "##--", "-##-", "--##"]), ((0, 2), ["###-", "-###", "--##", "---#"])]
)
def test_a_window_of_two_sides_says_how_far_to_each(window, want):
    assert rows(MaskLayout.full(4).with_window(window)) == want


def test_windows_that_say_the_same_are_one_number():
    for window in ((2, 2), 3):
        assert StructuredMask(window=window).window == 3
    assert StructuredMask(causal=True, window=(2, 5)).window == 3
    assert StructuredMask(window=(-1, None)).window is None
    assert StructuredMask(window=(None, 4)).window == (None, 4)
    assert rows(MaskLayout.causal(4).with_window((1, None))) == rows(MaskLayout.causal(4, window=2))


def test_block_causal_sees_its_own_block_and_those_before_it():
    layout = MaskLayout.block_causal(2, 5)
    assert rows(layout) == ["##---", "##---", "####-", "####-", "#####"]
    assert rows(layout.with_window(1)) == ["##---", "##---", "--##-", "--##-", "----#"]
    assert MaskLayout.block_causal(32, 2**16).to_bands().shape == (2**11 + 1, 7)


def test_a_query_that_is_inactive_in_one_part_sees_what_the_other_shows():
    active = torch.tensor([[True, False, True]])
    layout = MaskLayout.full(3, active_queries=active) | MaskLayout.causal(3, window=1)
    assert rows(layout) == ["###", "-#-", "###"]
    assert layout.active_queries is None
    assert layout.max_runs == 1


def test_unions_with_functions_and_dense_masks():
    function = MaskLayout.from_mod(lambda b, h, q, k: q >= k + 2, q_len=4, kv_len=4)
    diagonal = MaskLayout.causal(4, window=1)
    for other in (function, MaskLayout.dense(torch.ones(4, 4, dtype=torch.bool).tril(-2))):
        layout = diagonal | other
        assert rows(layout) == ["#---", "-#--", "#-#-", "##-#"]
        assert layout.to_bands() is None
    assert callable((diagonal | function).visibility)


KINDS = {
    "tree": MaskLayout.tree([-1, 0, 0, 1], [3, 2, 2, 2]),
    "window of a tree": MaskLayout.tree([-1, 0, 0, 1], [3, 2, 2, 2], window=3),
    "sinks": MaskLayout.causal(9, window=2, sink_tokens=1),
    "two sides": MaskLayout.full(9).with_window((1, 3)),
    "block causal": MaskLayout.block_causal(2, 9),
    "union": MaskLayout.causal(9, window=2) | MaskLayout.packed([[4, 5], [2, 7]]),
    "union with inactive": MaskLayout.full(9, active_queries=torch.arange(9)[None] < 3)
    | MaskLayout.causal(9, window=1),
    "cache": MaskLayout.cached(torch.tensor([9, 9]), 9, 9, finite=True),
    "ring of a cache": MaskLayout.cached(torch.tensor([11]), 9, 9, window=1, ring=True),
}
INDEX = [1, 2, 5, 8]


@pytest.mark.parametrize("layout", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(
    "operation, on_dense",
    [
        (lambda x: x.select_queries(INDEX), lambda x: x[:, :, INDEX]),
        (lambda x: x.select_keys(INDEX), lambda x: x[..., INDEX]),
        (lambda x: x.select_heads(slice(0, 1)), lambda x: x),
        (lambda x: x.select_batch(slice(0, 1)), lambda x: x[:1]),
        (lambda x: x.expand(max(2, x.batch)), lambda x: x.expand(max(2, len(x)), -1, -1, -1)),
        (lambda x: x.to("meta").select_queries(slice(None)) and x, lambda x: x),
        (lambda x: x & MaskLayout.full(9), lambda x: x),
        (lambda x: x | MaskLayout.full(9), torch.ones_like),
        (copy.deepcopy, lambda x: x),
        (lambda x: pickle.loads(pickle.dumps(x)), lambda x: x),
    ],
    ids=["queries", "keys", "heads", "batch", "expand", "to", "and", "or", "deepcopy", "pickle"],
)
def test_operations_on_kinds_equal_those_on_the_dense_mask(layout, operation, on_dense):
    want = on_dense(layout.to_dense().expand(layout.batch, 1, -1, -1))
    result = operation(layout)
    assert torch.equal(result.to_dense().expand(want.shape), want)
    assert torch.equal(painted(result)[:, None].expand(want.shape), want.int())
    index = [torch.arange(n) for n in result.to_dense().shape[2:]]
    seen = result.to_mask_mod()(torch.tensor(0), torch.tensor(0), index[0][:, None], index[1])
    assert torch.equal(seen.expand(want.shape[2:]), want[0, 0])
    assert len(result.describe()) > 10


@pytest.mark.parametrize("name", [name for name in KINDS if "cache" not in name])  # whose bands a graph does not read
def test_layouts_of_several_runs_are_inputs_of_graphs(name):
    layout = KINDS[name]
    graph = torch.compile(lambda layout: (layout.to_dense(), layout.to_bands() + 0), fullgraph=True, backend="eager")
    dense, bands = graph(layout)
    assert torch.equal(dense, layout.to_dense())
    assert torch.equal(bands, layout.to_bands())


def test_layouts_of_several_runs_are_made_inside_graphs():
    def made():
        sinks, tree = MaskLayout.causal(9, window=2, sink_tokens=1), MaskLayout.tree([-1, 0, 0], [3, 2, 4])
        union = sinks | MaskLayout.causal(9).with_window((1, 0))
        return [x.to_dense() for x in (sinks, tree, union, MaskLayout.block_causal(2, 9), tree.with_window(2))]

    torch._dynamo.reset()
    for got, want in zip(torch.compile(made, fullgraph=True, backend="eager")(), made(), strict=True):
        assert torch.equal(got, want)


def test_positions_of_tokens_are_places_in_documents_and_after_padding():
    packed = MaskLayout.packed([2, 3])
    assert packed.token_positions().tolist() == [[0, 1, 0, 1, 2]]
    assert packed.select_queries([1, 3]).token_positions().tolist() == [[1, 1]]
    left = MaskLayout.padded(lengths=[2, 3], kv_len=3, side="left")
    assert left.token_positions().tolist() == [[0, 0, 1], [0, 1, 2]]
    assert MaskLayout.causal(2, 5).token_positions().tolist() == [[3, 4]]
    assert (MaskLayout.causal(3) | MaskLayout.full(3)).token_positions().tolist() == [[0, 1, 2]]
    with pytest.raises(LayoutError, match="must be the same in all its parts"):
        (MaskLayout.causal(5) | packed).token_positions()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: MaskLayout.tree([0], [1]), r"parents must each be an earlier node or -1 for a root, got 0 for node 0"),
        (lambda: MaskLayout.tree([-1, 2, 0], [1, 1, 1]), r"got 2 for node 1; list a node after the one"),
        (lambda: MaskLayout.tree([-1], [1, 2]), r"lengths must have one entry for each of parents, got rows of \[2\]"),
        (lambda: MaskLayout.tree([-1], [-1]), r"every one of lengths must be an int >= 0, got -1"),
        (lambda: MaskLayout.tree([[-1], [-1]], [[1], [2]]), r"must add up to one number, got \[1, 2\]; give the rest"),
        (lambda: MaskLayout.tree(["a"], [1]), r"parents must be ints or an integer tensor"),
        (lambda: MaskLayout.shared_prefix(-1, [1]), r"prefix_length must be an int >= 0, got -1"),
        (lambda: MaskLayout.shared_prefix(1, [1, 2.5]), r"response_lengths must be ints or an integer tensor"),
        (lambda: MaskLayout.block_causal(0, 4), r"block_size must be an int >= 1, got 0"),
        (lambda: MaskLayout.causal(4, sink_tokens=-1), r"sink_tokens must be an int >= 0, got -1"),
        (
            lambda: MaskLayout.causal(4, window=(1, 2, 3)),
            r"window must be an int or a pair \(left, right\), got .* of 3",
        ),
        (lambda: MaskLayout.causal(4, window=(1, -2)), r"the right side of window .* must be an int >= 0, got -2"),
        (lambda: MaskLayout.causal(4, window=(1.5, 0)), r"the left side of window .* must be an int >= 0, got 1.5"),
        (lambda: MaskLayout.causal(4) | MaskLayout.causal(5), r"layouts joined with \| must fit each other: q_len"),
        (lambda: StructuredMask(kv_segment_ends=torch.zeros(1, 2).int()), r"kv_segment_ends must come with q_segments"),
    ],
)
def test_wrong_arguments_are_named(make, text):
    with pytest.raises(LayoutError, match=text):
        make()


def test_trees_of_a_random_draw_differ():
    draw = random.Random(1)
    assert len({random_tree(draw).describe() for _ in range(20)}) > 3


@pytest.mark.parametrize("window", [1, 2, 4, (1, 0)])
@pytest.mark.parametrize("name", ["tree", "late", "packed", "prefix"])
def test_a_window_inside_a_graph_gives_the_bands_of_one_outside(name, window):
    layout = {
        "tree": MaskLayout.tree([-1, 0, 1, 0], [3, 3, 3, 3]),
        "late": MaskLayout.causal(12).select_queries(slice(6, 12)).select_keys(slice(0, 3)),
        "packed": MaskLayout.packed([5, 7]),
        "prefix": MaskLayout.prefix_lm(3, 9),
    }[name]
    torch._dynamo.reset()
    graph = torch.compile(lambda layout: layout.with_window(window).to_bands() + 0, fullgraph=True, backend="eager")
    inside, outside = (sorted(row for row in table.tolist() if row[2] > row[1])
                       for table in (graph(layout), layout.with_window(window).to_bands()))  # fmt: skip
    assert inside == outside
