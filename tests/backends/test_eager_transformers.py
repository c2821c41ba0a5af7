"""Outputs and gradients of eager equal transformers' eager attention bit for bit on ordinary rows."""

from __future__ import annotations

import types

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from polyattn import AttentionRequest, MaskLayout, backends

LAYOUTS = {
    "full": lambda: MaskLayout.full(9),
    "causal": lambda: MaskLayout.causal(9),
    "causal_long": lambda: MaskLayout.causal(200),
    "more_keys": lambda: MaskLayout.causal(4, 11),
    "window": lambda: MaskLayout.causal(12, window=4),
    "right_padding": lambda: MaskLayout.padded(torch.tensor([[True] * 6 + [False] * 3, [True] * 9])),
    "packed": lambda: MaskLayout.packed([3, 1, 8]),
    "packed_rows": lambda: MaskLayout.packed([[3, 1, 8], [6, 6]]),
    "per_head": lambda: MaskLayout.dense(torch.rand(1, 6, 8, 10, generator=_seeded(0)) < 0.8),
}
TRANSPOSED = {"contiguous": False, "sequence_first": True}


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def _tensors(layout, dtype, kv_heads, *, width=16, v_width=16, sequence_first=False):
    generator = _seeded(1)

    def normal(*shape):
        x = torch.randn(shape, generator=generator).to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if sequence_first else x

    q = normal(2, 6, layout.q_len, width)
    k = normal(2, kv_heads, layout.kv_len, width)
    v = normal(2, kv_heads, layout.kv_len, v_width)
    return q, k, v, normal(2, 6, layout.q_len, v_width)


def _transformers(q, k, v, float_mask, *, dropout=0.0):
    module = types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=dropout > 0)
    output, _ = eager_attention_forward(module, q, k, v, float_mask, scaling=q.shape[-1] ** -0.5, dropout=dropout)
    return output.transpose(1, 2)


def _eager(q, k, v, layout, *, bias=None, dropout=0.0):
    request = AttentionRequest.of(q, k, v, bias=bias, dropout_p=dropout, training=dropout > 0)
    return backends.get("eager").prepare(layout, request)(q, k, v, bias=bias).output


def _with_gradients(run, *tensors, grad):
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = run(*leaves)
    return [output, *torch.autograd.grad(output, leaves, grad)]


def _float_mask(layout, dtype, lowest):
    return torch.zeros(layout.to_dense().shape, dtype=dtype).masked_fill(~layout.to_dense(), lowest)


def _assert_equal(ours, theirs):
    for name, one, other in zip(("output", "dq", "dk", "dv", "dbias"), ours, theirs, strict=False):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("sequence_first", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_output_and_gradients_are_bit_equal(name, dtype, kv_heads, sequence_first):
    layout = LAYOUTS[name]()
    q, k, v, grad = _tensors(layout, dtype, kv_heads, sequence_first=sequence_first)
    mask = _float_mask(layout, dtype, torch.finfo(dtype).min)
    ours = _with_gradients(lambda q, k, v: _eager(q, k, v, layout), q, k, v, grad=grad)
    theirs = _with_gradients(lambda q, k, v: _transformers(q, k, v, mask), q, k, v, grad=grad)
    _assert_equal(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 6, 9, 9), (1, 6, 9, 9), (2, 1, 9, 9), (2, 1, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "right_padding"])
def test_a_bias_in_the_float_mask_has_a_bit_equal_gradient(name, dtype, shape):
    layout = LAYOUTS[name]()
    q, k, v, grad = _tensors(layout, dtype, 3)
    bias = torch.randn(shape, generator=_seeded(2)).to(dtype)
    blocked = torch.rand(shape, generator=_seeded(3)) < 0.2
    blocked[..., 0] = False
    bias = bias.masked_fill(blocked, -torch.inf)
    mask = _float_mask(layout, dtype, -torch.inf)
    ours = _with_gradients(lambda q, k, v, b: _eager(q, k, v, layout, bias=b), q, k, v, bias, grad=grad)
    theirs = _with_gradients(lambda q, k, v, b: _transformers(q, k, v, b + mask), q, k, v, bias, grad=grad)
    _assert_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "packed"])
def test_dropout_with_the_same_seed_is_bit_equal(name, dtype):
    layout = LAYOUTS[name]()
    q, k, v, grad = _tensors(layout, dtype, 3)
    mask = _float_mask(layout, dtype, torch.finfo(dtype).min)
    results = []
    for run in (
        lambda q, k, v: _eager(q, k, v, layout, dropout=0.3),
        lambda q, k, v: _transformers(q, k, v, mask, dropout=0.3),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            results.append(_with_gradients(run, q, k, v, grad=grad))
    _assert_equal(*results)


@pytest.mark.parametrize("widths", [(16, 8), (8, 24)], ids=str)
def test_unequal_widths_are_bit_equal(widths):
    layout = LAYOUTS["causal"]()
    q, k, v, grad = _tensors(layout, torch.float32, 3, width=widths[0], v_width=widths[1])
    mask = _float_mask(layout, torch.float32, -torch.inf)
    ours = _with_gradients(lambda q, k, v: _eager(q, k, v, layout), q, k, v, grad=grad)
    _assert_equal(ours, _with_gradients(lambda q, k, v: _transformers(q, k, v, mask), q, k, v, grad=grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beside_a_fully_masked_one_are_bit_equal(dtype):
    visible = torch.ones(9, 9).tril().bool()
    visible[4] = False
    layout = MaskLayout.dense(visible)
    q, k, v, grad = _tensors(layout, dtype, 3)
    grad[:, :, 4] = 0
    mask = _float_mask(layout, dtype, torch.finfo(dtype).min)
    ours = _with_gradients(lambda q, k, v: _eager(q, k, v, layout), q, k, v, grad=grad)
    theirs = _with_gradients(lambda q, k, v: _transformers(q, k, v, mask), q, k, v, grad=grad)
    live = torch.arange(9) != 4
    assert torch.equal(ours[0][:, :, live], theirs[0][:, :, live])
    assert not ours[0][:, :, 4].any()
    _assert_equal(ours[1:], theirs[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_is_bit_equal(dtype):
    layout = LAYOUTS["causal"]()
    q, k, v, grad = (x.cuda() for x in _tensors(layout, dtype, 3))
    mask = _float_mask(layout, dtype, torch.finfo(dtype).min).cuda()
    ours = _with_gradients(lambda q, k, v: _eager(q, k, v, layout), q, k, v, grad=grad)
    _assert_equal(ours, _with_gradients(lambda q, k, v: _transformers(q, k, v, mask), q, k, v, grad=grad))
