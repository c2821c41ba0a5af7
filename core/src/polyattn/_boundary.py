"""The one validation of layouts and tensors that all backends share: before they prepare, and before they attend."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from polyattn._errors import AttentionInputError, LayoutError, PolyattnError
from polyattn._layout import MaskLayout
from polyattn._request import AttentionRequest
from polyattn._tensors import FLOATING, accumulation_dtype, check_qkv
from polyattn.messages import shown


def check_layout_type(layout: object, name: str = "layout") -> None:
    """Refuse what is not a layout, such as a raw mask, before anything is read off it."""
    if not isinstance(layout, MaskLayout):
        got = shown(layout) if isinstance(layout, str) else type(layout).__name__
        raise LayoutError(
            f"{name} must be a MaskLayout, got {got}; MaskLayout.causal(length), MaskLayout.packed(lengths) and others "
            "make one, of a boolean mask MaskLayout.dense(mask)"
        )


def check_layout(layout: MaskLayout, request: AttentionRequest) -> None:
    """Refuse a layout whose batch, heads or device do not fit the tensors of ``request``, in one message."""
    problems = []
    if layout.batch not in (1, request.batch):
        problems.append(
            f"layout.batch must be 1 (broadcasts) or the batch of the tensors, got layout.batch={layout.batch} "
            f"and tensors of batch {request.batch}"
        )
    if layout.heads not in (1, request.heads):
        problems.append(
            f"layout.heads must be 1 (the same for all) or the number of query heads, got layout.heads={layout.heads} "
            f"and {request.heads} query heads"
        )
    device = layout.device
    if device is not None and device != request.device:
        problems.append(
            f"layout must be on the device of q, k and v, got {device} and {request.device}; "
            f"move it with layout.to({shown(str(request.device))})"
        )
    if problems:
        raise LayoutError("; ".join(problems))


def expected_shapes(layout: MaskLayout, request: AttentionRequest) -> tuple[tuple[int, int, int, int], ...]:
    """The shapes of q, k, v and the output that ``layout`` and ``request`` describe."""
    b, h, g = request.batch, request.heads, request.kv_heads
    return (
        (b, h, layout.q_len, request.head_dim),
        (b, g, layout.kv_len, request.head_dim),
        (b, g, layout.kv_len, request.v_head_dim),
        (b, h, layout.q_len, request.v_head_dim),
    )


def raise_mismatch(q: Tensor, k: Tensor, v: Tensor, layout: MaskLayout, request: AttentionRequest) -> NoReturn:
    """Raise the error that says how q, k and v differ from what was prepared."""
    check_qkv(q, k, v)
    problems = []
    if q.shape[0] != request.batch:
        problems.append(f"batch: prepared for {request.batch}, got {q.shape[0]}")
    if q.device != request.device:
        problems.append(f"device: prepared for {request.device}, got {q.device}")
    for name, x, shape in zip("qkv", (q, k, v), expected_shapes(layout, request), strict=False):
        if tuple(x.shape) != shape:
            problems.append(f"{name}: prepared for shape {shape}, got {tuple(x.shape)}")
    if problems:
        raise AttentionInputError(
            f"q, k and v must match what was prepared (layout and request): {'; '.join(problems)}; "
            "prepare again for these tensors"
        )
    raise AttentionInputError(
        f"q, k and v must have the prepared dtype {request.dtype} after the autocast rule, "
        f"got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them, or prepare under the same autocast state"
    )


def check_gradients(*tensors: Tensor | None) -> None:
    """Refuse tensors that want gradients, in grad mode, which were not prepared for."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise AttentionInputError(
            "a tensor requires grad but the request was made with needs_grad=False; make the request with "
            "needs_grad=True (AttentionRequest.of reads it off the tensors), or call under torch.no_grad()"
        )


def checked_bias(bias: Tensor | None, layout: MaskLayout, request: AttentionRequest) -> Tensor | None:
    """The bias in a dtype that the scores have, if it was prepared for and has the right type, shape and device.

    FP64 becomes FP32 unless q, k and v are FP64 too; a finite bias stays finite, since only ``-inf`` blocks a key.
    """
    _check_presence("bias", bias, request.has_bias)
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in FLOATING:
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise AttentionInputError(
            f"bias must be a floating tensor added to the scores, got {got}; a boolean mask belongs in the layout: "
            "MaskLayout.dense(mask)"
        )
    full = (request.batch, request.heads, layout.q_len, layout.kv_len)
    tail = full[4 - bias.dim() :] if bias.dim() <= 4 else ()
    if bias.dim() > 4 or any(have not in (1, want) for have, want in zip(bias.shape, tail, strict=True)):
        raise AttentionInputError(f"bias must broadcast to [B, Hq, Q, K] = {full}, got shape {tuple(bias.shape)}")
    if bias.device != request.device:
        raise AttentionInputError(f"bias must be on {request.device} like q, k and v, got {bias.device}")
    if bias.requires_grad and not request.needs_bias_grad and torch.is_grad_enabled():
        raise AttentionInputError(
            "bias requires grad but the request was made with needs_bias_grad=False; make it with "
            "AttentionRequest.of(q, k, v, bias=bias), or pass bias.detach()"
        )
    if bias.dtype is not torch.float64 or request.dtype is torch.float64:
        return bias
    limit = torch.finfo(torch.float32).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).float()


def check_sinks(sinks: Tensor | None, request: AttentionRequest) -> None:
    """Refuse sink logits that were not prepared for, or whose type, shape or device is wrong."""
    _check_presence("sinks", sinks, request.has_sinks)
    if sinks is None:
        return
    need = (request.heads,)
    if not isinstance(sinks, Tensor) or sinks.dtype not in FLOATING or tuple(sinks.shape) != need:
        got = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise AttentionInputError(f"sinks must be one floating logit per query head, shape {need}, got {got}")
    if sinks.device != request.device:
        raise AttentionInputError(f"sinks must be on {request.device} like q, k and v, got {sinks.device}")


def raise_wrong_result(result: object, backend: str, layout: MaskLayout, request: AttentionRequest) -> NoReturn:
    """Raise the error that says what about an answer of ``attend`` breaks the conventions."""
    shape = expected_shapes(layout, request)[3]
    lse_dtype = accumulation_dtype(request.dtype)
    for name, need in (("output", (shape, request.dtype)), ("lse", (shape[:3], lse_dtype))):
        if not hasattr(result, name):
            break
        value = getattr(result, name)
        got = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        if got != need and (name == "output" or request.needs_lse):
            raise wrong_answer(backend, f"{name} must have shape and dtype {need}", str(got))
    raise wrong_answer(backend, "attend must return an AttentionResult", type(result).__name__)


def wrong_answer(backend: str, need: str, got: str) -> PolyattnError:
    """The error about a backend that breaks the protocol."""
    return PolyattnError(
        f"backend '{backend}': {need}, got {got}; this is the backend's fault, 'polyattn check {backend}' says more"
    )


def _check_presence(name: str, given: object, prepared: bool) -> None:
    if prepared and given is None:
        raise AttentionInputError(
            f"{name} must be given: the request was made with has_{name}=True, got None; prepare without it instead"
        )
    if given is not None and not prepared:
        raise AttentionInputError(
            f"{name} must not be given: the request was made with has_{name}=False; "
            f"prepare with has_{name}=True (AttentionRequest.of(q, k, v, {name}={name}))"
        )
