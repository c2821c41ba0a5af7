"""What authors of kernels share: plain functions on tensors, differentiable, on every device, traced by a compiler.

Shapes are those of ``attend``: q ``[B, Hq, Q, D]``, k ``[B, Hkv, K, D]``, v ``[B, Hkv, K, Dv]``, output
``[B, Hq, Q, Dv]`` and LSE ``[B, Hq, Q]``. A *fully masked row* is a query that sees no key (``rows``,
``Bool[B|1, Hq|1, Q, 1]``), an *unseen key* one that no query sees (``keys``, ``Bool[B|1, Hkv|1, K, 1]``). Neither may
reach a kernel, since their NaN passes through products with zero::

    rows, keys = fully_masked_rows(layout, request), unseen_keys(layout, request)  # in plan
    q, k, v = shut_out(q, k, v, rows, keys)  # in attend
    output, lse = my_kernel(q, k, v)
    return finished(output, lse, request, rows=rows, sinks=sinks)

``docs/plugin-authors.md`` walks through a backend that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from polyattn._backend import AttentionResult
from polyattn._boundary import check_layout_type
from polyattn._derivatives import transforming
from polyattn._errors import AttentionInputError
from polyattn._features import features_of, missing_abilities
from polyattn._layout import MaskLayout
from polyattn._layout.cached import CachedMask
from polyattn._layout.selected import SelectedMask
from polyattn._reasons import DTYPES
from polyattn._request import AttentionRequest
from polyattn._tensors import FLOATING, accumulation_dtype, autocast_dtype

__all__ = [
    "DTYPES",
    "FLOATING",
    "CachedMask",
    "SelectedMask",
    "accumulation_dtype",
    "apply_sinks",
    "autocast_dtype",
    "check_layout_type",
    "features_of",
    "finished",
    "fully_masked_rows",
    "hidden_in_blocks",
    "merge_into",
    "missing_abilities",
    "of_kv_heads",
    "op_or_function",
    "put_back",
    "refuse_lse_gradient",
    "shut_out",
    "transforming",
    "unseen_keys",
    "with_lse_column",
    "with_width",
    "without",
]

_T = TypeVar("_T")
_L = TypeVar("_L", Tensor, Tensor | None)


def fully_masked_rows(layout: MaskLayout, request: AttentionRequest) -> Tensor | None:
    """``Bool[B|1, H|1, Q, 1]`` on the request's device, True for a query that sees no key, or ``None``."""
    return layout.rows_without_keys(request.device).unsqueeze(-1) if layout.may_have_fully_masked_rows else None


def unseen_keys(layout: MaskLayout, request: AttentionRequest) -> Tensor | None:
    """``Bool[B|1, Hkv|1, K, 1]`` on the request's device, True for a key that no query sees, or ``None``."""
    if not layout.may_have_unseen_keys:
        return None
    return of_kv_heads(layout.unseen_keys(request.device), request.kv_heads).unsqueeze(-1)


def hidden_in_blocks(layout: MaskLayout, request: AttentionRequest) -> tuple[Tensor | None, Tensor | None]:
    """Fully masked rows and unseen keys for a kernel that walks ``layout.to_bands()``, which is not ``None``.

    Rows and keys of no block never reach such a kernel. Only inactive queries between active ones may lie in a block,
    and keys that only they would see.
    """
    blocks = None if layout.active_queries is None else layout.to_bands()
    if blocks is None:
        return None, None
    tracing = torch.compiler.is_compiling()
    rows = layout.rows_without_keys(request.device if tracing else "cpu")
    one_run = not tracing and layout.max_runs == 1
    if one_run and int((~rows).sum()) == int((blocks[:, 2] - blocks[:, 1]).sum()):
        return None, None
    return rows.to(request.device).unsqueeze(-1), unseen_keys(layout, request)


def of_kv_heads(hidden: Tensor, kv_heads: int) -> Tensor:
    """Keys hidden from all query heads of a group, ``Bool[B|1, Hkv|1, K]``, from ``Bool[B|1, Hq|1, K]``."""
    return hidden if hidden.shape[1] == 1 else hidden.unflatten(1, (kv_heads, -1)).all(2)


def without(x: Tensor, hidden: Tensor | None) -> Tensor:
    """``x`` with 0, and a gradient of 0, where ``hidden`` (Bool, broadcastable to ``x``) is True; ``None``: ``x``."""
    return x if hidden is None else torch.where(hidden, 0.0, x)


def shut_out(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for a kernel: 0 in fully masked ``rows`` and in unseen ``keys``, whose gradients are exactly 0."""
    if keys is not None:
        k, v = torch.where(keys, 0.0, k), torch.where(keys, 0.0, v)
    return q if rows is None else torch.where(rows, 0.0, q), k, v


def put_back(output: Tensor, lse: _L, rows: Tensor | None) -> tuple[Tensor, _L]:
    """Output 0 and LSE ``-inf`` in fully masked ``rows``, whatever a kernel wrote there."""
    if rows is None:
        return output, lse
    return torch.where(rows, 0.0, output), None if lse is None else torch.where(rows.squeeze(-1), -torch.inf, lse)


def merge_into(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge what a kernel gave over some keys into what others have given to the same rows, in place.

    Rows may have seen nothing in either. It has no derivative: it is for the inside of a kernel's own operator, whose
    backward gives each part the output and the LSE of whole rows. ``polyattn.merge`` is differentiable.

    Args:
        output: ``[..., Dv]``, in the dtype of the sum.
        lse: ``[...]``, ``-inf`` where nothing was seen.
        part: like ``output``, in any dtype.
        part_lse: like ``lse``.
    """
    total = torch.logaddexp(lse, part_lse)
    share = torch.exp(part_lse - total.clamp(min=torch.finfo(total.dtype).min))
    output.lerp_(part.to(output.dtype), share.unsqueeze(-1))
    lse.copy_(total)


def finished(
    output: Tensor,
    lse: Tensor | None,
    request: AttentionRequest,
    *,
    rows: Tensor | None = None,
    sinks: Tensor | None = None,
) -> AttentionResult:
    """What ``attend`` returns, from what a kernel computed: rows put back, sinks applied, the LSE if it is asked for.

    Args:
        output: without sinks.
        lse: in the accumulation dtype; needed for sinks and where the request has ``needs_lse``.
        request: of the prepared attention.
        rows: fully masked rows; ``None``: the kernel has written 0 and ``-inf`` itself.
        sinks: floating ``[Hq]``.

    Raises:
        AttentionInputError: the LSE is needed, and ``lse`` is ``None``.
    """
    if rows is not None:
        output, lse = put_back(output, lse, rows)
    if lse is None and (request.needs_lse or sinks is not None):
        raise AttentionInputError("lse must be [B, Hq, Q] where the request needs it or sinks are given, got None")
    if sinks is not None and lse is not None:
        output = apply_sinks(output, lse, sinks)
    return AttentionResult(output, lse if request.needs_lse else None)


def apply_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output of attention with one extra logit per head that takes part in the softmax and carries no value.

    The softmax' denominator grows by ``exp(sink)``, which scales the output by ``sigmoid(lse - sink)``.

    Args:
        output: ``[B, Hq, Q, Dv]`` without sinks.
        lse: ``[B, Hq, Q]`` of the same scores, differentiable where gradients are wanted; sinks excluded.
        sinks: floating ``[Hq]``.

    Returns:
        ``[B, Hq, Q, Dv]`` in the dtype of ``output``; exactly 0, with zero gradients, where ``lse`` is ``-inf``.
    """
    given = {"output": output, "lse": lse, "sinks": sinks}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            hint = "; run the attention with return_lse=True" if name == "lse" else ""
            raise AttentionInputError(f"{name} must be a tensor, got {type(x).__name__}{hint}")
    fits = output.dim() == 4 and lse.shape == output.shape[:3] and sinks.shape == output.shape[1:2]
    if not fits or not output.device == lse.device == sinks.device:
        shapes = ", ".join(f"{name} {tuple(x.shape)} on {x.device}" for name, x in given.items())
        raise AttentionInputError(
            f"output, lse and sinks must be [B, Hq, Q, Dv], [B, Hq, Q] and [Hq] on one device, got {shapes}"
        )
    masked = lse == -torch.inf
    gate = torch.sigmoid(torch.where(masked, 0.0, lse) - sinks.to(lse.dtype)[:, None])
    scaled = output.to(lse.dtype) * gate.unsqueeze(-1)
    return torch.where(masked.unsqueeze(-1), 0.0, scaled).to(output.dtype)


def refuse_lse_gradient(backend: str, grad_lse: Tensor | None, *, prepared: bool) -> None:
    """Raise in the backward of a kernel where a gradient reaches an LSE that was made without one.

    A compiler asks for the gradient of every output it returns, so that nothing is refused there: give the right one.

    Args:
        backend: its name.
        grad_lse: what ``backward`` got for the LSE, under ``ctx.set_materialize_grads(False)``.
        prepared: whether the request asked for it (``needs_lse_grad``, or sinks, whose gradients pass through the LSE).
    """
    if grad_lse is not None and not prepared and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"backend '{backend}': a gradient reached the LSE, but the request was made with needs_lse_grad=False; "
            "make it with needs_lse_grad=True, or detach the LSE"
        )


def with_lse_column(grad: Tensor, output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """``grad`` and ``output`` for a flash backward that knows no gradient of the LSE.

    Such a kernel forms ``delta = rowsum(grad * output)`` and needs ``delta - grad_lse``: one more column, with 1 in
    ``grad`` and ``-grad_lse`` in ``output``, adds exactly that, while zeros there in v leave the rest as it is. Give q,
    k and v the width of the result (:func:`with_width`) and drop the column of their gradients.

    Args:
        grad: ``[..., X]``, of the output.
        output: ``[..., X]``.
        grad_lse: ``[...]``.
    """
    column = -grad_lse.unsqueeze(-1).to(output.dtype)
    return torch.cat([grad, torch.ones_like(grad[..., :1])], -1), torch.cat([output, column], -1)


def with_width(x: Tensor, width: int) -> Tensor:
    """``x`` (``[..., X]``) with zeros up to ``width`` columns, its last dimension contiguous; ``x`` itself if it is."""
    if x.shape[-1] < width:
        x = functional.pad(x, (0, width - x.shape[-1]))  # keeps an order of dimensions such as channels last
    return x if x.stride(-1) == 1 else x.contiguous()


def op_or_function(op: Callable[..., _T], function: Callable[..., _T], x: Tensor) -> Callable[..., _T]:
    """A custom op where something watches the operators on ``x``, else the function that it was made of.

    A compiler, a dispatch mode or a tensor subclass sees one operator; elsewhere its 40 to 60 microseconds are saved.
    """
    watched = torch.compiler.is_compiling() or type(x) is not Tensor or _get_current_dispatch_mode() is not None
    return op if watched else function
