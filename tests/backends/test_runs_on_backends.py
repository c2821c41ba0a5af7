"""Layouts of several runs on eager, sdpa, flex_attention and fa, against plain FP64 attention under the dense mask."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from fa_stand_in import stand_in
from polyattn import AttentionRequest, MaskLayout, attention, backends
from random_layouts import random_layout


def reference(q, k, v, seen):
    """Output and LSE, 0 and ``-inf`` in rows that see nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    dead = ~seen.any(-1, keepdim=True)
    scores = torch.where(dead, 0.0, (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf))
    lse = torch.where(dead[..., 0], -torch.inf, torch.logsumexp(scores, -1))
    return torch.where(dead, 0.0, torch.softmax(scores, -1) @ v), lse


def compare(layout, draw, backend, dtype, bound):
    """Values, LSE and all gradients of one layout."""
    batch = layout.batch if layout.batch > 1 else draw.choice((1, 2))
    heads, kv_heads = draw.choice(((2, 2), (4, 2), (3, 1)))
    shapes = ((heads, layout.q_len), (kv_heads, layout.kv_len), (kv_heads, layout.kv_len))
    given = [torch.randn(batch, *shape, 8, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in given]
    seen = layout.to_dense().expand(batch, 1, -1, -1)
    want, want_lse = reference(*wide, seen)
    found = attention(*given, layout, backend=backend, return_lse=True)
    assert torch.equal(found.lse.isneginf(), want_lse.isneginf()), layout
    live = ~want_lse.isneginf()
    weights, lse_weights = torch.randn_like(want), torch.randn_like(want_lse)
    sums = [
        (x.double() * weights).sum() + (torch.where(live, lse.double(), 0.0) * lse_weights).sum()
        for x, lse in ((found.output, found.lse), (want, want_lse))
    ]
    pairs = zip(torch.autograd.grad(sums[0], given), torch.autograd.grad(sums[1], wide), strict=True)
    errors = [(found.output.double() - want).abs().max(), *((a.double() - b).abs().max() / 4 for a, b in pairs)]
    if live.any():
        errors.append((found.lse.double() - want_lse)[live].abs().max())
    assert max(errors) < bound, f"{layout}: {max(errors)}"


SIDES = {
    "eager": ("eager", None, torch.float64, 1e-11),
    "sdpa": ("sdpa", None, torch.float64, 1e-11),
    "fa, flash_attn": ("fa", "flash_attn", torch.bfloat16, 0.03),
    "fa, torch_varlen": ("fa", "torch_varlen", torch.bfloat16, 0.03),
}


@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("side", SIDES)
def test_random_layouts_equal_plain_attention(side, count):
    name, provider, dtype, bound = SIDES[side]
    draw, several = random.Random(3), 0
    torch.manual_seed(3)
    with contextlib.nullcontext() if provider is None else stand_in(provider):
        backend = backends.resolve(name, {} if provider is None else {"provider": provider})
        for _ in range(count):
            layout = random_layout(draw)
            if layout.to_bands() is not None:
                several += layout.max_runs > 1
                compare(layout, draw, backend, dtype, bound)
    assert several > count / 8


def test_flex_attention_finds_the_tiles_of_several_runs():
    layout = MaskLayout.causal(300, window=20, sink_tokens=3)
    q = torch.randn(1, 2, 300, 16)
    with torch.no_grad():
        found = attention(q, q, q, layout, backend="flex_attention").output
        want = attention(q, q, q, layout, backend="eager").output
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    prepared = backends.get("flex_attention").prepare(layout, AttentionRequest.of(q, q, q))
    assert len(prepared.state.ranges) == 4
    assert "up to 2 runs of keys for a query" in prepared.backend.describe(prepared)


def test_fa_says_how_many_runs_it_merges():
    layout = MaskLayout.shared_prefix(4, [2, 3])
    q = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    with stand_in("flash_attn"):
        prepared = backends.resolve("fa", {"provider": "flash_attn"}).prepare(layout, AttentionRequest.of(q, q, q))
        assert "merged over 2 runs of keys" in prepared.backend.describe(prepared)


@pytest.mark.parametrize("window", [1, pytest.param(2, marks=pytest.mark.nightly), 6])
@pytest.mark.parametrize(
    "layout",
    [MaskLayout.causal(12).select_queries(slice(6, 12)).select_keys(slice(0, 3)), MaskLayout.packed([5, 7])],
    ids=["keys far behind", "documents"],
)
def test_fa_honours_a_window_that_is_applied_inside_a_graph(layout, window):
    """No value of the table is read there: blocks that the window empties stay in it."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.bfloat16) for n in (layout.q_len, layout.kv_len, layout.kv_len))
    want, _ = reference(q.double(), k.double(), v.double(), layout.with_window(window).to_dense())
    with stand_in("flash_attn"):
        backend = backends.resolve("fa", {"provider": "flash_attn"})
        windowed = torch.compile(
            lambda q, k, v, layout: attention(q, k, v, layout.with_window(window), backend=backend).output,
            fullgraph=True,
            backend="eager",
        )
        torch.testing.assert_close(windowed(q, k, v, layout).double(), want, rtol=0, atol=0.03)
