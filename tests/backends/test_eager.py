"""The eager backend beyond what the conformance kit asks of everybody."""

from __future__ import annotations

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout, attention, backends
from polyattn.testing import reference_attention


def _normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(q_len=4, kv_len=4, *, heads=2, width=8, dtype=torch.float32):
    return tuple(
        _normal(1, heads, length, width, seed=seed, dtype=dtype) for seed, length in enumerate((q_len, kv_len, kv_len))
    )


def test_a_mask_row_without_keys_is_zero_whatever_its_encoding():
    q, k, v = _qkv()
    visible = torch.ones(4, 4).tril().bool()
    visible[2] = False
    by_mask = attention(q, k, v, MaskLayout.dense(visible), backend="eager", return_lse=True)
    bias = torch.zeros(4, 4).masked_fill(~visible, -torch.inf)
    by_bias = attention(q, k, v, MaskLayout.full(4), backend="eager", bias=bias, return_lse=True)
    for result in (by_mask, by_bias):
        assert not result.output[:, :, 2].any()
        assert result.lse[:, :, 2].isneginf().all()
    assert torch.equal(by_mask.output, by_bias.output)
    assert torch.equal(by_mask.lse, by_bias.lse)


def test_agrees_with_the_math_path_of_torch():
    q, k, v = _qkv(6, 6)
    visible = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    visible[1] = False
    ours = attention(q, k, v, MaskLayout.dense(visible), backend="eager").output
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bias_gradient_of_a_row_killed_by_mask_and_bias_together_is_exactly_zero():
    q, k, v = _qkv()
    bias = torch.zeros(4, 4)
    bias[2, :3] = -torch.inf  # the causal mask hides the last key
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    result = attention(q, k, v, MaskLayout.causal(4), backend="eager", bias=bias, return_lse=True)
    assert not result.output[:, :, 2].any()
    # A NaN that comes back into the fully masked row reaches nothing.
    incoming = torch.ones_like(result.output)
    incoming[:, :, 2] = torch.nan
    grad_lse = torch.ones_like(result.lse)
    grad_lse[:, :, 2] = torch.nan
    gradients = torch.autograd.grad([result.output, result.lse], leaves, [incoming, grad_lse])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 2].any()
    assert not gradients[3][2].any()
    assert gradients[3][3].any()


def test_a_nan_coming_back_into_a_dead_row_does_not_reach_the_sinks():
    q, k, v = _qkv()
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[1] = False
    sinks = torch.zeros(2, requires_grad=True)
    result = attention(q, k, v, MaskLayout.dense(visible), backend="eager", sinks=sinks, return_lse=True)
    incoming = torch.ones_like(result.output)
    incoming[:, :, 1] = torch.nan
    (gradient,) = torch.autograd.grad(result.output, sinks, incoming)
    assert gradient.isfinite().all()
    assert gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_equal_finite_minima_is_live(dtype):
    q, k, v = _qkv(dtype=dtype)
    bias = torch.full((4, 4), torch.finfo(dtype).min, dtype=dtype)
    result = attention(q, k, v, MaskLayout.full(4), backend="eager", bias=bias, return_lse=True)
    mean = v.mean(2, keepdim=True, dtype=torch.float32).expand_as(v)
    torch.testing.assert_close(result.output.float(), mean, rtol=1e-2, atol=1e-2)
    assert result.lse.isfinite().all()


def test_the_minimum_of_fp16_plus_a_negative_score_does_not_overflow_into_a_block():
    q, k, v = _qkv(dtype=torch.float16)
    bias = torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16)
    result = attention(q * 100, k, v, MaskLayout.full(4), backend="eager", bias=bias, return_lse=True)
    assert result.output.isfinite().all()
    assert result.lse.isfinite().all()


def test_a_key_blocked_by_bias_alone_may_hold_nan():
    q, k, v = _qkv()
    k[:, :, 3], v[:, :, 3] = torch.nan, torch.nan
    bias = torch.zeros(4).index_fill(0, torch.tensor([3]), -torch.inf)
    result = attention(q, k, v, MaskLayout.full(4), backend="eager", bias=bias)
    want, _ = reference_attention(q[:, :], k[:, :, :3], v[:, :, :3], torch.ones(4, 3, dtype=torch.bool))
    torch.testing.assert_close(result.output.double(), want, rtol=1e-5, atol=1e-6)


def test_an_fp32_bias_is_added_to_bf16_scores_in_fp32():
    q, k, v = _qkv(dtype=torch.bfloat16)
    bias = _normal(4, 4, seed=7)
    result = attention(q, k, v, MaskLayout.full(4), backend="eager", bias=bias)
    want, _ = reference_attention(q, k, v, torch.ones(4, 4, dtype=torch.bool), bias=bias)
    assert result.output.dtype is torch.bfloat16
    torch.testing.assert_close(result.output.double(), want, rtol=2e-2, atol=2e-2)


def test_layouts_without_fully_masked_rows_and_unseen_keys_pay_for_none():
    q, k, v = _qkv()
    request = AttentionRequest.of(q, k, v)
    eager = backends.get("eager")
    blocked = eager.prepare(MaskLayout.causal(4), request).state.blocked
    assert blocked.rows is None
    assert blocked.keys is None
    padded = MaskLayout.padded(torch.tensor([[False, True, True, False]]))
    blocked = eager.prepare(padded, request).state.blocked
    assert blocked.rows is not None
    assert blocked.keys is not None


def test_the_mask_of_all_heads_is_stored_once():
    q, k, v = _qkv(heads=8)
    state = backends.get("eager").prepare(MaskLayout.causal(4), AttentionRequest.of(q, k, v)).state
    assert state.hidden.shape == (1, 1, 4, 4)


def test_grads_of_every_input_pass_gradgradcheck():
    layout = MaskLayout.dense(torch.tensor([[True, True], [False, False], [True, True]]))
    shapes = ((1, 2, 3, 1), (1, 1, 2, 1), (1, 1, 2, 2), (3, 2), (2,))
    leaves = [_normal(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate(shapes)]

    def run(q, k, v, bias, sinks):
        result = attention(q, k, v, layout, backend="eager", softcap=2.0, bias=bias, sinks=sinks, return_lse=True)
        return result.output, result.lse[:, :, [0, 2]]

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("size", [25.0, 250.0])
def test_fp16_products_that_overflow_before_the_scale_give_the_right_scores(size):
    scale = 128**-0.5 if size < 100 else 1e-4
    q = torch.full((1, 2, 3, 128), size, dtype=torch.float16, requires_grad=True)
    result = attention(q, q, q, MaskLayout.causal(3), backend="eager", scale=scale, return_lse=True)
    assert torch.equal(result.output, q)
    want = size * size * 128 * scale + torch.log(torch.arange(1.0, 4.0))
    torch.testing.assert_close(result.lse, want.expand(1, 2, 3), rtol=2e-3, atol=0.0)
    (grad,) = torch.autograd.grad(result.output.sum(), q)
    assert grad.isfinite().all()


def test_fp16_scores_that_do_not_overflow_keep_their_bits():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 128, generator=generator).half() for _ in range(3))
    weights = torch.softmax(torch.matmul(q, k.mT) * 128**-0.5, -1, dtype=torch.float32).half()
    output = attention(q, k, v, MaskLayout.full(40), backend="eager").output
    assert torch.equal(output, torch.matmul(weights, v))
