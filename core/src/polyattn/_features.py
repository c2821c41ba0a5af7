"""Which features a layout and a request use, in the vocabulary that backends declare abilities in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from polyattn._layout import MaskLayout
from polyattn._layout.structure import Structure
from polyattn._reasons import Reason
from polyattn._request import AttentionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def features_of(layout: MaskLayout, request: AttentionRequest) -> dict[str, str]:
    """Every feature in use, with the value that was asked for (``{"window": "512", "gqa": "8 over 2 heads"}``)."""
    return {**_of_layout(layout), **_of_request(request)}


def missing_abilities(
    backend: str,
    abilities: frozenset[str],
    layout: MaskLayout,
    request: AttentionRequest,
    hint: Callable[[str, torch.device], str] | None = None,
) -> tuple[Reason, ...]:
    """One reason for each feature in use that ``abilities``, what ``backend`` honours on the device, lacks.

    ``hint`` says what to do about a feature on a device.
    """
    return tuple(
        [
            Reason(
                code=f"no_{feature}",
                feature=feature,
                got=got,
                need=f"a backend with the ability '{feature}', which '{backend}' does not have",
                hint="" if hint is None else hint(feature, request.device),
            )
            for feature, got in features_of(layout, request).items()
            if feature not in abilities
        ]
    )


def _of_layout(layout: MaskLayout) -> dict[str, str]:
    found: dict[str, str] = {}
    mask: object = layout.visibility
    if isinstance(mask, Tensor):
        found["dense"] = f"Bool{list(mask.shape)}"
    elif isinstance(mask, Structure):
        found = mask.words()
    else:
        found["mask_mod"] = getattr(mask, "__name__", type(mask).__name__)
    if layout.heads > 1:
        found["per_head_mask"] = f"{layout.heads} masks"
    if layout.active_queries is not None:
        found["active_queries"] = "active_queries"
    return found


def _of_request(request: AttentionRequest) -> dict[str, str]:
    dtype = str(request.dtype).removeprefix("torch.")
    unequal = request.head_dim != request.v_head_dim
    used = {
        dtype: dtype,
        "gqa": f"{request.heads} query heads over {request.kv_heads} KV heads" if request.group > 1 else "",
        "unequal_width": f"D={request.head_dim}, Dv={request.v_head_dim}" if unequal else "",
        "bias": "a bias" if request.has_bias else "",
        "bias_grad": "a bias that requires grad" if request.needs_bias_grad else "",
        "softcap": "" if request.softcap is None else f"softcap {request.softcap}",
        "sinks": "sink logits" if request.has_sinks else "",
        "lse": "needs_lse=True" if request.needs_lse else "",
        "lse_grad": "needs_lse_grad=True" if request.needs_lse_grad else "",
        "grad": "needs_grad=True" if request.needs_grad else "",
        "dropout": f"dropout_p {request.dropout} in training" if request.dropout > 0 else "",
        "deterministic": "deterministic algorithms" if request.deterministic else "",
    }
    return {feature: got for feature, got in used.items() if got}
