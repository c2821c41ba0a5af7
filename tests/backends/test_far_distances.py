"""Positions, windows, chunks and prefixes around the ends of int32 and int64, against Python's ints."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout, StructuredMask, attention, backends

EDGES = (0, 1, 5, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**70)


class Drawn(NamedTuple):
    """A mask, and who sees whom in it."""

    layout: MaskLayout
    seen: torch.Tensor


def drawn(seed):
    """Positions in runs that start near an edge on either side of 0, and numbers near other edges."""
    rng = random.Random(seed)
    dtype = rng.choice((torch.int32, torch.int64))
    limit = torch.iinfo(dtype).max

    def near():
        return rng.choice(EDGES) * rng.choice((1, -1)) + rng.randint(-3, 3)

    def places(count):
        start, found = near(), []
        for i in range(count):
            start = near() if rng.random() < 0.1 else start
            found.append(min(max(start + i, -limit - 1), limit))
        return found

    q, k = places(rng.randint(1, 4)), places(rng.randint(1, 6))
    causal = rng.random() < 0.5
    window = rng.choice((None, max(1, abs(near()))))
    chunk = rng.choice((None, None, max(1, abs(near()))))
    prefix = min(abs(near()), 2**63 - 1) if causal and rng.random() < 0.3 else None

    def sees(i, j):
        # A window beyond the dtype of positions hides nothing.
        near_enough = window is None or window > limit or abs(i - j) < window
        before = not causal or j <= i or (prefix is not None and j < prefix)
        return near_enough and before and (chunk is None or i // chunk == j // chunk)

    mask = StructuredMask(
        causal=causal,
        window=window,
        chunk_size=chunk,
        q_positions=torch.tensor([q], dtype=dtype),
        kv_positions=torch.tensor([k], dtype=dtype),
        prefix_lengths=None if prefix is None else torch.tensor([prefix]),
    )
    seen = torch.tensor([[sees(i, j) for j in k] for i in q])
    return Drawn(MaskLayout(len(q), len(k), visibility=mask), seen)


@pytest.mark.parametrize("start", range(0, 1000, 250))
def test_every_form_of_a_mask_counts_as_python_does(start):
    lowered = 0
    for seed in range(start, start + 250):
        layout, seen = drawn(seed)
        assert torch.equal(layout.to_dense()[0, 0], seen), seed
        index = torch.arange(layout.q_len, dtype=torch.int32)[:, None], torch.arange(layout.kv_len, dtype=torch.int32)
        first = torch.zeros(1, 1, dtype=torch.int32)
        by_element = layout.to_mask_mod()(first, first, *torch.broadcast_tensors(*index))
        assert torch.equal(by_element.expand_as(seen), seen), seed
        intervals = layout.key_intervals()
        if intervals is not None:
            start_key, stop_key = intervals[0].unbind(-1)
            assert torch.equal((index[1] >= start_key) & (index[1] < stop_key), seen), seed
            lowered += 1
    assert lowered > 100


def test_sdpa_sees_what_the_layout_shows():
    for seed in range(300):
        layout, seen = drawn(seed)
        q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (layout.q_len, layout.kv_len, layout.kv_len))
        found = attention(q, k, v, layout, backend="sdpa").output
        want = attention(q, k, v, MaskLayout.dense(seen), backend="eager").output
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9, msg=f"seed {seed}")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_window_of_more_than_int32_hides_nothing_and_lets_gradients_through(backend):
    mask = StructuredMask(
        causal=True, window=2**40, q_positions=torch.tensor([[3, 4]]), kv_positions=torch.arange(8)[None]
    )
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (2, 8, 8))
    found = attention(q, k, v, MaskLayout(2, 8, visibility=mask), backend=backend).output
    want = attention(q, k, v, MaskLayout.causal(8).select_queries([3, 4]), backend="eager").output
    torch.testing.assert_close(found, want)
    grads = [torch.autograd.grad(output.sum(), (q, k, v)) for output in (found, want)]
    torch.testing.assert_close(*grads)


def test_the_mask_that_flex_attention_compiles_counts_as_python_does():
    flex = backends.resolve("flex_attention")
    for seed in range(100):
        layout, seen = drawn(seed)
        q, k = (torch.zeros(1, 1, n, 4) for n in (layout.q_len, layout.kv_len))
        plan = flex.plan(layout, AttentionRequest.of(q, k, k))
        if plan.ranges is None:
            assert torch.equal(plan.dense[0, 0], seen)
        else:
            keys = torch.arange(layout.kv_len)
            ends = [x[0][:, None] for x in plan.ranges]
            runs = [(keys >= start) & (keys < stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
            assert torch.equal(torch.stack(runs).any(0), seen)
