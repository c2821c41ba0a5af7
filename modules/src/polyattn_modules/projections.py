"""The projections into queries, keys and values: three matrices, or one that holds them below each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyattn_modules.dtensors import like_parameters

PARTS = ("q_proj", "k_proj", "v_proj")
WHOLE = "qkv_proj"


def keys_and_values(fused: nn.Module, hidden: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of a fused projection, ``[B, S, width]`` each, without its queries.

    Args:
        fused: the projection.
        hidden: ``[B, S, hidden_size]``.
        widths: of queries, keys and values.
    """
    if type(fused) is nn.Linear:
        bias = None if fused.bias is None else fused.bias[widths[0] :]
        k, v = functional.linear(hidden, fused.weight[widths[0] :], bias).split(widths[1:], -1)
    else:  # an adapter or a quantised layer: its weight alone does not say what it computes
        _, k, v = fused(hidden).split(widths, -1)
    return k, v


def queries(fused: nn.Module, hidden: Tensor, widths: Sequence[int]) -> Tensor:
    """Queries of a fused projection, likewise, without its keys and values."""
    if type(fused) is nn.Linear:
        bias = None if fused.bias is None else fused.bias[: widths[0]]
        return functional.linear(hidden, fused.weight[: widths[0]], bias)
    projected: Tensor = fused(hidden)
    return projected[..., : widths[0]]


def load_either_form(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Before loading: bring what ``state_dict`` holds into the form that ``module`` has.

    A ``load_state_dict`` pre-hook. The projections may be fused or not, sinks a vector, whole tensors become DTensors
    where the parameters are. Only whole sets are touched; anything else stays for torch to report.
    """
    if f"{prefix}sinks" in state_dict:
        state_dict[f"{prefix}sinks.weight"] = state_dict.pop(f"{prefix}sinks")[None]
    fused = getattr(module, WHOLE, None) is not None
    for kind in ("weight", "bias"):
        whole = f"{prefix}{WHOLE}.{kind}"
        parts = [f"{prefix}{name}.{kind}" for name in PARTS]
        if fused and all(name in state_dict for name in parts):
            state_dict[whole] = torch.cat([state_dict.pop(name) for name in parts])
        elif not fused and whole in state_dict:
            widths: list[int] = [getattr(module, name).out_features for name in PARTS]
            if state_dict[whole].shape[0] == sum(widths):
                state_dict.update(zip(parts, state_dict.pop(whole).split(widths), strict=True))
    like_parameters(module, state_dict, prefix)


def unfuse(module: Any) -> None:
    """Replace the fused projection of a layer by the three that it holds."""
    whole, widths = module.qkv_proj, module._widths  # noqa: SLF001 - the layer's own
    biases = [None] * 3 if whole.bias is None else whole.bias.detach().split(widths)
    for name, weight, bias in zip(PARTS, whole.weight.detach().split(widths), biases, strict=True):
        part = nn.Linear(whole.in_features, len(weight), bias=bias is not None, device="meta")
        for kind, old in (("weight", weight), ("bias", bias)):
            if old is not None:
                wanted = getattr(whole, kind).requires_grad
                part.register_parameter(kind, nn.Parameter(old.clone(), requires_grad=wanted))
        module.add_module(name, part)
    del module.qkv_proj
    vars(module)["fused_qkv"] = False
