"""The kernel calls of a layout as one differentiable operator.

A forward and a backward behind one autograd function; where something watches the operators (a compiler, fake tensors)
each is a custom op. Tensors are gathered into the sequences of each call, results are scattered back into whole
tensors: what lies outside every sequence never meets the kernel, which would leave garbage there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.kernels import op_or_function, refuse_lse_gradient, with_lse_column, with_width
from polyattn_fa2 import providers
from polyattn_fa2._packing import parts, tokens_of, whole
from polyattn_fa2._sequences import Sequences, calls_of
from polyattn_fa2.providers.base import WIDTH_STEP


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is the same for every kernel call of a layout.

    Attributes:
        provider: name of the kernel provider.
        scale: of the scores.
        softcap: 0 means none.
        dropout: probability of dropping a weight.
        deterministic: whether the backward must be.
        lse_grad: whether gradients may arrive at the LSE.
    """

    provider: str
    scale: float
    softcap: float
    dropout: float
    deterministic: bool
    lse_grad: bool


def flash(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, settings: Settings) -> tuple[Tensor, Tensor]:
    """Attention by the calls of ``sequences``.

    Args:
        q: ``[B, Hq, Q, D]``, FP16 or BF16.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        sequences: what to call the kernel with.
        settings: likewise.

    Returns:
        Output ``[B, Hq, Q, Dv]`` and FP32 LSE ``[B, Hq, Q]``; 0 and ``-inf`` in rows of no sequence.
    """
    s, how = sequences, settings
    inputs = (
        q, k, v, s.calls, s.cu_seqlens_q, s.cu_seqlens_k, s.q_rows, s.q_slots, s.k_rows,
        how.provider, how.scale, how.softcap, how.dropout, how.deterministic,
    )  # fmt: skip
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        output, lse, _ = _run_forward(*inputs)
        return output, lse
    output, lse, _ = _Flash.apply(*inputs, how.lse_grad)
    # Without a gradient of q and k it depends on nothing that has one.
    return output, lse if q.requires_grad or k.requires_grad else lse.detach()


def padded_width(head_dim: int, v_head_dim: int) -> int:
    """The one width of q, k and v that the kernels take."""
    return -(-max(head_dim, v_head_dim) // WIDTH_STEP) * WIDTH_STEP


def width_with_lse_gradient(head_dim: int, v_head_dim: int) -> int:
    """The same in a backward through the LSE, which needs one column that no value uses."""
    width = padded_width(head_dim, v_head_dim)
    return width if v_head_dim < width else width + WIDTH_STEP


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _run_forward(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, *sequences = inputs[:9]
        ctx.save_for_backward(q, k, v, *output, *sequences)
        *ctx.constants, ctx.lse_grad = inputs[9:]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        refuse_lse_gradient("fa", grad_lse, prepared=ctx.lse_grad)
        if grad is None and grad_lse is None:
            return (None,) * 15
        q, k, v, output, *others = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(output)
        run = op_or_function(_backward_op, _backward, q)
        grads = run(grad, grad_lse, q, k, v, output, *others, *ctx.constants)
        return (*grads, *(None,) * 12)


def _run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = op_or_function(_forward_op, _forward, inputs[0])
    return run(*inputs)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_rows: Tensor | None,
    q_slots: Tensor | None,
    k_rows: Tensor | None,
    provider: str,
    scale: float,
    softcap: float,
    dropout: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, settings = providers.get(provider), (scale, softcap, dropout, deterministic)
    width, v_width = padded_width(q.shape[3], v.shape[3]), v.shape[3]
    tq, tk, tv = (tokens_of(x, fixed=cu_seqlens_q is None) for x in (q, k, v))
    output = lse = None
    real = calls_of(calls)
    if not any(call.all_queries for call in real):
        dtype = torch.float32 if any(call.part for call in real) else q.dtype
        output = tq.new_zeros((*tq.shape[:2], v_width), dtype=dtype)
        lse = tq.new_full(tq.shape[:2], -torch.inf, dtype=torch.float32)
    rng_states = torch.zeros(len(calls), 2, dtype=torch.int64, device=q.device)
    for i, part in enumerate(parts(real, cu_seqlens_q, cu_seqlens_k, q_rows, q_slots, k_rows, settings)):
        packed, packed_lse, rng_states[i] = kernel.forward(
            with_width(part.queries(tq), width),
            with_width(part.keys(tk), width),
            with_width(part.keys(tv), width),
            part.call,
        )
        # The kernels say +inf where a sum is NaN.
        packed, packed_lse = packed[..., :v_width], torch.where(packed_lse == torch.inf, torch.nan, packed_lse).mT
        if part.later:
            assert output is not None
            assert lse is not None
            part.merge_queries(output, lse, packed, packed_lse)
        else:
            output, lse = part.put_queries(output, packed), part.put_queries(lse, packed_lse)
    assert output is not None
    assert lse is not None
    shape = q.shape[:3]
    return whole(output.to(q.dtype).contiguous(), (*shape, v_width)), whole(lse, shape).contiguous(), rng_states


_forward_op = torch.library.custom_op(
    "polyattn_fa2::forward", _forward, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)


@_forward_op.register_fake
def _(q: Tensor, _: Tensor, v: Tensor, calls: Tensor, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    output = _token_by_token(q, (*q.shape[:3], v.shape[3]))
    return output, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty((calls.shape[0], 2), dtype=torch.int64)


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    rng_states: Tensor,
    calls: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_rows: Tensor | None,
    q_slots: Tensor | None,
    k_rows: Tensor | None,
    provider: str,
    scale: float,
    softcap: float,
    dropout: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, settings = providers.get(provider), (scale, softcap, dropout, deterministic)
    d, dv = q.shape[3], v.shape[3]
    width = padded_width(d, dv) if grad_lse is None else width_with_lse_gradient(d, dv)
    fixed = cu_seqlens_q is None
    tq, tk, tv, tgrad, toutput, tlse = (tokens_of(x, fixed=fixed) for x in (q, k, v, grad, output, lse))
    if grad_lse is not None:
        tgrad, toutput = with_lse_column(tgrad, toutput, tokens_of(grad_lse, fixed=fixed))
    grads: list[Tensor | None] = [None, None, None]
    real = calls_of(calls)
    shared = any(call.shared for call in real)
    if not any(call.all_queries for call in real):
        repeated = any(call.part for call in real)
        grads[0] = torch.zeros_like(tq, dtype=torch.float32 if repeated else q.dtype)
    if not any(call.all_keys for call in real):
        dtype = torch.float32 if shared else q.dtype
        grads[1:] = torch.zeros_like(tk, dtype=dtype), torch.zeros_like(tv, dtype=dtype)
    for i, part in enumerate(parts(real, cu_seqlens_q, cu_seqlens_k, q_rows, q_slots, k_rows, settings)):
        packed = kernel.backward(
            with_width(part.queries(tgrad), width),
            with_width(part.queries(tq), width),
            with_width(part.keys(tk), width),
            with_width(part.keys(tv), width),
            with_width(part.queries(toutput), width),
            part.queries(tlse, torch.inf).mT.contiguous(),
            rng_states[i],
            part.call,
        )
        grads[0] = part.put_queries(grads[0], packed[0][..., :d], add=part.later)
        grads[1] = part.put_keys(grads[1], packed[1][..., :d], shared=shared)
        grads[2] = part.put_keys(grads[2], packed[2][..., :dv], shared=shared)
    dq, dk, dvalue = (
        whole(x.to(q.dtype).contiguous(), like.shape) for x, like in zip(grads, (q, k, v), strict=True) if x is not None
    )
    return dq, dk, dvalue


_backward_op = torch.library.custom_op("polyattn_fa2::backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(_: Tensor, __: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *___: object) -> tuple[Tensor, Tensor, Tensor]:
    return _token_by_token(q, q.shape), _token_by_token(k, k.shape), _token_by_token(v, v.shape)


def _token_by_token(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    b, h, s, x = shape
    return like.new_empty(b, s, h, x).transpose(1, 2)
