"""Every operation on every kind of layout: what it makes of the dense mask, or a refusal by name."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from layout_kinds import KINDS, painted, painted_in_positions, plain
from polyattn import LayoutError, MaskLayout, StructuredMask

INDEX = [1, 2, 4]
ORDER = [4, 1, 1, 0]


def other(layout, rule=lambda b, h, i, j: (i + j) % 3 > 0):
    """A dense mask of the same lengths, and what it shows."""
    shown = plain((1, 1, layout.q_len, layout.kv_len), rule)
    return MaskLayout.dense(shown.seen), shown


def whole(layout):
    return MaskLayout.full(layout.q_len, layout.kv_len), plain((1, 1, *layout.to_dense().shape[2:]), lambda *_: True)


def documents(layout):
    """Documents of three tokens, with their queries at the last places."""
    shift = layout.kv_len - layout.q_len
    made = MaskLayout.chunked(3, layout.q_len, layout.kv_len, causal=False)
    return made, plain((1, 1, layout.q_len, layout.kv_len), lambda b, h, i, j: (i + shift) // 3 == j // 3)


#: Each gives the layout and what it must show.
OPERATIONS = {
    "itself": lambda x, p: (x, p),
    "& full": lambda x, p: (x & whole(x)[0], p),
    "& dense": lambda x, p: (x & other(x)[0], p.both(other(x)[1])),
    "& chunks": lambda x, p: (documents(x)[0] & x, p.both(documents(x)[1])),
    "| dense": lambda x, p: (x | other(x)[0], p.either(other(x)[1])),
    "| chunks": lambda x, p: (documents(x)[0] | x, p.either(documents(x)[1])),
    "with_window": lambda x, p: (x.with_window(2), p.window(1, 1)),
    "with_window of two sides": lambda x, p: (x.with_window((None, 0)), p.window(None, 0)),
    "select_queries by a slice": lambda x, p: (x.select_queries(slice(1, 4)), p.queries(slice(1, 4))),
    "select_queries by indices": lambda x, p: (x.select_queries(ORDER), p.queries(ORDER)),
    "select_keys by a slice": lambda x, p: (x.select_keys(slice(2, 7)), p.keys(slice(2, 7))),
    "select_keys by indices": lambda x, p: (x.select_keys(ORDER), p.keys(ORDER)),
    "select_queries, with_window": lambda x, p: (
        x.select_queries(INDEX).with_window(2), p.queries(INDEX).window(1, 1),
    ),
    "select_keys, select_queries": lambda x, p: (
        x.select_keys(slice(1, 8)).select_queries(INDEX), p.keys(slice(1, 8)).queries(INDEX),
    ),
    "select_heads": lambda x, p: (x.select_heads(slice(0, 2)), p.heads(slice(0, 2))),
    "select_batch": lambda x, p: (x.select_batch([1, 1, 0]), p.rows([1, 1, 0])),
    "expand": lambda x, p: (x.expand(max(2, x.batch)), p.rows(slice(None))),
    "to": lambda x, p: (x.to("cpu"), p),
    "pickle": lambda x, p: (pickle.loads(pickle.dumps(x)), p),
    "deepcopy": lambda x, p: (copy.deepcopy(x), p),
}  # fmt: skip


def agree(layout, seen):
    """Whether a layout answers every question as its dense mask ``Bool[B, H, Q, K]`` does."""
    batch, heads, q_len, kv_len = sizes = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    seen = seen.expand(sizes)
    assert torch.equal(layout.to_dense().expand(sizes), seen)
    assert torch.equal(layout.dense_rows(1, 3).expand(batch, heads, -1, -1), seen[:, :, 1:3])
    assert torch.equal(layout.rows_without_keys().expand(sizes[:3]), ~seen.any(3))
    assert torch.equal(layout.unseen_keys().expand(batch, heads, kv_len), ~seen.any(2))
    grid = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    assert torch.equal(layout.to_mask_mod()(*grid).expand(sizes), seen)
    marks = [["#" if shown else "-" for shown in row] for row in seen[-1, -1].tolist()]
    assert layout.draw(batch=batch - 1, head=heads - 1) == "\n".join(map("".join, marks))
    assert f"{q_len} queries x {kv_len} keys" in layout.describe()
    if layout.to_bands() is None:
        assert layout.max_runs is None
        assert layout.to_blocks(max_runs=None) is None
        assert layout.key_intervals(kv_len) is None
        return
    shown = seen[:, 0]
    active = 1 if layout.active_queries is None else layout.active_queries[..., None].int()
    assert torch.equal(painted(layout) * active, shown.int())
    if isinstance(layout.visibility, StructuredMask) and layout.visibility.sink_lengths is None:
        if layout.to_blocks(max_runs=None) is not None:
            assert torch.equal(painted_in_positions(layout) * active, shown.int())
    else:
        assert torch.equal(layout.to_blocks(max_runs=None), layout.to_bands())
    assert (layout.to_bands(max_runs=1) is None) == (layout.max_runs > 1)
    intervals = layout.key_intervals(kv_len)
    key = torch.arange(kv_len)
    inside = (key >= intervals[..., :1]) & (key < intervals[..., 1:])
    assert torch.equal(inside.sum(2), shown.long())
    assert layout.may_have_fully_masked_rows or shown.any(2).all()
    assert layout.may_have_unseen_keys or shown.any(1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_gives_what_it_makes_of_the_dense_mask(kind, operation):
    layout, want = OPERATIONS[operation](*KINDS[kind])
    agree(layout, want.seen)
    # A dense mask does not tell where its tokens stand, unless it was given positions, which win over documents.
    own = operation == "| dense" or (operation == "| chunks" and kind == "dense with positions")
    tokens = KINDS[kind][1].tokens if own else want.tokens
    whole = kind == "union of other positions" and "select_queries" in operation  # what is left of it would agree
    if tokens is None or whole:
        with pytest.raises(LayoutError, match=r"must be the same in all its parts.*give positions to the rotary"):
            layout.token_positions()
    else:
        assert torch.equal(layout.token_positions().long().expand(tokens.shape), tokens)


REFUSALS = {
    "&": (lambda x: x & MaskLayout.full(3, 9), r"joined with & must fit each other: q_len must be equal, got \d and 3"),
    "|": (
        lambda x: x | MaskLayout.full(3, 9),
        r"joined with \| must fit each other: q_len must be equal, got \d and 3",
    ),
    "with_window": (lambda x: x.with_window(0), r"window .*None: all\) must be an int >= 1, got 0"),
    "select_queries": (
        lambda x: x.select_queries([99]),
        r"index must lie in 0 .. \d, got 99 .. 99; negative numbers do",
    ),
    "select_keys": (
        lambda x: x.select_keys([-10]),
        r"index must lie in 0 .. \d, got -10 .. -10; negative numbers do not",
    ),
    "select_heads": (lambda x: x.select_heads(0), "index must be a slice of heads, got 0"),
    "select_batch": (
        lambda x: x.expand(max(2, x.batch)).select_batch([7]),
        r"index must lie in 0 .. 1, got 7 .. 7; negative numbers do not",
    ),
    "expand": (lambda x: x.expand(max(2, x.batch)).expand(3), r"batch must be 2, .* got 3; only a layout of batch 1"),
    "to": (lambda x: x.to("nowhere"), "device must be a device of torch, such as 'cuda' .*, got 'nowhere'"),
    "draw": (lambda x: x.draw(batch=9), r"batch must lie in 0 .. \d, got 9"),
    "key_intervals": (lambda x: x.key_intervals(0), "max_runs must be an int >= 1, got 0"),
    "to_blocks": (lambda x: x.to_blocks("all"), "max_runs must be an int >= 1, got 'all'"),
    "to_bands": (lambda x: x.to_bands(max_runs=0), "max_runs must be an int >= 1, got 0"),
    "to_dense": (lambda x: x.to_dense("nowhere"), "device must be a device of torch, such as 'cuda' .*, got 'nowhere'"),
    "dense_rows": (lambda x: x.dense_rows(3, 1), "start must be at most stop, got 3 and 1"),
}


@pytest.mark.parametrize("make, text", REFUSALS.values(), ids=REFUSALS.keys())
def test_every_kind_refuses_a_wrong_argument_by_name(make, text):
    for kind, (layout, _) in KINDS.items():
        with pytest.raises(LayoutError) as caught:
            make(layout)
        assert re.search(text, str(caught.value)), (kind, str(caught.value))
