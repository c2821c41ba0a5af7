"""``polyattn_fa2.cu_seqlens``: a layout as one varlen call where one says exactly the same, else why none does."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fa_stand_in import Calls, flash_attn, torch_varlen
from polyattn import LayoutError, MaskLayout, StructuredMask, attention
from polyattn_fa2 import cu_seqlens
from random_layouts import random_layout, random_structure

EXACT = {
    "full": (MaskLayout.full(5), [0, 5], [0, 5], False, (-1, -1)),
    "full, other lengths": (MaskLayout.full(3, 7), [0, 3], [0, 7], False, (-1, -1)),
    "causal": (MaskLayout.causal(5), [0, 5], [0, 5], True, (-1, 0)),
    "causal, more keys": (MaskLayout.causal(2, 7), [0, 2], [0, 7], True, (-1, 0)),
    "a window that hides the first keys": (MaskLayout.causal(2, 9, window=3), [0, 2], [0, 9], True, (2, 0)),
    "several rows": (MaskLayout.causal(4, 6).expand(3), [0, 4, 8, 12], [0, 6, 12, 18], True, (-1, 0)),
    "window both ways": (MaskLayout.full(6).with_window(2), [0, 6], [0, 6], False, (1, 1)),
    "window of two sides": (MaskLayout.full(6).with_window((3, 1)), [0, 6], [0, 6], False, (3, 1)),
    "window ahead": (MaskLayout.full(4).with_window((None, 1)), [0, 4], [0, 4], False, (-1, 1)),
    "window behind": (MaskLayout.full(9, 5).with_window((2, None)), [0, 9], [0, 5], False, (2, -1)),
    "documents": (MaskLayout.packed([3, 1, 2]), [0, 3, 4, 6], [0, 3, 4, 6], True, (-1, 0)),
    "documents both ways": (MaskLayout.packed([3, 2], causal=False), [0, 3, 5], [0, 3, 5], False, (-1, -1)),
    "documents, short and long ones": (
        MaskLayout.packed([1, 2, 9], causal=False, window=(2, 1)),
        *([0, 1, 3, 12], [0, 1, 3, 12], False, (2, 1)),
    ),
    "documents of several rows": (MaskLayout.packed([[3, 1], [2, 2]], window=2), *[[0, 3, 4, 6, 8]] * 2, True, (1, 0)),
    "the last queries of documents": (
        MaskLayout.packed([4, 5]).select_queries([2, 3, 8]),
        *([0, 2, 3], [0, 4, 9], True, (-1, 0)),
    ),
    "chunks": (MaskLayout.chunked(2, 5), [0, 2, 4, 5], [0, 2, 4, 5], True, (-1, 0)),
    "a prefix of nothing": (MaskLayout.prefix_lm(0, 4), [0, 4], [0, 4], True, (-1, 0)),
    "unions that are documents": (
        MaskLayout.packed([2, 2]) | MaskLayout.packed([2, 1, 1]),
        *([0, 2, 4], [0, 2, 4], True, (-1, 0)),
    ),
}
REFUSED = {
    "dense": (MaskLayout.dense(torch.ones(3, 3).bool()), "it has no blocks: it is a dense mask or a function"),
    "function": (MaskLayout.from_mod(lambda b, h, q, k: q >= k, q_len=3, kv_len=3), "it has no blocks"),
    "heads": (MaskLayout.dense(torch.ones(1, 2, 3, 3).bool()), "it differs by head"),
    "inactive": (MaskLayout.causal(2, active_queries=torch.tensor([[True, False]])), "computes inactive queries too"),
    "tree": (MaskLayout.shared_prefix(2, [2, 2]), "a query sees up to 2 runs of keys, and in a call one"),
    "sink tokens": (MaskLayout.causal(8, window=2, sink_tokens=1), "a query sees up to 2 runs of keys"),
    "prefix": (MaskLayout.prefix_lm(2, 6), "keys of a sequence come before the last ones of the sequence before it"),
    "block causal": (MaskLayout.block_causal(2, 6), "keys of a sequence come before the last ones"),
    "right padding": (
        MaskLayout.padded(lengths=[3], kv_len=5, causal=False),
        r"some keys are seen by no query, .* take them out \(select_keys\)",
    ),
    "left padding": (MaskLayout.padded(lengths=[3], kv_len=5, side="left"), "a query sees nothing"),
    "more queries than keys": (MaskLayout.causal(5, 3), "a query sees nothing, which has the LSE .inf in a call"),
    "queries in the middle": (MaskLayout.causal(6).select_queries(slice(1, 3)), "some keys are seen by no query"),
    "two windows": (
        MaskLayout.packed([3, 3]) | MaskLayout.packed([1, 1, 1, 3], causal=False),
        "its sequences are not all seen under one window",
    ),
    "empty": (MaskLayout.causal(0, 3), "it has 1 batch rows, 0 queries and 3 keys, and none may be 0"),
}


def dense_of(call, layout):
    """What the kernels are documented to show, ``[B, 1, Q, K]``."""
    tokens = layout.batch * torch.tensor([layout.q_len, layout.kv_len])
    seen = torch.zeros(*tokens.tolist(), dtype=torch.bool)
    ends_q, ends_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    left, right = (float("inf") if side < 0 else side for side in call.window_size)
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        seen[q0:q1, k0:k1] = (distance <= left) & (distance >= -right)
    rows = seen.view(layout.batch, layout.q_len, layout.batch, layout.kv_len)
    assert int(rows.sum()) == sum(int(rows[b, :, b].sum()) for b in range(layout.batch))
    return torch.stack([rows[b, :, b] for b in range(layout.batch)])[:, None]


def run_both(call, layout):
    """The stand-ins of both packages with the call, against the layout on eager."""
    shapes = ((4, layout.q_len), (2, layout.kv_len), (2, layout.kv_len))
    q, k, v = (torch.randn(layout.batch, heads, length, 16).bfloat16() for heads, length in shapes)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    want = attention(q.float(), k.float(), v.float(), layout, backend="eager").output
    offsets = (call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)
    results = [
        flash_attn(Calls())._flash_attn_varlen_forward(*tokens, *offsets, 0.0, 0.25, call.causal, *call.window_size)[0],
        torch_varlen(Calls()).varlen_attn(*tokens, *offsets, scale=0.25, window_size=call.window_size, enable_gqa=True),
    ]
    for found in results:
        rows = found.float().view(layout.batch, layout.q_len, 4, 16).transpose(1, 2)
        torch.testing.assert_close(rows, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", EXACT)
def test_what_one_call_says_is_that_call(name):
    layout, offsets_q, offsets_k, causal, window = EXACT[name]
    call = cu_seqlens(layout)
    assert (call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()) == (offsets_q, offsets_k)
    assert (call.causal, call.window_size) == (causal, window)
    assert call.cu_seqlens_q.dtype is call.cu_seqlens_k.dtype is torch.int32
    assert call.max_seqlen_q == max(b - a for a, b in itertools.pairwise(offsets_q))
    assert torch.equal(dense_of(call, layout), layout.to_dense().expand(layout.batch, 1, -1, -1))
    run_both(call, layout)


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_the_reason(name):
    layout, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=f"layout must be what one varlen call says, got .*: .*{reason}"):
        cu_seqlens(layout)


@pytest.mark.parametrize("seed", range(2))
def test_random_layouts_are_said_exactly_or_refused(seed):
    draw, said = random.Random(seed), 0
    torch.manual_seed(seed)
    for number in range(100):
        length = draw.randint(1, 20)
        layout = random_layout(draw) if number % 2 else random_structure(draw, length, length + number % 3, 2)
        try:
            call = cu_seqlens(layout)
        except LayoutError:
            continue
        said += 1
        assert torch.equal(dense_of(call, layout), layout.to_dense().expand(layout.batch, 1, -1, -1)), layout
        if said % 5 == 0:
            run_both(call, layout)
    assert said > 15


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, (2, 0), (0, 2), (None, 1), (4, None), 50])
def test_packed_rows_of_any_window_are_one_call(causal, window):
    for lengths in ([1], [1, 1, 1], [[2, 2, 1], [5]], [4, 1, 7]):
        layout = MaskLayout.packed(lengths, causal=causal, window=window)
        call = cu_seqlens(layout)
        assert torch.equal(dense_of(call, layout), layout.to_dense().expand(layout.batch, 1, -1, -1))
    run_both(call, layout)


def test_documents_that_only_meet_in_positions_are_refused_rather_than_joined():
    at = torch.tensor([[0, 1, 5, 6]])
    mask = StructuredMask(causal=True, window=2, q_positions=at, kv_positions=at)
    call = cu_seqlens(MaskLayout(4, 4, visibility=mask))
    assert call.cu_seqlens_q.tolist() == [0, 2, 4]
    with pytest.raises(LayoutError, match="varlen call"):
        cu_seqlens(MaskLayout(4, 4, visibility=mask.replace(window=6)))


def test_what_is_no_layout_is_refused():
    with pytest.raises(LayoutError, match="layout must be a MaskLayout, got Tensor"):
        cu_seqlens(torch.ones(3, 3).bool())


def test_the_offsets_lie_where_they_are_asked_for():
    assert cu_seqlens(MaskLayout.causal(3), device="meta").cu_seqlens_k.device.type == "meta"
