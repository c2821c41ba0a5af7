"""The algorithm as custom ops: a compiler sees one node, whatever the number of blocks and chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype
from polyattn_online_softmax import _algorithm

online_softmax = torch.library.custom_op("polyattn_online_softmax::forward", _algorithm.forward, mutates_args=())
_backward = torch.library.custom_op("polyattn_online_softmax::backward", _algorithm.backward, mutates_args=())


@online_softmax.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, per_row: bool, window: int, scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    output = q.new_empty((*q.shape[:3], v.shape[3]))
    return output, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: Tensor,
    per_row: bool,
    window: int,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *output, blocks)


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, grad_lse, *ctx.saved_tensors, *ctx.constants)
    return (*grads, *(None,) * 5)


online_softmax.register_autograd(_differentiate, setup_context=_save)
