"""The rotary keys of one layer type, wherever a transformers configuration keeps them, and what nothing would read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyattn import RopeConfigError, rope_variants
from polyattn.messages import listed, shown
from polyattn.rope import CANONICAL_ONLY
from polyattn_readers.model_classes import classes, fault, known_classes, model_class, rotates

ORIGINAL = "original_max_position_embeddings"
#: Where version 4 keeps what version 5 keeps in the dictionary.
AT_THE_TOP = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "global_rope_theta"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    ORIGINAL: (ORIGINAL,),
}
#: Keys that no configuration has at its top, where nothing would read them. Words that mean many things are left out.
_INSIDE_ONLY = frozenset((
    *("rope_type", "mrope_section", "mrope_interleaved", "mrope_interleaved_glm", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("short_mscale", "long_mscale"),
))  # fmt: skip
#: The base of layers that are plain, beside those that ``rope_theta`` and the scaling belong to.
_PLAIN_BASES = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
#: Keys at the top whose names speak of the rope and that are read of every class.
_READ = {"rope_parameters", "rope_scaling", "rope_theta", "rope_interleave", "partial_rotary_factor"}


def refuse_canonical_keys(dictionary: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> None:
    """Refuse a transformers dictionary that carries keys of our canonical form, rather than overwrite what they say.

    Args:
        dictionary: the configuration, or a rope dictionary in it.
        model: the configuration, where that is not ``dictionary``.

    Raises:
        RopeConfigError: a key is canonical-only; the message names it.
    """
    found = canonical_keys(dictionary if model is None else model, dictionary)
    if found:
        raise RopeConfigError(
            f"config must not carry the canonical-only keys {listed(found)}; "
            "configurations of this class have no such keys; the canonical form, which has, is the one with "
            "'schema_version', and from_dict reads it"
        )


def canonical_keys(model: Mapping[str, Any], dictionary: Mapping[str, Any]) -> list[str]:
    """The canonical-only keys of ``dictionary``; some classes have a ``rotary_dim`` at the top."""
    own = "rotary_dim" if dictionary is model and model_class(model) in classes()["rotary_dim"] else None
    return [name for name in CANONICAL_ONLY if name in dictionary and name != own]


def refuse_unread_keys(data: Mapping[str, Any]) -> None:
    """Refuse keys at the top that say something of the rope where nothing reads it.

    Raises:
        RopeConfigError: names them.
    """
    found = sorted(name for name in _INSIDE_ONLY if data.get(name) is not None)
    found += ["type"] if data.get("type") in rope_variants.names() else []
    if found:
        fault(
            data,
            f"{listed(found)} must stand in rope_parameters (or rope_scaling), not at the top; "
            "model_type, max_position_embeddings and the width of a head stand at the top",
        )
    name = model_class(data)
    read = {*_READ, *classes()["rotates_if"].get(name, ()), *(["rotary_dim"] * (name in classes()["rotary_dim"]))}
    read |= {key for key, models in classes()["keys"].items() if name in models or name not in known_classes()}
    read |= {key for key in ("rotary_pct", "rope_pct") if data.get(key) == 1}
    unread = [
        key
        for key, value in data.items()
        if value is not None and key not in read and re.search("rope|rotary|theta", str(key), re.IGNORECASE)
    ]
    if unread:
        fault(data, f"nothing reads {listed(unread)}, which may change the rope; take out what does not")


def rope_entry(data: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The rotary keys of one layer type, those at the top included.

    Raises:
        RopeConfigError: keys contradict each other, or the layer type has no rope.
    """
    given = [data[name] for name in ("rope_parameters", "rope_scaling") if data.get(name) is not None]
    if any(not isinstance(rope, Mapping) for rope in given) or any(rope != given[0] for rope in given):
        fault(
            data,
            f"rope_parameters and rope_scaling must be one dictionary, or null, got {listed(given)}",
        )
    if data.get("dual_chunk_attention_config") is not None:
        fault(data, "dual_chunk_attention_config is not supported: it rotates queries several times")
    rope = dict(given[0]) if given else {}
    mappings = [isinstance(value, Mapping) for value in rope.values() if value is not None]
    if mappings and all(mappings):
        entry = _nested(data, rope, layer_type)
    elif ropes := _older_ropes(data, rope):
        entry = _nested({**data, "rope_theta": None}, ropes, layer_type)
    else:
        if layer_type is not None and layer_type not in (data.get("layer_types") or ()):
            fault(data, f"layer_type must be None, got {shown(layer_type)}: one rope serves all layers")
        if layer_type is not None and not rotates(data, layer_type):
            fault(data, f"layer_type '{layer_type}' has no rotary embedding in this class")
        if layer_type is not None and model_class(data) in classes()["by_layer"]:
            fault(data, f"rope_parameters must have an entry for each layer type in this class, got {rope or 'none'}")
        if not given and model_class(data) in classes()["scaled"]:
            fault(data, "rope_parameters is missing, and this class has a default of its own that scales")
        entry = _with_top(data, rope)
    thetas = data.get("layer_rope_theta") or []
    if not isinstance(thetas, Sequence) or any(theta and theta != entry.get("rope_theta") for theta in thetas):
        fault(data, f"layer_rope_theta gives layers other bases, {thetas}; read one spec for each rope_theta")
    return entry


def _older_ropes(data: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The ropes of each layer type in older files, which scale some layers and keep a base for the plain others.

    Gemma 3, ModernBERT, OLMo 3 and MiMo scale full attention; DeepSeek-V4 the branches that compress.
    """
    if data.get("compress_rope_theta") is not None:
        compress = {**rope, "rope_theta": data["compress_rope_theta"]}
        if "yarn" in (rope.get("rope_type"), rope.get("type")):
            compress.setdefault("attention_factor", 1.0)  # as the class does: it leaves cos and sin as they are
        return {"main": {"rope_type": "default", "rope_theta": data.get("rope_theta")}, "compress": compress}
    bases = [data[name] for name in _PLAIN_BASES if data.get(name) is not None]
    if model_class(data) == "olmo3" and rope and data.get("rope_parameters") is None:
        bases.append(data.get("rope_theta"))
    if not bases:
        return {}
    plain = {"rope_type": "default", "rope_theta": bases[0]}
    return {"full_attention": _with_top(data, rope), "sliding_attention": plain}


def _nested(data: Mapping[str, Any], ropes: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    if not isinstance(layer_type, str) or layer_type not in ropes:
        fault(data, f"layer_type must be one of {listed(ropes)}, got {shown(layer_type)}")
    if ropes[layer_type] is None:
        fault(data, f"layer_type '{layer_type}' has no rotary embedding")
    thetas = [rope.get("rope_theta") for rope in ropes.values() if rope is not None]
    for name in (*AT_THE_TOP["rope_theta"], "compress_rope_theta", *_PLAIN_BASES):
        if data.get(name) not in (None, *thetas) and None not in thetas:
            fault(data, f"{name} is {shown(data[name])} at the top and no layer type has it, they have {thetas}")
    parts = [rope.get("partial_rotary_factor") for rope in ropes.values() if rope is not None]
    for name in AT_THE_TOP["partial_rotary_factor"]:
        if data.get(name) not in (None, *parts) and None not in parts:
            fault(data, f"{name} is {shown(data[name])} at the top and no layer type has it, they have {parts}")
    return {**dict(_top(data)), **ropes[layer_type]}


def _top(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, spellings in AT_THE_TOP.items():
        yield from ((name, data[spelling]) for spelling in spellings if data.get(spelling) is not None)


def _with_top(data: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    entry = dict(rope)
    for name, value in _top(data):
        if entry.get(name, value) not in (None, value):
            fault(
                data,
                f"{name} is {shown(value)} at the top and {shown(entry[name])} elsewhere: they contradict each other",
            )
        entry[name] = value
    return entry
