"""What only real kernels can show of fa: equality with direct calls, autocast, dropout, refusals on a GPU machine."""

from __future__ import annotations

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout, UnsupportedAttentionError, attention
from polyattn_fa2 import FlashBackend, FlashOptions

DOCUMENTS = [100, 1, 155]
LENGTH = sum(DOCUMENTS)


@pytest.fixture(params=["flash_attn", "torch_varlen"])
def fa(request, device):
    backend = FlashBackend(FlashOptions(provider=request.param))
    reasons = backend.device_reasons(device)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    return backend


@pytest.fixture
def flash_attn(device):
    reasons = FlashBackend(FlashOptions(provider="flash_attn")).device_reasons(device)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    return pytest.importorskip("flash_attn")


def qkv(device, dtype=torch.bfloat16, heads=4, kv_heads=2, width=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, LENGTH, width) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def tokens(x):
    return x.transpose(1, 2)[0]


def test_documents_equal_a_direct_call_of_flash_attn_varlen_func(flash_attn, device):
    offsets = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0)], dtype=torch.int32, device=device)
    longest = max(DOCUMENTS)
    q, k, v = qkv(device)
    ours = attention(q, k, v, MaskLayout.packed(DOCUMENTS).to(device), backend=FlashBackend(FlashOptions("flash_attn")))
    theirs = flash_attn.flash_attn_varlen_func(
        *map(tokens, (q, k, v)), offsets, offsets, longest, longest, causal=True, deterministic=True
    )
    assert torch.equal(tokens(ours.output), theirs)


@pytest.mark.parametrize("window", [None, 33])
def test_whole_rows_equal_a_direct_call_of_flash_attn_func(flash_attn, device, window):
    q, k, v = qkv(device)
    layout = MaskLayout.causal(LENGTH, window=window)
    backend = FlashBackend(FlashOptions("flash_attn", deterministic=True))
    ours = attention(q, k, v, layout, backend=backend).output
    sides = (-1, -1) if window is None else (window - 1, 0)
    theirs = flash_attn.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, window_size=sides, deterministic=True
    ).transpose(1, 2)
    grad = torch.randn_like(ours)
    assert torch.equal(ours, theirs)
    grads = [torch.autograd.grad(output, (q, k, v), grad) for output in (ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_fp32_runs_under_autocast_and_is_refused_outside(fa, device):
    q, k, v = qkv(device, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = attention(q, k, v, MaskLayout.causal(LENGTH), backend=fa).output
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert q.grad.dtype is torch.float32
    with pytest.raises(UnsupportedAttentionError, match=r"or call under torch\.autocast\('cuda'\)"):
        attention(q, k, v, MaskLayout.causal(LENGTH), backend=fa)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("elsewhere", ["cpu", "meta"])
def test_tensors_elsewhere_are_refused_by_name(fa, elsewhere, autocast):
    q = torch.zeros(1, 2, 4, 8, device=elsewhere)
    with (
        torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(
            UnsupportedAttentionError, match=f"backend 'fa'.*\n.*device: got {elsewhere}, need a cuda device"
        ),
    ):
        attention(q, q, q, MaskLayout.causal(4), backend=fa)


@pytest.mark.parametrize("layout", [MaskLayout.causal(LENGTH), MaskLayout.packed(DOCUMENTS)], ids=["fixed", "packed"])
def test_dropout_has_its_rate_its_seed_and_a_gradient_that_knows_what_it_dropped(flash_attn, device, layout):
    backend = FlashBackend(FlashOptions("flash_attn", deterministic=True))
    q, k, v = qkv(device)
    request = AttentionRequest.of(q, k, v, dropout_p=0.25, training=True, needs_lse=True, needs_lse_grad=True)
    prepared = backend.prepare(layout.to(device), request)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(prepared(q, k, v).output)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    ones = torch.ones_like(v)
    mean = prepared(q, k, ones).output.float().mean().item()
    assert mean == pytest.approx(1.0, abs=0.02)
    # Linear in v: what the backward drops is what the forward dropped.
    torch.manual_seed(1)
    output = prepared(q, k, v).output
    (dv,) = torch.autograd.grad(output, v, output.detach())
    assert (dv.float() * v.float()).sum().item() == pytest.approx(output.float().square().sum().item(), rel=0.02)


def test_what_runs_is_named(fa, device):
    q, k, v = qkv(device)
    prepared = fa.prepare(MaskLayout.causal(LENGTH), AttentionRequest.of(q, k, v))
    prepared(q, k, v)
    assert "flash_attn 2." in fa.describe(prepared) or "FlashAttention-2 inside torch" in fa.describe(prepared)
