"""Which features a layout and a request use, in the vocabulary that backends declare abilities in."""

from __future__ import annotations

from torch import Tensor

from polyattn._layout import MaskLayout, StructuredMask
from polyattn._reasons import Reason
from polyattn._request import AttentionRequest

#: The word for each field of a StructuredMask.
WORDS = {
    "causal": "causal",
    "window": "window",
    "kv_valid": "padded",
    "q_segments": "packed",
    "kv_segments": "packed",
    "prefix_lengths": "prefix_lm",
    "chunk_size": "chunked",
    "q_positions": "positions",
    "kv_positions": "positions",
}


def features_of(layout: MaskLayout, request: AttentionRequest) -> dict[str, str]:
    """Every feature in use, with the value that was asked for (``{"window": "512", "gqa": "8 over 2 heads"}``)."""
    return _of_layout(layout) | _of_request(request)


def missing_abilities(
    backend: str, abilities: frozenset[str], layout: MaskLayout, request: AttentionRequest
) -> tuple[Reason, ...]:
    """One reason for each feature in use that ``abilities`` lacks."""
    used = features_of(layout, request)
    lacking = [feature for feature in used if feature not in abilities]
    if not lacking:
        return ()
    return tuple(
        Reason(
            code=f"no_{feature}",
            feature=feature,
            got=used[feature],
            need=f"a backend with the ability '{feature}', which '{backend}' does not have",
        )
        for feature in lacking
    )


def _of_layout(layout: MaskLayout) -> dict[str, str]:
    mask: object = layout.visibility
    used: dict[str, str] = {}
    if isinstance(mask, Tensor):
        used["dense"] = f"Bool{list(mask.shape)}"
    elif isinstance(mask, StructuredMask):
        given = mask.given()
        if "causal" not in given:
            used["full"] = "mask without causality"
        for name in sorted(given):
            value = getattr(mask, name)
            text = name if isinstance(value, (Tensor, bool)) else f"{name} {value}"
            # A field without a word is a word itself, which backends do not declare, so that they refuse it.
            word = WORDS.get(name, name)
            used[word] = f"{used[word]} and {text}" if word in used else text
    elif callable(mask):
        used["mask_mod"] = getattr(mask, "__name__", type(mask).__name__)
    else:
        used[type(mask).__name__] = "a description of another kind"
    if layout.heads > 1:
        used["per_head_mask"] = f"{layout.heads} masks"
    if layout.active_queries is not None:
        used["active_queries"] = "active_queries"
    return used


def _of_request(request: AttentionRequest) -> dict[str, str]:
    dtype = str(request.dtype).removeprefix("torch.")
    used = {dtype: dtype}
    if request.heads != request.kv_heads:
        used["gqa"] = f"{request.heads} query heads over {request.kv_heads} KV heads"
    if request.head_dim != request.v_head_dim:
        used["unequal_width"] = f"D={request.head_dim}, Dv={request.v_head_dim}"
    if request.has_bias:
        used["bias"] = "a bias"
    if request.needs_bias_grad:
        used["bias_grad"] = "a bias that requires grad"
    if request.softcap is not None:
        used["softcap"] = f"softcap {request.softcap}"
    if request.has_sinks:
        used["sinks"] = "sink logits"
    if request.needs_lse:
        used["lse"] = "needs_lse=True"
    if request.needs_lse_grad:
        used["lse_grad"] = "needs_lse_grad=True"
    if request.needs_grad:
        used["grad"] = "needs_grad=True"
    if request.training and request.dropout_p > 0:
        used["dropout"] = f"dropout_p {request.dropout_p} in training"
    if request.deterministic:
        used["deterministic"] = "deterministic algorithms"
    return used
