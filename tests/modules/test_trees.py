"""Rows packed into a tree: each row is a path of it, and layers give each row what they give it alone."""

from __future__ import annotations

import random

import pytest
import torch

import polyattn
from polyattn import AttentionScope, GroupedQueryAttention, LayoutError, MaskLayout, RopeSpec, pack_tree

ROPE = RopeSpec(
    variant="default",
    theta=1e4,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=None,
    parameters={},
)


def check(rows, packed):
    """Each row is where ``index`` says, on a path from a root."""
    starts = [sum(packed.lengths[:node]) for node in range(len(packed.lengths))]
    node_of = [node for node, length in enumerate(packed.lengths) for _ in range(length)]
    for row, index, found in zip(rows, packed.index, packed.rows(packed.tokens), strict=True):
        assert found.tolist() == list(row)
        path = list(dict.fromkeys(node_of[place] for place in index.tolist()))
        assert [-1, *path[:-1]] == [packed.parents[node] for node in path]
        whole = [place for node in path for place in range(starts[node], starts[node] + packed.lengths[node])]
        assert index.tolist() == whole[: len(row)]
        assert packed.positions[0, index].tolist() == list(range(len(row)))
    assert sum(packed.lengths) == packed.tokens.shape[1]


def test_what_rows_begin_with_stands_once():
    rows = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [8, 9]]
    packed = pack_tree(rows)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 6, 7, 5, 8, 9]]
    assert packed.parents == (-1, 0, 1, 1, 0, -1)
    assert packed.lengths == (2, 1, 1, 2, 1, 2)
    assert packed.layout.describe() == MaskLayout.tree(packed.parents, packed.lengths).describe()
    check(rows, packed)


@pytest.mark.parametrize("seed", range(30))
def test_every_row_is_a_path_of_the_tree(seed):
    draw = random.Random(seed)
    rows = [[draw.randint(0, 1 + seed % 3) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 9))]
    least = draw.choice((1, 1, 2, 4))
    packed = pack_tree([torch.tensor(row) if draw.random() < 0.5 else row for row in rows], min_shared=least)
    check(rows, packed)
    for one, row in enumerate(rows):
        for other in range(one):
            shared = len([1 for a, b in zip(packed.index[one], packed.index[other], strict=False) if a == b])
            alike = next((i for i, (a, b) in enumerate(zip(row, rows[other], strict=False)) if a != b), None)
            alike = min(len(row), len(rows[other])) if alike is None else alike
            assert shared == (alike if alike >= least else 0)


def test_equal_rows_and_rows_that_others_go_on_from_are_packed_too():
    rows = [[1, 2, 3], [1, 2], [1, 2, 3], [1], [1, 2, 3, 4]]
    packed = pack_tree(rows)
    assert packed.tokens.tolist() == [[1, 2, 3, 4]]
    check(rows, packed)


def test_a_loss_over_what_rows_share_is_that_of_the_rows():
    rows = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [8, 9], [1, 2]]
    packed = pack_tree(rows)
    logits = torch.randn(1, packed.tokens.shape[1], 10, dtype=torch.float64)
    alone = [
        torch.nn.functional.cross_entropy(values[:-1], torch.tensor(row[1:]), reduction="none")
        for row, values in zip(rows, packed.rows(logits), strict=True)
    ]
    source, target, weight = packed.next_tokens()
    losses = torch.nn.functional.cross_entropy(logits[0, source], target, reduction="none")
    torch.testing.assert_close((losses * weight).sum() / weight.sum(), torch.cat(alone).mean())
    assert len(source) < sum(len(row) - 1 for row in rows)


def test_many_long_rows_are_packed_quickly_into_few_tokens():
    prompt = torch.arange(4000) % 977
    rows = [torch.cat([prompt, torch.full((96,), row)]) for row in range(64)]
    packed = pack_tree(rows)
    assert packed.tokens.shape == (1, 4000 + 64 * 96)
    assert all(torch.equal(row, found) for row, found in zip(rows, packed.rows(packed.tokens), strict=True))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_layer_on_the_tree_gives_each_row_what_it_has_alone(backend, window):
    torch.manual_seed(0)
    layer = GroupedQueryAttention(32, 4, 2, 8, rope=ROPE, window=window, backend=backend, dtype=torch.float64)
    embed = torch.nn.Embedding(10, 32, dtype=torch.float64)
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2, 3, 4, 8, 9, 1], [3, 1]]
    packed = pack_tree(rows)
    weights = [torch.randn(len(row), 32, dtype=torch.float64) for row in rows]
    parameters = [*layer.parameters(), embed.weight]

    outputs = packed.rows(layer(embed(packed.tokens), AttentionScope(packed.layout), packed.positions))
    together = torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), parameters)

    alone = [
        layer(embed(torch.tensor([row])), AttentionScope(MaskLayout.causal(len(row))), torch.arange(len(row))[None])[0]
        for row in rows
    ]
    for one, other in zip(outputs, alone, strict=True):
        torch.testing.assert_close(one, other)
    apart = torch.autograd.grad(sum((x * w).sum() for x, w in zip(alone, weights, strict=True)), parameters)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("rows", "keywords", "text"),
    [
        ([], {}, "rows must hold at least one row of tokens, got none"),
        ([[1], []], {}, r"rows\[1\] must hold at least one token, got none; leave the row out"),
        ([[1], [1.5]], {}, r"rows\[1\] must be token ids, a list of ints or a tensor Int\[L\], got \[1.5\]"),
        ([[1], [True]], {}, r"rows\[1\] must be token ids"),
        ([torch.ones(2, 2, dtype=torch.int64)], {}, r"rows\[0\] must be token ids Int\[L\], got torch.int64 \[2, 2\]"),
        ([torch.ones(2)], {}, r"rows\[0\] must be token ids Int\[L\], got torch.float32 \[2\]"),
        (["text"], {}, r"rows\[0\] must be token ids, .* got 'text'"),
        ([[1]], {"min_shared": 0}, "min_shared must be an int >= 1, got 0"),
    ],
)
def test_rows_of_another_kind_are_refused_by_name(rows, keywords, text):
    with pytest.raises(LayoutError, match=text):
        pack_tree(rows, **keywords)


def test_values_of_other_tokens_are_refused():
    packed = pack_tree([[1, 2], [1, 3]])
    with pytest.raises(LayoutError, match=r"values must be \[1, 3, ...\], one entry for each token .* got \[3"):
        packed.rows(torch.zeros(3, 4))
    assert isinstance(packed, polyattn.PackedTree)
