"""The attention of one tile, forward and backward, with its log-sum-exp.

Two kernels of one shape: torch's fused CPU op, and a portable one in plain matrix products for every other device.
Both take q ``[B, Hq, Q, D]``, k ``[B, Hkv, K, D]``, v ``[B, Hkv, K, Dv]`` of one dtype, none of them empty, every row
seeing at least one key. Gradients of k and v come back in the accumulation dtype: FP32 for half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype, with_lse_column, with_width

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001

#: With fewer keys than a vector has lanes and no mask, the fused forward takes a row of NaN for one that sees nothing.
FEW_KEYS = 16

Grads = tuple[Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, Q, Dv]`` in the input dtype and natural-log LSE ``[B, Hq, Q]`` in the accumulation dtype."""
    if q.device.type != "cpu":
        return _portable_forward(q, k, v, mask, causal, scale)
    width, v_width = max(q.shape[3], v.shape[3]), v.shape[3]
    if mask is None and k.shape[2] < FEW_KEYS:
        mask = q.new_zeros(q.shape[2], k.shape[2])
    # The raw op reads garbage from a last stride other than 1, and wants one width for q, k and v.
    if not (q.shape[3] == v_width and q.stride(3) == k.stride(3) == v.stride(3) == 1):
        q, k, v = with_width(q, width), with_width(k, width), with_width(v, width)
    output, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return output[..., :v_width], lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    upcast: bool = False,
) -> Grads:
    """Gradients into q, k and v from those of the output and, if given, of the LSE; computed in FP32 if ``upcast``."""
    if q.device.type != "cpu":
        return _portable_backward(grad, grad_lse, q, k, v, output, lse, mask, causal, scale)
    if upcast:
        grad, q, k, v, output = (x.float() for x in (grad, q, k, v, output))
        mask = None if mask is None else mask.float()
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    low = accumulation_dtype(q.dtype) is not q.dtype
    if low and group > 1:
        # The fused backward sums a group of query heads in the input dtype; one KV head per query head does not.
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    d, dv = q.shape[3], v.shape[3]
    width = max(d, dv)
    if grad_lse is not None:
        grad, output = with_lse_column(with_width(grad, width), with_width(output, width), grad_lse)
        width += 1
    dq, dk, dvalue = _BACKWARD(
        with_width(grad, width),
        with_width(q, width),
        with_width(k, width),
        with_width(v, width),
        with_width(output, width),
        lse,
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    dq, dk, dvalue = dq[..., :d], dk[..., :d], dvalue[..., :dv]
    if low and group > 1:
        dk, dvalue = (x.unflatten(1, (kv_heads, group)).sum(2, dtype=torch.float32) for x in (dk, dvalue))
    return dq, dk, dvalue


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Final scores ``[B, Hkv, G, Q, K]`` in the accumulation dtype."""
    high = accumulation_dtype(q.dtype)
    grouped = q.to(high).unflatten(1, (k.shape[1], -1))
    scores = torch.matmul(grouped, k.to(high).unsqueeze(2).mT) * scale
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        full = mask.to(high).expand(q.shape[0], q.shape[1], -1, -1) if mask.dim() == 4 else mask.to(high)
        scores = scores + (full.unflatten(1, (k.shape[1], -1)) if mask.dim() == 4 else full)
    return scores


def _portable_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    output = torch.matmul(weights, v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    return output.to(q.dtype), lse.flatten(1, 2)


def _portable_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Grads:
    high, heads = accumulation_dtype(q.dtype), (k.shape[1], -1)
    grad, output = grad.to(high).unflatten(1, heads), output.to(high).unflatten(1, heads)
    weights = torch.exp(_scores(q, k, mask, causal, scale) - lse.unflatten(1, heads).unsqueeze(-1))
    delta = (grad * output).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(high).unflatten(1, heads)
    dscores = weights * (torch.matmul(grad, v.to(high).unsqueeze(2).mT) - delta.unsqueeze(-1)) * scale
    dq = torch.matmul(dscores, k.to(high).unsqueeze(2)).flatten(1, 2)
    dk = torch.matmul(dscores.mT, q.to(high).unflatten(1, heads)).sum(2)
    dv = torch.matmul(weights.mT, grad).sum(2)
    return dq, dk, dv
