"""Queries that each see a few keys of their own: elementwise products, where a kernel would multiply whole blocks.

The i-th query sees the i-th key of each of N diagonals, as later steps of a draft's training do. Everything is
computed in the accumulation dtype, a few rows at a time, so that what lies between stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype

#: Rows that are computed at once.
ROWS = 192


def forward(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, Q, Dv]`` and LSE ``[B, Hq, Q]``, both in the accumulation dtype.

    Args:
        q: ``[B, Hq, Q, D]``.
        keys: N of ``[B, Hkv, Q, D]``.
        values: N of ``[B, Hkv, Q, Dv]``.
        scale: of the scores.
    """
    high = accumulation_dtype(q.dtype)
    output = q.new_empty((*q.shape[:3], values[0].shape[3]), dtype=high)
    lse = q.new_empty(q.shape[:3], dtype=high)
    heads = (keys[0].shape[1], -1)
    by_group, output_by_group, lse_by_group = (x.unflatten(1, heads) for x in (q, output, lse))
    for rows in _pieces(q):
        own = by_group[:, :, :, rows].to(high) * scale
        scores = torch.stack([(own * _grouped(k, rows, high)).sum(-1) for k in keys])
        total = lse_by_group[..., rows] = scores.logsumexp(0)
        part = output_by_group[:, :, :, rows].zero_()
        for weight, v in zip(torch.exp(scores - total).unsqueeze(-1), values, strict=True):
            part.addcmul_(weight, _grouped(v, rows, high))
    return output, lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    output: Tensor,
    lse: Tensor,
    scale: float,
    into: tuple[Tensor, Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Add the gradients into q, keys and values, from those of the output and the LSE of whole rows, to ``into``."""
    high, heads = accumulation_dtype(q.dtype), (keys[0].shape[1], -1)
    delta = (grad.to(high) * output).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    by_group, grad, delta, lse, dq = (x.unflatten(1, heads) for x in (q, grad, delta, lse, into[0]))
    for rows in _pieces(q):
        own, incoming = by_group[:, :, :, rows].to(high) * scale, grad[:, :, :, rows].to(high)
        part = torch.zeros_like(own)
        for k, v, dk, dv in zip(keys, values, *into[1:], strict=True):
            k_rows, v_rows = _grouped(k, rows, high), _grouped(v, rows, high)
            weights = torch.exp((own * k_rows).sum(-1) - lse[..., rows])
            dscores = weights * ((incoming * v_rows).sum(-1) - delta[..., rows])
            part.addcmul_(dscores.unsqueeze(-1), k_rows)
            dk[:, :, rows] += (dscores.unsqueeze(-1) * own).sum(2)
            dv[:, :, rows] += (weights.unsqueeze(-1) * incoming).sum(2)
        dq[:, :, :, rows] += part * scale


def _pieces(q: Tensor) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, q.shape[2], ROWS))


def _grouped(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Keys or values of these rows, ``[B, Hkv, 1, R, D]``."""
    return x[:, :, rows].to(dtype).unsqueeze(2)
