"""The latent attention of transformers models: configurations to specs, and weights by name.

What a model class decides by itself stands in ``_FAMILIES``; the other classes that have latents are refused with what
they have more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyattn import ConfigError, RopeSpec
from polyattn.messages import is_number, shown
from polyattn_modules import LatentSpec
from polyattn_readers.entries import fault, integer, layer_index, refuse_other, required, text_part, weights_of
from polyattn_readers.rope_entry import refuse_canonical_keys

#: How channels are paired: by the class itself, or as ``rope_interleave`` says.
_FAMILIES = {
    "deepseek_v2": "neighbours",
    "deepseek_v3": "rope_interleave",
    "glm4_moe_lite": "rope_interleave",
    "axk1": "rope_interleave",
    "minicpm3": "halves",
    "youtu": "rope_interleave",
}
#: What other classes with latents have that no latent spec says.
_MORE = {
    "axk2": "a gate on the output and an indexer that selects keys",
    "deepseek_v32": "an indexer that selects keys",
    "glm5_next": "an indexer that selects keys, and layers that are not softmax attention",
    "glm_moe_dsa": "an indexer that selects keys",
    "hy_v4": "a gate on the output and an indexer that selects keys",
    "kimi_linear": "no rotation, and layers that are not softmax attention",
    "longcat_flash": "factors of its latents",
    "mistral4": "a factor of queries by their position",
}
#: In the norms of the latents of every class above.
_EPS = 1e-6


class LatentReader:
    """Reads latent specs and weights as transformers has them; found by name from :class:`LatentSpec`."""

    name = "hf_latent"
    api_version = 1

    def read(self, config: Any, *, layer: int = 0, convention: str = "serving") -> LatentSpec:
        """See :meth:`polyattn.LatentSpec.from_hf`."""
        layer_index(layer)
        data = text_part(config)
        pairs = _pairs(data)
        refuse_canonical_keys(data)
        bias = data.get("attention_bias")
        if not (bias is None or isinstance(bias, bool)):
            fault(data, f"attention_bias must be true or false, got {shown(bias)}")
        heads = integer(data, "num_attention_heads")
        if data.get("num_key_value_heads") not in (None, heads):
            fault(data, f"num_key_value_heads must be that of queries, {heads}, got {data['num_key_value_heads']}")
        sizes: dict[str, Any] = {ours: integer(data, theirs) for ours, theirs in _SIZES.items()}
        width = sizes["nope_dim"] + sizes["rope_dim"]
        interleaved = required(data, "rope_interleave") if pairs == "rope_interleave" else pairs == "neighbours"
        rope = RopeSpec.from_hf(
            data, head_dim=sizes["rope_dim"], interleaved=interleaved is True, convention=convention
        )
        return LatentSpec(
            num_heads=heads,
            q_rank=None if data.get("q_lora_rank") is None else integer(data, "q_lora_rank"),
            **sizes,
            rope=rope,
            norm_eps=_EPS,
            scale=_scale(data, width),
            dropout=data.get("attention_dropout") or 0.0,
            bias=bool(bias),
            output_bias=bool(bias),
        )

    def weights(
        self, state: Mapping[str, Tensor], config: Any, *, layer: int, spec: LatentSpec, convention: str = "serving"
    ) -> dict[str, Tensor]:
        """The weights of one layer under our names; see :meth:`polyattn.LatentAttention.load_hf_weights`."""
        want = self.read(config, layer=layer, convention=convention)
        ours, theirs = (dataclasses.replace(x, dropout=0.0, layout=None).to_dict() for x in (spec, want))
        refuse_other(ours, theirs, layer, "LatentAttention.from_hf(config, layer=...)")
        return weights_of(state, text_part(config), layer)


_SIZES = {
    "hidden_size": "hidden_size",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def _pairs(data: Mapping[str, Any]) -> str:
    name = data.get("model_type")
    if isinstance(name, str) and name in _MORE:
        fault(data, f"its latent attention has {_MORE[name]}, which no latent spec says")
    pairs = _FAMILIES.get(name) if isinstance(name, str) else None
    if pairs is None:
        raise ConfigError(
            f"model_type must be one of {', '.join(_FAMILIES)}, got {shown(name)}; for another model build the "
            "LatentSpec field by field"
        )
    return pairs


def _scale(data: Mapping[str, Any], width: int) -> float | None:
    """The factor of the scores, which YaRN raises where a configuration says ``mscale_all_dim``."""
    entries = [entry for name in ("rope_parameters", "rope_scaling") if isinstance(entry := data.get(name), Mapping)]
    for entry in entries:
        m: Any = entry.get("mscale_all_dim")
        if not m or entry.get("rope_type", entry.get("type", "default")) == "default":
            continue
        factor: Any = entry.get("factor")
        if not is_number(m) or not is_number(factor) or m < 0 or factor < 1:
            fault(data, f"factor and mscale_all_dim must be numbers >= 1 and >= 0, got {shown(factor)} and {shown(m)}")
        return float(width**-0.5 * (0.1 * m * math.log(factor) + 1) ** 2)
    return None
