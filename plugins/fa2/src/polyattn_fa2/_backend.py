"""Choosing the kernel calls of a layout, and refusing what FlashAttention-2 cannot do."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from polyattn import (
    AttentionRequest,
    AttentionResult,
    BackendBase,
    MaskLayout,
    PreparedAttention,
    Reason,
    StructuredMask,
)
from polyattn.kernels import features_of, finished, hidden_in_blocks, shut_out, unseen_keys
from polyattn_fa2 import providers
from polyattn_fa2._cached import CachedKeys, decode
from polyattn_fa2._ops import Settings, flash, padded_width, width_with_lse_gradient
from polyattn_fa2._pieces import WindowSize
from polyattn_fa2._sequences import Sequences, calls_of, from_bands, from_validity, uniform
from polyattn_fa2.providers.base import FLASH_ATTN_INSTALL, MAX_WIDTH

_BY_STRUCTURE = (
    "describe the mask by its structure (MaskLayout.causal, padded, packed, chunked, prefix_lm), or use another backend"
)
#: Of keys that a query sees: each takes calls of its own.
MAX_RUNS = 32
_BY_FLASH_ATTN = f"use the provider flash_attn ({FLASH_ATTN_INSTALL}), or another backend"
_HINTS = {
    "float32": "cast q, k and v to bfloat16 or float16, or call under torch.autocast('cuda'), which casts all three",
    "float64": "cast q, k and v to bfloat16 or float16, or use another backend; autocast leaves FP64 as it is",
    "dense": _BY_STRUCTURE,
    "mask_mod": _BY_STRUCTURE,
    "per_head_mask": "use one mask for all heads, or another backend",
    "bias": "the kernels add nothing to the scores; use another backend",
    "softcap": _BY_FLASH_ATTN,
    "dropout": _BY_FLASH_ATTN,
}


@dataclasses.dataclass(frozen=True)
class FlashOptions:
    """Options of the backend ``fa``.

    Attributes:
        provider: who brings the kernels. ``auto``: flash_attn, or torch's own where flash_attn is not installed.
        deterministic: a deterministic backward, also without ``torch.use_deterministic_algorithms``.
    """

    provider: Literal["auto", "flash_attn", "torch_varlen"] = "auto"
    deterministic: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class FlashPlan:
    """The state of a prepared layout.

    Attributes:
        sequences: the kernel calls, or the one over cached keys.
        settings: of every call.
        rows: Bool ``[B|1, 1, Q, 1]``, fully masked rows where an inactive query lies inside a sequence, or ``None``.
        keys: Bool ``[B|1, 1, K, 1]``, keys that only such queries would see, or ``None``.
    """

    sequences: Sequences | CachedKeys
    settings: Settings
    rows: Tensor | None = None
    keys: Tensor | None = None


class FlashBackend(BackendBase):
    """FlashAttention-2 for FP16 and BF16 on CUDA, by unpadded sequences."""

    name = "fa"
    Options = FlashOptions
    options: FlashOptions

    @property
    def abilities(self) -> frozenset[str]:  # type: ignore[override]  # depends on the provider
        """What the provider in use can do; without any that runs, what flash_attn can."""
        return self.abilities_on(torch.device("cuda"))

    def abilities_on(self, device: torch.device) -> frozenset[str]:
        """The same for the provider that ``device`` gets."""
        return providers.choose(self.options.provider, device)[0].abilities

    def hint(self, feature: str, device: torch.device) -> str:
        """Another mask, dtype, provider or backend."""
        return _HINTS.get(feature, "")

    def device_reasons(self, device: torch.device) -> tuple[Reason, ...]:
        """The provider's: wrong device, no GPU, an old GPU, kernels absent, broken or of another version."""
        return providers.choose(self.options.provider, device)[1]

    def extra_reasons(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Limits of the provider, of head widths, and of structures that are not sequences."""
        provider, _ = providers.choose(self.options.provider, request.device)
        return (
            *provider.limits(request, deterministic=self._deterministic(request)),
            *_width_reasons(request),
            *_structure_reasons(layout, request),
        )

    def preference(self, layout: MaskLayout, request: AttentionRequest) -> int:
        """Above every backend that is not made for one kind of device."""
        return 100

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> FlashPlan:
        """Lower the layout to sequences, and move their offsets and rows to the device."""
        provider, _ = providers.choose(self.options.provider, request.device)
        assert request.scale is not None
        settings = Settings(
            provider.name,
            request.scale,
            0.0 if request.softcap is None else request.softcap,
            request.dropout,
            self._deterministic(request),
            request.needs_lse_grad or request.has_sinks,
        )
        cached = CachedKeys.of(layout, request)
        if cached is not None:
            return FlashPlan(cached, settings, cached.rows_without_keys(layout), unseen_keys(layout, request))
        window_size = _uniform_window_size(layout, request)
        if window_size is not None:
            sizes = (request.batch, layout.q_len, layout.kv_len)
            return FlashPlan(uniform(*sizes, window_size, fixed=provider.fixed, device=request.device), settings)
        bands = layout.to_bands()
        if bands is None or (layout.max_runs != 1 and _hides_only_invalid_keys(layout)):
            return FlashPlan(_moved(_validity_only(layout, request), request.device), settings)
        sequences = from_bands(
            bands,
            _right(layout),
            q_len=layout.q_len,
            kv_len=layout.kv_len,
            batch=request.batch,
            repeat=layout.batch == 1,
        )
        rows, keys = hidden_in_blocks(layout, request)
        return FlashPlan(_moved(sequences, request.device), settings, rows, keys)

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
        """Run the planned kernel calls."""
        plan: FlashPlan = prepared.state
        q, k, v = shut_out(q, k, v, plan.rows, plan.keys)
        if isinstance(plan.sequences, CachedKeys):
            output, lse = decode(q, k, v, plan.sequences, plan.settings)
        else:
            output, lse = flash(q, k, v, plan.sequences, plan.settings)
        return finished(output, lse, prepared.request, rows=plan.rows, sinks=sinks)

    def describe(self, prepared: PreparedAttention) -> str:
        """The provider, and how many calls over how many sequences."""
        plan: FlashPlan = prepared.state
        if isinstance(plan.sequences, CachedKeys):
            return (
                f"{providers.get(plan.settings.provider).title()}, one call on a cache with the key lengths of its rows"
            )
        title, calls = providers.get(plan.settings.provider).title(), calls_of(plan.sequences.calls)
        if plan.sequences.cu_seqlens_q is None:
            return f"{title}, one call on the batch as it is"
        many = "call" if len(calls) == 1 else "calls"
        runs = max((call.part for call in calls), default=0) + 1
        merged = "" if runs == 1 else f", merged over {runs} runs of keys"
        return f"{title}, {sum(call.sequences for call in calls)} sequences in {len(calls)} {many}{merged}"

    def _deterministic(self, request: AttentionRequest) -> bool:
        return request.deterministic or self.options.deterministic


def _structure(layout: MaskLayout) -> StructuredMask:
    assert isinstance(layout.visibility, StructuredMask)
    return layout.visibility


def _uniform_window_size(layout: MaskLayout, request: AttentionRequest) -> WindowSize | None:
    """The window size of one call on whole batch rows; ``None`` where a query sees nothing or a key is not seen."""
    mask = layout.visibility
    if not isinstance(mask, StructuredMask) or layout.active_queries is not None or layout.heads > 1:
        return None
    if not mask.given() <= {"causal", "window"} or 0 in (request.batch, layout.q_len, layout.kv_len):
        return None
    ahead = layout.kv_len - layout.q_len
    if mask.causal and ahead < 0:
        return None
    longest = max(layout.kv_len, layout.q_len)
    left, right = (-1 if side is None or side + 1 >= longest else side for side in mask.reach)
    if mask.causal:
        right = 0
    if (left, right) in {(-1, 0), (-1, -1)}:
        return left, right
    # A key that no query sees, or a query that sees nothing; and the kernels take a side of K or more for unbounded.
    if ahead < 0 or not left - ahead >= 0 or right < 0:
        return None
    return left, right


def _right(layout: MaskLayout) -> int:
    """How many keys after its position a query sees, where a window of two sides bounds that."""
    mask = layout.visibility
    right = None if not isinstance(mask, StructuredMask) or mask.causal else mask.reach[1]
    return 0 if right is None else min(right, layout.q_len + layout.kv_len)  # the kernels count in int32


def _hides_only_invalid_keys(layout: MaskLayout) -> bool:
    mask = layout.visibility
    return (
        isinstance(mask, StructuredMask)
        and layout.heads == 1
        and mask.kv_valid is not None
        and mask.given() <= {"kv_valid", "q_positions", "kv_positions"}
    )


def _validity_only(layout: MaskLayout, request: AttentionRequest) -> Sequences:
    valid = _structure(layout).kv_valid
    assert valid is not None
    return from_validity(valid, layout.active_queries, q_len=layout.q_len, batch=request.batch)


def _moved(sequences: Sequences, device: torch.device) -> Sequences:
    on_device = {
        field.name: getattr(sequences, field.name).to(device)
        for field in dataclasses.fields(sequences)
        if field.name != "calls"
    }
    return dataclasses.replace(sequences, **on_device)


def _width_reasons(request: AttentionRequest) -> tuple[Reason, ...]:
    d, dv = request.head_dim, request.v_head_dim
    got = f"D={d}, Dv={dv}"
    if padded_width(d, dv) > MAX_WIDTH:
        need = f"head widths of at most {MAX_WIDTH}"
        return (Reason("head_width", "kernel", got, need, "use another backend"),)
    through_lse = request.needs_lse_grad or (request.has_sinks and request.needs_grad)
    if through_lse and width_with_lse_gradient(d, dv) > MAX_WIDTH:
        feature = "lse_grad" if request.needs_lse_grad else "sinks"
        need = f"value widths of at most {MAX_WIDTH - 1}: the gradient through the LSE takes one column"
        return (Reason("head_width_lse_grad", feature, got, need, "use another backend"),)
    return ()


def _structure_reasons(layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
    if CachedKeys.of(layout, request) is not None:
        return ()
    if layout.to_bands(MAX_RUNS) is not None or _uniform_window_size(layout, request) is not None:
        return ()
    if _hides_only_invalid_keys(layout):
        return ()
    words = features_of(layout, request)
    if "dense" in words or "mask_mod" in words:  # which the abilities lack
        return ()
    first = ("positions", "padded", "packed", "chunked", "prefix_lm", "window", "active_queries")
    feature = next((word for word in first if word in words), next(iter(words)))
    return (
        Reason(
            "not_sequences",
            feature,
            f"{layout.describe()}, where a query sees more than {MAX_RUNS} runs of keys, or whose values the host does "
            "not know",
            "a mask of few runs of keys: taking keys out from between others would change the distances that causality "
            "and windows compare",
            "close the gaps between keys, make the layout where its values can be read, or use another backend",
        ),
    )
