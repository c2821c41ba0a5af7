"""Partial attention over disjoint keys, combined, is attention over all keys."""

import itertools

import pytest
import torch

import polyattn
from polyattn import AttentionInputError, AttentionResult, MaskLayout, apply_sinks, merge
from polyattn_conformance.reference import reference_attention


def tensors(q_len=6, kv_len=10, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 5))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def parts_of(backend, q, k, v, visible, cuts):
    return [
        polyattn.attention(
            q,
            k[:, :, start:stop],
            v[:, :, start:stop],
            MaskLayout.dense(visible[..., start:stop].contiguous()),
            backend=backend,
            return_lse=True,
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def grads(output, lse, live, tensors):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    loss = (output * weights).sum() + torch.where(live, lse, 0.0).sin().sum()
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_merged_parts_equal_the_whole_in_values_and_gradients(backend):
    q, k, v = tensors()
    visible = torch.rand(2, 1, 6, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[0, 0, 1, :4] = False  # fully masked in the first part
    visible[0, 0, 2] = False  # fully masked everywhere
    visible[1, 0, 3, 4:7] = False  # fully masked in the second part
    merged = merge(parts_of(backend, q, k, v, visible, [0, 4, 7, 10]))
    output, lse = reference_attention(q, k, v, visible)
    live = visible.any(-1).expand(2, 4, 6)
    torch.testing.assert_close(merged.output, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-12, atol=1e-12)
    assert (merged.output[0, :, 2] == 0).all()
    assert (merged.lse[0, :, 2] == -torch.inf).all()
    for got, want in zip(
        grads(merged.output, merged.lse, live, (q, k, v)), grads(output, lse, live, (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_sinks_are_applied_after_the_merge():
    q, k, v = tensors()
    visible = torch.ones(1, 1, 6, 10, dtype=torch.bool)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
    merged = merge(parts_of("sdpa", q, k, v, visible, [0, 3, 10]))
    got = apply_sinks(merged.output, merged.lse, sinks)
    want, _ = reference_attention(q, k, v, visible, sinks=sinks)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got.sin().sum(), (q, sinks)), torch.autograd.grad(want.sin().sum(), (q, sinks)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_four_zigzag_parts_of_a_packed_layout_equal_the_whole(backend):
    q, k, v = tensors(q_len=16, kv_len=16)
    layout = MaskLayout.packed([5, 3, 8])
    whole = polyattn.attention(q, k, v, layout, backend=backend, return_lse=True)
    index = torch.arange(16).chunk(8)
    ranks = [torch.cat([index[r], index[7 - r]]) for r in range(4)]
    output = torch.zeros_like(whole.output)
    lse = torch.zeros_like(whole.lse)
    for mine in ranks:
        parts = [
            polyattn.attention(
                q[:, :, mine],
                k[:, :, theirs],
                v[:, :, theirs],
                layout.select_queries(mine).select_keys(theirs),
                backend=backend,
                return_lse=True,
            )
            for theirs in ranks
        ]
        together = merge(parts)
        output = output.index_copy(2, mine, together.output)
        lse = lse.index_copy(2, mine, together.lse)
    torch.testing.assert_close(output, whole.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole.lse, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(output.sin().sum() + lse.sum(), (q, k, v)),
        torch.autograd.grad(whole.output.sin().sum() + whole.lse.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_rows_fully_masked_in_every_part_pass_no_gradient_even_from_nan():
    output = torch.zeros(1, 1, 2, 3, requires_grad=True)
    lse = torch.tensor([[[0.0, -torch.inf]]], requires_grad=True)
    merged = merge([AttentionResult(output, lse), AttentionResult(output, lse)])
    incoming = torch.ones(1, 1, 2, 3)
    incoming[:, :, 1] = torch.nan
    incoming_lse = torch.tensor([[[1.0, torch.nan]]])
    got = torch.autograd.grad((merged.output, merged.lse), (output, lse), (incoming, incoming_lse))
    assert torch.isfinite(got[0]).all()
    assert torch.isfinite(got[1]).all()
    assert (got[0][:, :, 1] == 0).all()
    assert got[1][0, 0, 1] == 0


def test_half_precision_parts_are_weighted_in_float32():
    q, k, v = (x.detach().bfloat16() for x in tensors())
    merged = merge(parts_of("sdpa", q, k, v, torch.ones(1, 1, 6, 10, dtype=torch.bool), [0, 5, 10]))
    assert merged.output.dtype is torch.bfloat16
    assert merged.lse.dtype is torch.float32


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(AttentionInputError, match="at least one AttentionResult, got none"):
        merge([])
    with pytest.raises(AttentionInputError, match="must be a sequence of AttentionResult, got int"):
        merge(3)
    part = AttentionResult(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2))
    with pytest.raises(AttentionInputError, match=r"results\[1\] must be an AttentionResult, got Tensor"):
        merge([part, part.output])
    with pytest.raises(AttentionInputError, match=r"results\[1\].lse must be a tensor, got None; run the part with"):
        merge([part, AttentionResult(part.output)])
    with pytest.raises(AttentionInputError, match=r"results\[1\].output is torch.float32 \(1, 1, 4, 3\)"):
        merge([part, AttentionResult(torch.zeros(1, 1, 4, 3), torch.zeros(1, 1, 4))])
    with pytest.raises(AttentionInputError, match=r"results\[0\].lse must be"):
        merge([AttentionResult(part.output, torch.zeros(1, 1, 3))])


def test_sinks_that_do_not_fit_are_refused():
    output, lse = torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5)
    with pytest.raises(AttentionInputError, match="lse must be a tensor, got NoneType; run the attention with return_"):
        apply_sinks(output, None, torch.zeros(4))
    with pytest.raises(AttentionInputError, match=r"\[B, Hq, Q\] and \[Hq\] on one device, got .* sinks \(3,\) on cpu"):
        apply_sinks(output, lse, torch.zeros(3))
