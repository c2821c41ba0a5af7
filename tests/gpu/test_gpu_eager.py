"""eager equals transformers' eager attention bit for bit on CUDA, in every dtype that transformers runs in."""

from __future__ import annotations

import types

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout, backends

LAYOUTS = {
    "full": lambda: MaskLayout.full(33),
    "causal": lambda: MaskLayout.causal(200),
    "more_keys": lambda: MaskLayout.causal(4, 11),
    "window": lambda: MaskLayout.causal(40, window=9),
    "packed": lambda: MaskLayout.packed([30, 1, 80]),
    "right_padding": lambda: MaskLayout.padded(lengths=[20, 33], kv_len=33),
}


@pytest.fixture
def qwen3():
    return pytest.importorskip("transformers.models.qwen3.modeling_qwen3")


def with_gradients(run, tensors, grad):
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = run(*leaves)
    return [output, *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_output_and_gradients_are_bit_equal(qwen3, device, name, dtype, kv_heads, dropout):
    layout = LAYOUTS[name]().to(device)
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, length, 16) for heads, length in
              ((6, layout.q_len), (kv_heads, layout.kv_len), (kv_heads, layout.kv_len), (6, layout.q_len))]  # fmt: skip
    *tensors, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    visible = layout.to_dense(device)
    float_mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
    module = types.SimpleNamespace(num_key_value_groups=6 // kv_heads, training=dropout > 0)

    def ours(q, k, v):
        request = AttentionRequest.of(q, k, v, dropout_p=dropout, training=dropout > 0)
        return backends.get("eager").prepare(layout, request)(q, k, v).output

    def theirs(q, k, v):
        output, _ = qwen3.eager_attention_forward(
            module, q, k, v, float_mask, scaling=q.shape[-1] ** -0.5, dropout=dropout
        )
        return output.transpose(1, 2)

    results = []
    for run in (ours, theirs):
        torch.manual_seed(3)
        results.append(with_gradients(run, tensors, grad))
    for what, mine, other in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(mine, other), what
