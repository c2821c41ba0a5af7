"""The attention of transformers models: configurations to specs and back, and weights by name.

What a model class decides by itself stands in ``_FAMILIES``; what its older configurations left unsaid is resolved
there by name, and nothing else is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from polyattn import ConfigError, RopeSpec
from polyattn.messages import is_number, listed, shown
from polyattn_modules import AttentionSpec, QKNorm
from polyattn_modules.serving import require_servable
from polyattn_readers.entries import fault, integer, layer_index, refuse_other, required, text_part, weights_of
from polyattn_readers.rope_entry import refuse_canonical_keys

if TYPE_CHECKING:
    pass

#: Keys of our canonical form that no transformers configuration of these families has.
CANONICAL_ONLY = (
    "schema_version", "qk_norm", "has_weight", "weighted", "num_heads", "num_kv_heads", "v_head_dim", "output_bias",
    "softcap", "sinks", "window", "scale", "input_size", "layout", "output_gate", "value_norm", "shared_keys_values",
    "query_scale",
)  # fmt: skip
_CHUNK_HINT = "give the chunks in the layout (MaskLayout.chunked) and set attention_chunk_size to null"


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a model class decides.

    Attributes:
        norm: position, scope and weight of the norm of queries and keys, or ``None``.
        window: which layers have one: none, all, or those of type ``"sliding_attention"``.
        window_flag: whether ``use_sliding_window`` must be true for there to be any.
        pattern: without ``layer_types``, every layer of this number is full and the others slide; 0: none slides.
        biases: which projections have one: all four or q, k and v, as ``attention_bias`` says; always q, k and v;
            or none.
        head_dim: whether a configuration may leave ``head_dim`` out: it is ``hidden_size / num_attention_heads`` then.
        kv_heads: whether it may leave ``num_key_value_heads`` out: there are as many as query heads then.
        weight_offset: what the class adds to the norm's weight before it multiplies.
        rope_by_type: whether each layer type may have a rope of its own.
        rotates: which layers do: all, those that ``no_rope_layers`` marks with 1, or those with a window.
        scale: the entry that says the factor of the scores, and the power that it is raised to.
        softcap: the entry that caps the scores.
        sinks: whether each head has a sink logit.
    """

    norm: tuple[Literal["before", "after"], Literal["head", "projection"], bool] | None = None
    window: Literal["none", "all", "sliding"] = "none"
    window_flag: bool = False
    pattern: int = 0
    biases: Literal["all", "qkv", "always qkv", "none"] = "all"
    head_dim: bool = True
    kv_heads: bool = True
    weight_offset: float = 0.0
    rope_by_type: bool = False
    rotates: Literal["all", "no_rope_layers", "sliding"] = "all"
    scale: tuple[str, float] | None = None
    softcap: str | None = None
    sinks: bool = False


_BY_HEAD: Any = ("before", "head", True)
_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(window="all", biases="none", kv_heads=False),
    "qwen2": _Family(window="sliding", window_flag=True, biases="always qkv", kv_heads=False),
    "qwen3": _Family(norm=_BY_HEAD, window="sliding", window_flag=True, head_dim=False, kv_heads=False),
    "qwen3_moe": _Family(norm=_BY_HEAD, window="all", window_flag=True, kv_heads=False),
    "gemma2": _Family(
        window="sliding",
        pattern=2,
        head_dim=False,
        kv_heads=False,
        scale=("query_pre_attn_scalar", -0.5),
        softcap="attn_logit_softcapping",
    ),
    "gemma3_text": _Family(
        norm=_BY_HEAD,
        window="sliding",
        head_dim=False,
        kv_heads=False,
        weight_offset=1.0,
        rope_by_type=True,
        scale=("query_pre_attn_scalar", -0.5),
    ),
    "olmo2": _Family(norm=("before", "projection", True)),
    "olmo3": _Family(norm=("before", "projection", True), window="sliding", pattern=4, rope_by_type=True),
    "llama4_text": _Family(norm=("after", "head", False), head_dim=False, kv_heads=False, rotates="no_rope_layers"),
    "gpt_oss": _Family(window="sliding", pattern=2, head_dim=False, kv_heads=False, sinks=True),
    "smollm3": _Family(window="sliding", window_flag=True, kv_heads=False, rotates="no_rope_layers"),
    "cohere2": _Family(window="sliding", pattern=4, rotates="sliding"),
    "exaone4": _Family(norm=_BY_HEAD, window="sliding", pattern=4, biases="none", kv_heads=False, rotates="sliding"),
    "glm4": _Family(biases="qkv", head_dim=False, kv_heads=False),
    "granite": _Family(scale=("attention_multiplier", 1.0)),
    "phi3": _Family(window="all", biases="none"),
}


class AttentionReader:
    """Reads and writes attention specs and weights as transformers has them; found by name from the specs."""

    name = "hf_attention"
    api_version = 1

    def read(self, config: Any, *, layer: int = 0, convention: str = "serving") -> AttentionSpec:
        """See :meth:`polyattn.AttentionSpec.from_hf`."""
        return _read_spec(config, layer, convention=convention)

    def write(
        self, specs: Sequence[AttentionSpec], model_type: str, *, serving_target: str | None = None
    ) -> dict[str, Any]:
        """The attention part of a configuration, read back to make sure of it; see :meth:`AttentionSpec.to_hf`.

        Args:
            specs: of the layers, first to last.
            model_type: the class that will read it.
            serving_target: the engine that will serve the model, which is asked first.
        """
        if serving_target is not None:
            for spec in dict.fromkeys(specs):
                require_servable(spec, serving_target)
        return _write_specs(specs, model_type)

    def weights(
        self, state: Mapping[str, Tensor], config: Any, *, layer: int, spec: AttentionSpec, convention: str = "serving"
    ) -> dict[str, Tensor]:
        """The weights of one layer under our names; see :meth:`polyattn.GroupedQueryAttention.load_hf_weights`."""
        _check_same(spec, config, layer, convention=convention)
        return _read_weights(state, config, layer)


def _read_spec(config: Any, layer: int, *, convention: str) -> AttentionSpec:
    data, family = _read(config)
    layer_index(layer)
    heads = integer(data, "num_attention_heads")
    hidden = integer(data, "hidden_size")
    head_dim = data.get("head_dim")
    if head_dim is None:
        if not family.head_dim:
            fault(data, "'head_dim' is missing, and the default of this class is not hidden_size / heads")
        if hidden % heads:
            fault(data, f"'head_dim' is missing and hidden_size / num_attention_heads is {hidden} / {heads}")
        head_dim = hidden // heads
    if "num_key_value_heads" not in data and not family.kv_heads:
        fault(data, "'num_key_value_heads' is missing, and the default of this class is not num_attention_heads")
    kv_heads = data.get("num_key_value_heads")
    _refuse_specialities(data)
    kind = _layer_type(data, layer, family)
    rotates = _rotates(data, layer, kind, family)
    bias, output_bias = _biases(data, family)
    return AttentionSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope=_rope(data, kind, head_dim, family, convention) if rotates else None,
        qk_norm=_norm(data, family, rotates=rotates),
        window=_window(data, kind, family),
        dropout=data.get("attention_dropout") or 0.0,
        bias=bias,
        output_bias=output_bias,
        softcap=None if family.softcap is None else data.get(family.softcap),
        sinks=family.sinks,
        scale=_read_scale(data, head_dim, family),
        input_size=2 * hidden if convention == "eagle" and layer == 0 and _is_eagle3(data) else None,
    )


def _is_eagle3(data: Mapping[str, Any]) -> bool:
    """Whether it is a draft whose first layer reads the token's embedding beside the hidden state, twice the width."""
    return any("Eagle3" in str(name) for name in data.get("architectures") or ())


def _write_specs(specs: Sequence[AttentionSpec], model_type: str) -> dict[str, Any]:
    first = specs[0]
    data: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": first.hidden_size,
        "num_hidden_layers": len(specs),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "attention_dropout": first.dropout,
    }
    convention = "serving"
    if first.input_size == 2 * first.hidden_size and model_type == "llama":
        convention, data["architectures"] = "eagle", ["LlamaForCausalLMEagle3"]
    family = _family(data)
    kinds = ["full_attention" if spec.window is None else "sliding_attention" for spec in specs]
    ropes = {kind: spec.rope for kind, spec in zip(kinds, specs, strict=True) if spec.rope is not None}
    written = {kind: rope.to_hf(model_type) for kind, rope in ropes.items()}
    for part in written.values():
        data |= part
    if family.rope_by_type:
        data["rope_parameters"] = {kind: part["rope_parameters"] for kind, part in written.items()}
    if family.biases in ("all", "qkv"):
        data["attention_bias"] = first.bias
    if family.norm is not None:
        data["rms_norm_eps"] = next((spec.qk_norm.eps for spec in specs if spec.qk_norm is not None), 1e-6)
    if family.window != "none":
        data["sliding_window"] = next((spec.window for spec in specs if spec.window is not None), None)
    if family.window == "sliding":
        data["layer_types"] = kinds
    if family.window_flag:
        data["use_sliding_window"] = data["sliding_window"] is not None
    if family.softcap is not None:
        data[family.softcap] = first.softcap
    if family.scale is not None:
        name, power = family.scale
        data[name] = first.head_dim if first.scale is None else round(first.scale ** (1 / power), 9)
        if power == 1:
            data[name] = first.head_dim**-0.5 if first.scale is None else first.scale
    if family.rotates == "no_rope_layers":
        data["no_rope_layers"] = [int(spec.rope is not None) for spec in specs]
    if model_type == "llama4_text":
        data |= {
            "use_qk_norm": any(spec.qk_norm is not None for spec in specs),
            "layer_types": ["full_attention"] * len(specs),
            "attn_temperature_tuning": False,
        }
    for layer, spec in enumerate(specs):
        own = dataclasses.replace(spec, layout=None)  # which layout of a scope: no configuration says it
        want, back = own.to_dict(), _read_spec(data, layer, convention=convention).to_dict()
        lost = [
            f"{name} {shown(want[name])} would be read as {shown(back[name])}"
            for name in want
            if back[name] != want[name]
        ]
        if lost:
            fault(data, f"it cannot carry this spec: {'; '.join(lost)} (layer {layer})")
    return data


def _check_same(spec: AttentionSpec, config: Any, layer: int, *, convention: str) -> None:
    """Refuse a layer of another structure than the configuration describes; dropout changes no weight's meaning.

    Raises:
        ConfigError: names every field that differs.
    """
    want = _read_spec(config, layer, convention=convention)
    ours, theirs = (dataclasses.replace(x, dropout=0.0, scale=_scale(x), layout=None).to_dict() for x in (spec, want))
    build = "GroupedQueryAttention.from_spec(AttentionSpec.from_hf(config, layer=...))"
    refuse_other(ours, theirs, layer, build)


def _scale(spec: AttentionSpec) -> float:
    return spec.head_dim**-0.5 if spec.scale is None else spec.scale


def _read_weights(state: Mapping[str, Tensor], config: Any, layer: int) -> dict[str, Tensor]:
    data, family = _read(config)
    found = weights_of(state, data, layer)
    if family.weight_offset:
        for name in ("q_norm.weight", "k_norm.weight"):
            if name in found:
                found[name] = found[name] + family.weight_offset
    return found


def _read(config: Any) -> tuple[dict[str, Any], _Family]:
    """The dictionary of the text part, and the family of its class."""
    data = text_part(config)
    family = _family(data)  # first: other classes may well have such keys
    canonical = [name for name in CANONICAL_ONLY if name in data]
    if canonical:
        raise ConfigError(
            f"config must not carry the canonical-only keys {listed(canonical)}; "
            "AttentionSpec.from_dict reads the canonical form, and configurations of this class have no such keys"
        )
    refuse_canonical_keys(data)
    return data, family


def _family(data: Mapping[str, Any]) -> _Family:
    family = _FAMILIES.get(name) if isinstance(name := data.get("model_type"), str) else None
    if family is None and data.get("kv_lora_rank") is not None:
        fault(data, "its attention is latent (kv_lora_rank); read it with LatentSpec.from_hf")
    if family is None:
        raise ConfigError(
            f"model_type must be one of {', '.join(_FAMILIES)}, got {shown(data.get('model_type'))}; "
            "for another model build the AttentionSpec field by field"
        )
    return family


def _biases(data: Mapping[str, Any], family: _Family) -> tuple[bool, bool]:
    """Of q, k and v, and of the output projection."""
    if family.biases in ("none", "always qkv"):
        return family.biases == "always qkv", False
    bias = data.get("attention_bias")
    if not (bias is None or isinstance(bias, bool)):
        fault(data, f"attention_bias must be true or false, got {shown(bias)}")
    return bool(bias), bool(bias) and family.biases == "all"


def _read_scale(data: Mapping[str, Any], head_dim: int, family: _Family) -> float | None:
    if family.scale is None:
        return None
    name, power = family.scale
    value = required(data, name)
    if not is_number(value) or value <= 0:
        fault(data, f"{name} must be a positive number, got {shown(value)}")
    scale = float(value) ** power
    return None if scale == head_dim**-0.5 else scale


def _refuse_specialities(data: Mapping[str, Any]) -> None:
    """Refuse what a spec cannot say."""
    ropes = [rope for name in ("rope_parameters", "rope_scaling") if isinstance(rope := data.get(name), Mapping)]
    ropes += [entry for rope in ropes for entry in rope.values() if isinstance(entry, Mapping)]
    beta = next((rope["llama_4_scaling_beta"] for rope in ropes if rope.get("llama_4_scaling_beta")), None)
    if beta is not None:
        fault(
            data,
            f"llama_4_scaling_beta must be absent or 0, got {shown(beta)}: it scales queries by their position, which "
            "no spec says",
        )
    if data["model_type"] == "gemma3_text":
        for name in ("use_bidirectional_attention", "attn_logit_softcapping"):
            if data.get(name):
                fault(data, f"{name} must be off, got {shown(data[name])}: what it means differs between readers")


def _rotates(data: Mapping[str, Any], layer: int, kind: str, family: _Family) -> bool:
    if family.rotates == "all":
        return True
    if family.rotates == "sliding":  # the full layers between windows do without, unless there are no windows
        return kind == "sliding_attention" or (data["model_type"] == "exaone4" and data.get("sliding_window") is None)
    flags = data.get("no_rope_layers") or []
    if not isinstance(flags, (list, tuple)):
        fault(data, f"no_rope_layers must be a list of 0 and 1, got {shown(flags)}")
    interval = None if data.get("no_rope_layer_interval") is None else integer(data, "no_rope_layer_interval")
    if layer < len(flags):
        rotates = bool(flags[layer])
    elif flags or interval is None:
        fault(data, f"no_rope_layers must say whether layer {layer} rotates, got {flags}")
    else:
        rotates = (layer + 1) % interval != 0
    if not rotates and data["model_type"] == "llama4_text" and data.get("attn_temperature_tuning", True):
        fault(
            data,
            "attn_temperature_tuning must be false, got true: it scales the queries of layers without rope by "
            "their position, which no spec says",
        )
    return rotates


def _layer_type(data: Mapping[str, Any], layer: int, family: _Family) -> str:
    types = data.get("layer_types")
    if types is not None:
        if not isinstance(types, (list, tuple)):
            fault(data, f"layer_types must be a list of the types of all layers, got {shown(types)}")
        if layer >= len(types):
            fault(data, f"layer must be one of the {len(types)} of layer_types, got {layer}")
        kind = types[layer]
    elif data["model_type"] == "gemma3_text":
        kind = "sliding_attention" if (layer + 1) % integer(data, "sliding_window_pattern") else "full_attention"
    elif data["model_type"] in ("qwen2", "qwen3") and data.get("use_sliding_window"):
        kind = "sliding_attention" if layer >= integer(data, "max_window_layers", least=0) else "full_attention"
    elif data["model_type"] == "llama4_text":
        kind = "full_attention" if data.get("attention_chunk_size", ...) is None else "chunked_attention"
    elif family.pattern:
        own = data.get("sliding_window_pattern")
        every = family.pattern if own is None else integer(data, "sliding_window_pattern", least=0)
        slides = every and (layer + 1) % every and data.get("sliding_window") is not None
        kind = "sliding_attention" if slides else "full_attention"
    else:
        kind = "full_attention"
    known = {"full_attention", *(("sliding_attention",) if family.window == "sliding" else ())}
    if not isinstance(kind, str) or kind not in known:
        hint = f"; {_CHUNK_HINT}" if kind == "chunked_attention" else ""
        fault(data, f"layer {layer} must be of type {' or '.join(sorted(known))}, got {shown(kind)}{hint}")
    return kind


def _rope(data: Mapping[str, Any], kind: str, head_dim: int, family: _Family, convention: str) -> RopeSpec:
    layer_type = kind if family.rope_by_type else None
    return RopeSpec.from_hf(dict(data), layer_type=layer_type, head_dim=head_dim, convention=convention)


def _norm(data: Mapping[str, Any], family: _Family, *, rotates: bool) -> QKNorm | None:
    if family.norm is None:
        return None
    if data["model_type"] == "llama4_text" and not (required(data, "use_qk_norm") and rotates):
        return None
    position, scope, weighted = family.norm
    return QKNorm(position, scope, weighted=weighted, eps=required(data, "rms_norm_eps"))


def _window(data: Mapping[str, Any], kind: str, family: _Family) -> int | None:
    if family.window == "none" or (family.window == "sliding" and kind != "sliding_attention"):
        return None
    if family.window == "all" and family.window_flag and not data.get("use_sliding_window"):
        return None
    if "sliding_window" not in data:
        fault(data, "'sliding_window' is missing; null means none")
    window: int | None = data["sliding_window"]
    if isinstance(window, (list, tuple)):
        fault(data, f"sliding_window must be one int, got {shown(window)}; configurations say no window of two sides")
    if window is None and family.window == "sliding":
        fault(data, "sliding_window must be an int, got None, although the layer is of type 'sliding_attention'")
    return window
