"""What correct attention is: the plain formulas, evaluated in FP64.

The order is scale, softcap, bias, mask, softmax, and last the sinks. Rows that see nothing give exactly 0, LSE ``-inf``
and zero gradients; a key that no row sees takes no part, whatever it holds. Plain autograd differentiates all of it,
to any order.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in FP64, whatever the dtype of the inputs.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``; query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: ``[B, Hkv, K, Dv]``.
        visible: Bool, broadcastable to ``[B, Hq, Q, K]``; True = may attend.
        scale: factor of the scores; ``None`` means ``D ** -0.5``.
        softcap: ``c`` in ``c * tanh(scores / c)``.
        bias: floating, broadcastable to ``[B, Hq, Q, K]``; ``-inf`` blocks.
        sinks: floating ``[Hq]``; the output is multiplied by ``sigmoid(lse - sink)``.

    Returns:
        The output, FP64 ``[B, Hq, Q, Dv]``, and the natural-log LSE without sinks, FP64 ``[B, Hq, Q]``.
    """
    q, k, v = q.double(), k.double(), v.double()
    bias, sinks = _double(bias), _double(sinks)
    return plain_attention(q, k, v, visible, scale=scale, softcap=softcap, bias=bias, sinks=sinks)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same formulas in the dtype of q: what rounding alone does to them.

    Both matrix products are in that dtype, the softmax in FP32 (FP64 for FP64). Arguments and results are those of
    :func:`reference_attention`, in that dtype and (LSE) that of the softmax.
    """
    step = softmax_step(q, k, v, visible, scale=scale, softcap=softcap, bias=bias)
    output = torch.einsum("bhqk,bhkd->bhqd", step.weights.to(q.dtype), step.v)
    if sinks is not None:
        output = (output * torch.sigmoid(step.lse - sinks.unsqueeze(-1)).unsqueeze(-1)).to(q.dtype)
    return torch.where(step.live.unsqueeze(-1), output, 0), torch.where(step.live, step.lse, -torch.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxStep:
    """Everything up to the attention weights.

    Attributes:
        q: ``[B, Hq, Q, D]``, 0 in rows that see nothing.
        k: ``[B, Hq, K, D]``, repeated for its query heads, 0 where no row of the head sees the key.
        v: ``[B, Hq, K, Dv]``, likewise.
        visible: ``Bool[B, Hq, Q, K]``, blocked by the bias included.
        live: ``Bool[B, Hq, Q]``: rows that see something.
        scores: ``[B, Hq, Q, K]``, final, ``-inf`` where invisible, finite in rows that see nothing.
        lse: ``[B, Hq, Q]``, finite in rows that see nothing (unless there are no keys).
        weights: ``[B, Hq, Q, K]``, 0 where invisible.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    live: Tensor
    scores: Tensor
    lse: Tensor
    weights: Tensor


def softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> SoftmaxStep:
    """The attention weights and what leads to them; arguments as in :func:`reference_attention`."""
    visible = visible.expand(*q.shape[:3], k.shape[2])
    if bias is not None:
        visible = visible & (bias.detach() != -torch.inf)
    live, seen = visible.any(-1), visible.any(-2)
    group = q.shape[1] // k.shape[1]
    q = torch.where(live.unsqueeze(-1), q, 0)
    k, v = (torch.where(seen.unsqueeze(-1), x.repeat_interleave(group, 1), 0) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.where(visible, bias, 0)
    # A row that sees nothing keeps finite scores, so that its derivatives are zeros and not NaNs.
    scores = torch.where(visible | ~live.unsqueeze(-1), scores, -torch.inf)
    # Relative to the largest score: scores may be so large that adding the logarithm of their number changes nothing.
    top = scores.detach().amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(())
    terms = torch.exp(scores - top)
    total = terms.sum(-1, keepdim=True)
    weights = torch.where(visible, terms / total, 0)
    lse = (torch.log(total) + top).squeeze(-1)
    return SoftmaxStep(q, k, v, visible, live, scores, lse, weights)


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()
