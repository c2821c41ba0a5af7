"""Tiles as one differentiable operator.

``fused(q, k, v, ...)`` walks the tiles of a block table, or makes one dense call, as a pair of custom ops (forward and
backward) behind one autograd function: a compiler sees a single node whatever the number of tiles, and gradients are
accumulated into whole tensors, not into one zero-filled tensor per slice.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype, op_or_function, refuse_lse_gradient
from polyattn_sdpa import _kernels
from polyattn_sdpa._tiles import band_mask, tiles_of


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor | None,
    mask: Tensor | None,
    *,
    window: int | None,
    per_row: bool,
    scale: float,
    upcast: bool,
    lse_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Attention over the tiles of ``blocks``, or over everything under the additive ``mask``.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        blocks: CPU int64 ``[N, 7]``, see ``MaskLayout.to_blocks``; or ``None`` with a mask.
        mask: additive, broadcastable to ``[B, Hq, Q, K]``; or ``None`` with blocks.
        window: of the blocks.
        per_row: whether blocks name batch rows; otherwise each block holds for all of them.
        scale: of the scores.
        upcast: whether the backward casts each tile to FP32; on the CPU only.
        lse_grad: whether gradients may arrive at the LSE.

    Returns:
        Output ``[B, Hq, Q, Dv]`` and LSE ``[B, Hq, Q]``; 0 and ``-inf`` in rows of no block.
    """
    arguments = (q, k, v, blocks, mask, -1 if window is None else window, per_row, scale)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        output, lse = _Fused.apply(*arguments, upcast, lse_grad)
        if not (q.requires_grad or k.requires_grad):  # no value has a part in it
            lse = lse.detach()
    else:
        output, lse = op_or_function(_forward_op, _forward, q)(*arguments)
    return output, lse


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor | None,
        mask: Tensor | None,
        window: int,
        per_row: bool,
        scale: float,
        upcast: bool,
        lse_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        output, lse = op_or_function(_forward_op, _forward, q)(q, k, v, blocks, mask, window, per_row, scale)
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, blocks, mask, window, per_row, scale, upcast, lse_grad = inputs
        ctx.save_for_backward(q, k, v, *output, blocks, mask)
        ctx.constants = (window, per_row, scale, upcast)
        ctx.lse_grad = lse_grad
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_lse_gradient("sdpa", grad_lse, prepared=ctx.lse_grad)
        q, k, v, output, lse, blocks, mask = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 10
        if grad is None:
            grad = torch.zeros_like(output)
        run = op_or_function(_backward_op, _backward, q)
        grads = run(grad, grad_lse, q, k, v, output, lse, blocks, mask, *ctx.constants)
        return (*grads, *(None,) * 7)


# Function.apply reads the signature at each call, which costs more than the rest of it; this way it is computed once.
_Fused.forward.__signature__ = inspect.signature(_Fused.forward)  # type: ignore[attr-defined]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor | None,
    mask: Tensor | None,
    window: int,
    per_row: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    output = q.new_zeros(_output_shape(q, v)).transpose(1, 2)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    for at_q, at_k, tile_mask, causal in _walk(q, k, blocks, mask, window, per_row):
        output[at_q], lse[at_q] = _kernels.forward(q[at_q], k[at_k], v[at_k], tile_mask, causal, scale)
    return output, lse


_forward_op = torch.library.custom_op("polyattn_sdpa::forward", _forward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor | None,
    mask: Tensor | None,
    window: int,
    per_row: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    output = q.new_empty(_output_shape(q, v)).transpose(1, 2)
    return output, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: Tensor | None,
    mask: Tensor | None,
    window: int,
    per_row: bool,
    scale: float,
    upcast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    high = accumulation_dtype(q.dtype)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=high), torch.zeros_like(v, dtype=high)
    for at_q, at_k, tile_mask, causal in _walk(q, k, blocks, mask, window, per_row):
        tile_dlse = None if grad_lse is None else grad_lse[at_q]
        tile_dq, tile_dk, tile_dv = _kernels.backward(
            grad[at_q], tile_dlse, q[at_q], k[at_k], v[at_k], output[at_q], lse[at_q], tile_mask, causal, scale, upcast
        )
        dq[at_q] = tile_dq
        dk[at_k] += tile_dk
        dv[at_k] += tile_dv
    return dq, dk.to(k.dtype), dv.to(v.dtype)


_backward_op = torch.library.custom_op("polyattn_sdpa::backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: Tensor | None,
    mask: Tensor | None,
    window: int,
    per_row: bool,
    scale: float,
    upcast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """``[B, Q, H, Dv]``: heads lie beside each other, so that the projection behind reads them without a copy."""
    return (q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_Where = tuple[slice, slice, slice]
_ALL: _Where = (slice(None),) * 3


def _walk(
    q: Tensor, k: Tensor, blocks: Tensor | None, mask: Tensor | None, window: int, per_row: bool
) -> list[tuple[_Where, _Where, Tensor | None, bool]]:
    """Where each tile lies in q and in k, its additive mask, and its causal flag."""
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return []  # an empty size kills the raw op
    if blocks is None:
        return [(_ALL, _ALL, mask, False)]
    limit, heads = None if window < 0 else window, slice(None)
    masks: dict[tuple[int, int, int, bool], Tensor] = {}
    found = []
    for tile in tiles_of(blocks.tolist(), limit):
        rows = slice(tile.batch, tile.batch + 1) if per_row else heads
        mask = None
        if tile.offset is not None:
            key = (tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.offset, tile.block_causal)
            if key not in masks:
                masks[key] = band_mask(tile, limit, q.dtype, q.device)
            mask = masks[key]
        at_q, at_k = (rows, heads, slice(tile.q_start, tile.q_stop)), (rows, heads, slice(tile.k_start, tile.k_stop))
        found.append((at_q, at_k, mask, tile.causal))
    return found
