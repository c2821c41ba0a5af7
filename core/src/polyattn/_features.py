"""Which features a layout and a request use, in the vocabulary that backends declare abilities in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from polyattn._layout import MaskLayout, StructuredMask
from polyattn._layout.structured import WORDS
from polyattn._reasons import Reason
from polyattn._request import AttentionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


def features_of(layout: MaskLayout, request: AttentionRequest) -> dict[str, str]:
    """Every feature in use, with the value that was asked for (``{"window": "512", "gqa": "8 over 2 heads"}``)."""
    return {**dict(_of_layout(layout)), **dict(_of_request(request))}


def missing_abilities(
    backend: str, abilities: frozenset[str], layout: MaskLayout, request: AttentionRequest
) -> tuple[Reason, ...]:
    """One reason for each feature in use that ``abilities`` lacks."""
    return tuple(
        Reason(
            code=f"no_{feature}",
            feature=feature,
            got=got,
            need=f"a backend with the ability '{feature}', which '{backend}' does not have",
        )
        for feature, got in features_of(layout, request).items()
        if feature not in abilities
    )


def _of_layout(layout: MaskLayout) -> Iterator[tuple[str, str]]:
    mask: object = layout.visibility
    if isinstance(mask, Tensor):
        yield "dense", f"Bool{list(mask.shape)}"
    elif isinstance(mask, StructuredMask):
        given = mask.given()
        if "causal" not in given:
            yield "full", "mask without causality"
        # A field without a word is a word itself, which backends do not declare, so that they refuse it.
        words: dict[str, list[str]] = {}
        for name in sorted(given):
            value = getattr(mask, name)
            text = name if isinstance(value, (Tensor, bool)) else f"{name} {value}"
            words.setdefault(WORDS.get(name, name), []).append(text)
        for word, texts in words.items():
            yield word, " and ".join(texts)
    elif callable(mask):
        yield "mask_mod", getattr(mask, "__name__", type(mask).__name__)
    else:
        yield type(mask).__name__, "a description of another kind"
    if layout.heads > 1:
        yield "per_head_mask", f"{layout.heads} masks"
    if layout.active_queries is not None:
        yield "active_queries", "active_queries"


def _of_request(request: AttentionRequest) -> Iterator[tuple[str, str]]:
    dtype = str(request.dtype).removeprefix("torch.")
    yield dtype, dtype
    if request.group > 1:
        yield "gqa", f"{request.heads} query heads over {request.kv_heads} KV heads"
    if request.head_dim != request.v_head_dim:
        yield "unequal_width", f"D={request.head_dim}, Dv={request.v_head_dim}"
    if request.has_bias:
        yield "bias", "a bias"
    if request.needs_bias_grad:
        yield "bias_grad", "a bias that requires grad"
    if request.softcap is not None:
        yield "softcap", f"softcap {request.softcap}"
    if request.has_sinks:
        yield "sinks", "sink logits"
    if request.needs_lse:
        yield "lse", "needs_lse=True"
    if request.needs_lse_grad:
        yield "lse_grad", "needs_lse_grad=True"
    if request.needs_grad:
        yield "grad", "needs_grad=True"
    if request.dropout > 0:
        yield "dropout", f"dropout_p {request.dropout} in training"
    if request.deterministic:
        yield "deterministic", "deterministic algorithms"
