"""Choosing the path of a layout: one plain call, tiles, one dense call, or torch's differentiable math path."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyattn import (
    AttentionRequest,
    AttentionResult,
    BackendBase,
    MaskLayout,
    PreparedAttention,
    Reason,
    StructuredMask,
)
from polyattn.kernels import (
    CachedMask,
    finished,
    fully_masked_rows,
    hidden_in_blocks,
    of_kv_heads,
    shut_out,
    unseen_keys,
)
from polyattn_sdpa import _cached
from polyattn_sdpa._kernels import FEW_KEYS
from polyattn_sdpa._ops import fused
from polyattn_sdpa._options import SdpaOptions
from polyattn_sdpa._runs import planned
from polyattn_sdpa._tiles import additive

ABILITIES = frozenset(
    (
        *("float64", "float32", "bfloat16", "float16", "full", "causal", "window", "padded", "packed", "prefix_lm"),
        *("chunked", "positions", "dense", "mask_mod", "per_head_mask", "active_queries", "gqa", "unequal_width"),
        *("two_sided_window", "sink_tokens", "tree", "union", "kv_lengths", "selected"),
        *("bias", "bias_grad", "sinks", "lse", "lse_grad", "grad", "dropout", "deterministic"),
    )
)

#: A positive factor below it is not a normal number in FP32.
_TINY = torch.finfo(torch.float32).tiny

#: Tiles of several runs may cost so many times the scores of a dense mask, which takes quadratic memory.
DENSE_COST = 1.2

Path = Literal["plain", "tiles", "dense", "math", "cached"]


@dataclasses.dataclass(frozen=True, eq=False)
class SdpaPlan:
    """The state of a prepared layout.

    Attributes:
        path: ``plain`` is one call of ``scaled_dot_product_attention``; ``tiles`` walks ``table``; ``dense`` is one
            fused call under ``mask``; ``cached`` is one over the slots of a cache that are in use; ``math`` is torch's
            quadratic path, for a bias under gradients and for dropout.
        causal: flag of the plain call, which has a ``mask`` instead where keys are few.
        per_row: whether bands name batch rows.
        table: CPU int64, the bands ``[N, 7]`` of ``MaskLayout.to_bands`` or, where a query lies in several, their plan
            ``[M, 8]``, which a traced graph leaves to the call.
        mask: additive ``[B|1, H|1, Q, K]``; rows that see nothing are left open, since the kernels give NaN there;
            beside a bias they are opened when it is known.
        rows: Bool ``[B|1, H|1, Q, 1]``, fully masked rows, or ``None`` when the path leaves none to the kernel.
        keys: Bool ``[B|1, Hkv|1, K, 1]``, keys that no query sees, or ``None`` likewise.
        upcast: whether the backward of the fused calls casts to FP32.
        grouped: whether query heads share KV heads, for the plain call and the math path.
        slots: of the cached path: the first one and the one behind the last.
        lengths: of the cached path: what a graph on the CPU finds these by.
        reach: likewise: how many slots before its own a query may see; -1: all.
    """

    path: Path
    causal: bool = False
    per_row: bool = False
    table: Tensor | None = None
    mask: Tensor | None = None
    rows: Tensor | None = None
    keys: Tensor | None = None
    upcast: bool = False
    grouped: bool = False
    slots: tuple[int, int] = (0, 0)
    lengths: Tensor | None = None
    reach: int = -1


class SdpaBackend(BackendBase):
    """torch's fused scaled-dot-product attention, lowered by structure."""

    name = "sdpa"
    Options = SdpaOptions
    options: SdpaOptions
    abilities = ABILITIES

    def extra_reasons(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """The math path returns no LSE, so nothing that needs one goes with it."""
        cause = _needs_math(request)
        if cause is None:
            return ()
        wanted = [name for name, asked in (("lse", request.needs_lse), ("sinks", request.has_sinks)) if asked]
        return tuple(
            Reason(
                code=f"no_{feature}_on_math_path",
                feature=feature,
                got=f"{feature} together with {cause}",
                need=f"{feature} without {cause}: torch's math path returns no LSE",
                hint="the backend 'eager' does both",
            )
            for feature in wanted
        )

    def preference(self, layout: MaskLayout, request: AttentionRequest) -> int:
        """Above the reference, below kernels made for one device."""
        return 50

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> SdpaPlan:
        """Choose the path and build its masks once."""
        math = _needs_math(request) is not None
        # A graph with symbolic sizes compares symbolic numbers of heads; torch's kernels take no symbolic boolean.
        grouped = True if request.group > 1 else False  # noqa: SIM210
        upcast = self.options.upcasts(request)
        if isinstance(layout.visibility, CachedMask) and _cached.takes(layout, request):
            rows = _cached.rows_without_keys(layout, request)
            mask, *slots = _cached.masked(layout, request, rows)
            lengths, reach = _cached.lengths_for_call(layout, request), _cached.reach_of(layout)
            return SdpaPlan("cached", mask=mask, rows=rows, slots=(slots[0], slots[1]), lengths=lengths, reach=reach)
        if not math and not request.has_bias:
            if not upcast and _is_one_call(layout, request):
                if layout.kv_len < FEW_KEYS and request.device.type == "cpu":
                    mask = additive(layout.to_dense(request.device), request.dtype)
                    return SdpaPlan("plain", mask=mask, grouped=grouped)
                return SdpaPlan("plain", causal=_structure(layout).causal, grouped=grouped)
            table = layout.to_bands(max_runs=1)
            if table is None:
                table = _several_runs(layout)
            if table is not None:
                rows, keys = (None, None) if layout.active_queries is None else hidden_in_blocks(layout, request)
                return SdpaPlan("tiles", False, layout.batch > 1, table, rows=rows, keys=keys, upcast=upcast)
        rows, keys = fully_masked_rows(layout, request), unseen_keys(layout, request)
        visible = layout.to_dense(request.device)
        opened = visible if rows is None or request.has_bias else visible | rows
        mask = additive(opened, request.dtype)
        return SdpaPlan("math" if math else "dense", mask=mask, rows=rows, keys=keys, upcast=upcast, grouped=grouped)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: PreparedAttention,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionResult:
        """Run the planned path."""
        plan: SdpaPlan = prepared.state
        request = prepared.request
        scale = request.scale
        assert scale is not None
        if scale < _TINY:  # the kernels scale their -inf too, which would open or poison what it hides
            q, scale = (q * -1.0, -scale) if scale <= -_TINY else (q * scale, 1.0)
        if plan.path == "plain":
            return AttentionResult(
                scaled_dot_product_attention(
                    q, k, v, plan.mask, is_causal=plan.causal, scale=scale, enable_gqa=plan.grouped
                )
            )
        rows, keys, mask = plan.rows, plan.keys, plan.mask
        if bias is not None:
            assert mask is not None
            mask = bias + mask
            if mask.numel():
                # A bias of -inf may block the rest of a row: open it for the kernel and select 0 afterwards.
                scores = mask.detach()
                rows = scores.amax(-1, keepdim=True) == -torch.inf
                keys = of_kv_heads(scores.amax(-2) == -torch.inf, request.kv_heads).unsqueeze(-1)
                mask = torch.where(rows, 0.0, mask)
        q, k, v = shut_out(q, k, v, rows, keys)
        lse: Tensor | None = None
        if plan.path == "cached":
            want_lse = request.needs_lse or request.has_sinks
            if plan.lengths is None:
                output, lse = _cached.decode(q, k, v, mask, *plan.slots, scale, want_lse)
            else:
                assert mask is not None
                output, lse = _cached.decode_op(q, k, v, mask, plan.lengths, plan.reach, scale, want_lse)
            return finished(output, lse if want_lse else None, request, rows=rows, sinks=sinks)
        if plan.path == "math":
            output, _ = torch.ops.aten._scaled_dot_product_attention_math(  # noqa: SLF001
                q, k, v, mask, request.dropout, False, scale=scale, enable_gqa=plan.grouped
            )
        else:
            output, lse = fused(
                q,
                k,
                v,
                plan.table,
                mask,
                per_row=plan.per_row,
                scale=scale,
                upcast=plan.upcast,
                lse_grad=request.needs_lse_grad or request.has_sinks,
            )
        return finished(output, lse, request, rows=rows, sinks=sinks)

    def describe(self, prepared: PreparedAttention) -> str:
        """The path that was planned."""
        plan: SdpaPlan = prepared.state
        upcast = ", backward in FP32" if plan.upcast and plan.path != "math" else ""
        path = {
            "plain": "one scaled_dot_product_attention call, "
            + ("a mask of few keys" if plan.mask is not None else f"is_causal={plan.causal}"),
            "tiles": _described(plan.table, prepared.layout),
            "dense": "one fused call under a dense mask, quadratic memory",
            "cached": f"one fused call over {plan.slots[1] - plan.slots[0]} slots of a cache, heads folded into rows",
            "math": "torch's math path under a dense mask, quadratic memory",
        }
        return path[plan.path] + upcast


def _several_runs(layout: MaskLayout) -> Tensor | None:
    """The plan of a layout whose queries lie in several bands, which a traced graph leaves to the call.

    ``None``: it has no bands, or dense is faster.
    """
    bands = layout.to_bands()
    if bands is None or torch.compiler.is_compiling():
        return bands
    return planned(bands, DENSE_COST * layout.batch * layout.q_len * layout.kv_len)


def _described(table: Tensor | None, layout: MaskLayout) -> str:
    """How the tiles of a layout are walked."""
    bands = layout.to_bands()
    if table is None or bands is None:
        return ""
    blocks = f"fused calls over {bands.shape[0] - 1} blocks"
    return blocks if layout.max_runs == 1 else f"{blocks}, up to {layout.max_runs} runs of keys for a query"


def _structure(layout: MaskLayout) -> StructuredMask:
    assert isinstance(layout.visibility, StructuredMask)
    return layout.visibility


def _needs_math(request: AttentionRequest) -> str | None:
    """Why a request cannot take the fused kernels, if it cannot.

    A bias under gradients is one cause even when the bias itself needs none: the CPU kernel's backward is wrong in rows
    whose scores all lie at the dtype's minimum.
    """
    if request.dropout > 0:
        return "dropout"
    if request.has_bias and request.needs_grad:
        return "a bias under gradients"
    return None


def _is_one_call(layout: MaskLayout, request: AttentionRequest) -> bool:
    """Whether the public function does the layout in one call, bottom-right and top-left alignment being the same."""
    mask = layout.visibility
    if not isinstance(mask, StructuredMask) or layout.active_queries is not None or layout.heads > 1:
        return False
    if not mask.given() <= {"causal"}:
        return False
    if mask.causal and layout.q_len != layout.kv_len:
        return False
    if 0 in (request.batch, layout.q_len, layout.kv_len) or request.head_dim != request.v_head_dim:
        return False
    low_group = request.group > 1 and request.needs_grad and request.dtype in (torch.float16, torch.bfloat16)
    return not (request.needs_lse or request.has_sinks or low_group)
