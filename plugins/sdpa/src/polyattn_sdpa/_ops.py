"""Tiles as one differentiable operator.

``fused(q, k, v, ...)`` walks the tiles of a table, or makes one dense call, as a pair of custom ops (forward and
backward) behind one autograd function: a compiler sees a single node whatever the number of tiles, and gradients are
accumulated into whole tensors, not into one zero-filled tensor per slice. Outputs of tiles that share queries are
merged by their log-sum-exp; the backward of each tile gets the output and the log-sum-exp of whole rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype, merge_into, op_or_function, refuse_lse_gradient
from polyattn_sdpa import _diagonals, _kernels
from polyattn_sdpa._runs import tiles_of
from polyattn_sdpa._tiles import mask_of


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    *,
    per_row: bool,
    scale: float,
    upcast: bool,
    lse_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Attention over the tiles of ``table``, or over everything under the additive ``mask``.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        table: CPU int64, a plan ``[M, 8]`` or bands ``[N, 7]``, see ``_runs``; or ``None`` with a mask.
        mask: additive, broadcastable to ``[B, Hq, Q, K]``; or ``None`` with a table.
        per_row: whether bands name batch rows; otherwise each band holds for all of them.
        scale: of the scores.
        upcast: whether the backward casts each tile to FP32; on the CPU only.
        lse_grad: whether gradients may arrive at the LSE.

    Returns:
        Output ``[B, Hq, Q, Dv]`` and LSE ``[B, Hq, Q]``; 0 and ``-inf`` in rows of no band.
    """
    arguments = (q, k, v, table, mask, per_row, scale)
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
        table: Tensor | None,
        mask: Tensor | None,
        per_row: bool,
        scale: float,
        upcast: bool,
        lse_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        output, lse = op_or_function(_forward_op, _forward, q)(q, k, v, table, mask, per_row, scale)
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, table, mask, per_row, scale, upcast, lse_grad = inputs
        ctx.save_for_backward(q, k, v, *output, table, mask)
        ctx.constants = (per_row, scale, upcast)
        ctx.lse_grad = lse_grad
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_lse_gradient("sdpa", grad_lse, prepared=ctx.lse_grad)
        q, k, v, output, lse, table, mask = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 9
        if grad is None:
            grad = torch.zeros_like(output)
        run = op_or_function(_backward_op, _backward, q)
        grads = run(grad, grad_lse, q, k, v, output, lse, table, mask, *ctx.constants)
        return (*grads, *(None,) * 6)


# Function.apply reads the signature at each call, which costs more than the rest of it; this way it is computed once.
_Fused.forward.__signature__ = inspect.signature(_Fused.forward)  # type: ignore[attr-defined]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    per_row: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    high = accumulation_dtype(q.dtype)
    steps, adds = _walk(q, k, table, mask, per_row)
    # Where parts are added, the sum of any number of them is rounded once.
    output = q.new_zeros(_output_shape(q, v), dtype=high if adds else q.dtype).transpose(1, 2)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=high)
    for step in steps:
        if step.diagonal:
            part, part_lse = _diagonals.forward(q[step.queries], step.places(k), step.places(v), scale)
        else:
            part, part_lse = _kernels.forward(q[step.queries], *step.of(k, v), step.mask, step.causal, scale)
        for start, stop in step.blind:
            part[:, :, start:stop], part_lse[:, :, start:stop] = 0.0, -torch.inf
        if step.adds:
            merge_into(output[step.queries], lse[step.queries], part, part_lse)
        else:
            output[step.queries], lse[step.queries] = part, part_lse
    return output.to(q.dtype) if adds else output, lse


_forward_op = torch.library.custom_op("polyattn_sdpa::forward", _forward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
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
    table: Tensor | None,
    mask: Tensor | None,
    per_row: bool,
    scale: float,
    upcast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    high = accumulation_dtype(q.dtype)
    steps, adds = _walk(q, k, table, mask, per_row)
    dq = torch.zeros_like(q, dtype=high if adds else q.dtype)
    dk, dv = torch.zeros_like(k, dtype=high), torch.zeros_like(v, dtype=high)
    for step in steps:
        at = step.queries
        of_lse = None if grad_lse is None else grad_lse[at]
        if step.diagonal:
            into = dq[at], step.places(dk), step.places(dv)
            _diagonals.backward(
                grad[at], of_lse, q[at], step.places(k), step.places(v), output[at], lse[at], scale, into
            )
            continue
        part, *of_keys = _kernels.backward(
            grad[at], of_lse, q[at], *step.of(k, v), output[at], lse[at], step.mask, step.causal, scale, upcast
        )
        if step.adds:
            dq[at].add_(part)
        else:
            dq[at] = part
        for whole, piece in zip((dk, dv), of_keys, strict=True):
            step.add_to(whole, piece)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


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
    table: Tensor | None,
    mask: Tensor | None,
    per_row: bool,
    scale: float,
    upcast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """``[B, Q, H, Dv]``: heads lie beside each other, so that the projection behind reads them without a copy."""
    return (q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_Where = tuple[slice, slice, slice]
_ALL = slice(None)


class _Step(NamedTuple):
    """A tile of these tensors.

    Attributes:
        queries: where it lies in q.
        keys: from which to before which key of k and v, in one or several places.
        mask: additive.
        causal: the kernel's own flag.
        blind: rows that the mask hides everything from, where the kernel's LSE means nothing.
        adds: whether an earlier step has computed some of its rows.
        diagonal: whether its i-th query sees the i-th key of each place.
    """

    queries: _Where
    keys: Sequence[tuple[int, int]]
    mask: Tensor | None = None
    causal: bool = False
    blind: Sequence[tuple[int, int]] = ()
    adds: bool = False
    diagonal: bool = False

    def places(self, x: Tensor) -> list[Tensor]:
        """What lies of keys or values in each of its places."""
        return [x[self.queries[0], :, start:stop] for start, stop in self.keys]

    def of(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and values."""
        if len(self.keys) == 1:
            at = (self.queries[0], _ALL, slice(*self.keys[0]))
            return k[at], v[at]
        return torch.cat(self.places(k), 2), torch.cat(self.places(v), 2)

    def add_to(self, whole: Tensor, piece: Tensor) -> None:
        """Add the gradient of its keys to that of all."""
        sizes = [stop - start for start, stop in self.keys]
        for place, part in zip(self.places(whole), piece.split(sizes, 2), strict=True):
            place.add_(part)


def _walk(q: Tensor, k: Tensor, table: Tensor | None, mask: Tensor | None, per_row: bool) -> tuple[list[_Step], bool]:
    """The steps of a table, or the one of a dense mask, and whether any adds to what another has computed."""
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return [], False  # an empty size kills the raw op
    if table is None:
        return [_Step((_ALL, _ALL, _ALL), ((0, k.shape[2]),), mask)], False
    masks: dict[object, Tensor | None] = {(): None}
    found, adds = [], False
    for tile in tiles_of(table):
        rows = slice(tile.batch, tile.batch + 1) if per_row else _ALL
        key = tile.pattern and (tile.q_stop - tile.q_start, tile.width, tile.pattern)
        if key not in masks:
            masks[key] = mask_of(tile, q.dtype, q.device)
        at_q = (rows, _ALL, slice(tile.q_start, tile.q_stop))
        found.append(_Step(at_q, tile.keys, masks[key], tile.causal, tile.blind, tile.adds, tile.diagonal))
        adds = adds or tile.adds
    return found, adds
