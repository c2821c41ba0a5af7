"""Decoding from caches on CUDA: nothing is read on the host, and the numbers are those of the full forward."""

from __future__ import annotations

import contextlib

import pytest
import torch

from polyattn import AttentionScope, GroupedQueryAttention, KVCache, MaskLayout, RopeSpec, UnsupportedAttentionError

ROPE = RopeSpec.from_hf({"model_type": "llama", "head_dim": 64, "max_position_embeddings": 256, "rope_theta": 1e4})


@contextlib.contextmanager
def without_host_reads():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", ["static", "sliding"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "fa", "flex_attention"])
@torch.no_grad()
def test_no_step_reads_the_host_and_all_equal_the_full_forward(device, backend, kind):
    window = 16 if kind == "sliding" else None
    made = {"device": device, "dtype": torch.bfloat16}
    try:
        layer = GroupedQueryAttention(512, 8, 2, 64, rope=ROPE, window=window, backend=backend, **made)
    except UnsupportedAttentionError as error:
        pytest.skip(str(error))
    slots = None if kind == "sliding" else 128
    cache = KVCache(layer.spec, 2, slots, kind=kind, **made)
    hidden = torch.randn(2, 40, 512, **made)
    full = layer(hidden, AttentionScope(MaskLayout.causal(40)), torch.arange(40, device=device)[None])
    for at in range(40):
        one = hidden[:, at : at + 1]
        # The first call compiles and plans; flex_attention finds its tiles anew for each layout.
        quiet = at > 1 and backend != "flex_attention"
        with without_host_reads() if quiet else contextlib.nullcontext():
            got = layer(one, AttentionScope(cache.layout(1)), cache.positions(1), cache=cache)
        torch.testing.assert_close(got, full[:, at : at + 1], atol=3e-2, rtol=3e-2)
