"""Rotary keys of transformers configurations in the styles of versions 4 and 5: read strictly, written to be read back.

Version 4 keeps ``rope_theta`` at the top and scaling in ``rope_scaling``; version 5 keeps everything in
``rope_parameters``, one dictionary for all layers or one for each layer type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from polyattn._errors import RopeConfigError
from polyattn._numbers import listed, shortened, shown
from polyattn._rope.axes import RopeAxes
from polyattn._rope.hf_classes import (
    PAIRS,
    class_axes,
    class_head_dim,
    class_head_dim_key,
    class_pairing,
    classes,
    fault,
    model_class,
    reordered,
    size,
)
from polyattn._rope.spec import RopeSpec
from polyattn._rope.variant import is_float32

#: Keys of our canonical forms that no transformers dictionary has: one that carries them is not what it says it is.
CANONICAL_ONLY = ("axes", "interleaved", "original_max_position", "rotary_dim", "schema_version", "variant")
CONVENTIONS = ("serving", "dflash", "eagle")

_ORIGINAL = "original_max_position_embeddings"
#: Required and optional keys of each rope type.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("alpha",)),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "longrope": (
        ("short_factor", "long_factor", _ORIGINAL),
        ("attention_factor", "factor", "short_mscale", "long_mscale"),
    ),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
#: Keys that may stand beside every type. ``llama_4_scaling_beta`` scales queries and is no business of the rotation.
_COMMON = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "llama_4_scaling_beta"),
    *("mrope_section", "mrope_interleaved", "mrope_interleaved_glm"),
)
#: Keys that no configuration has at its top, where nothing would read them. Words that mean many things are left out.
_INSIDE_ONLY = {"rope_type", "mrope_section", "mrope_interleaved", "mrope_interleaved_glm"}.union(
    *(set(required) | set(optional) for required, optional in _KEYS.values())
) - {"factor", "alpha", "truncate", "partial_rotary_factor", _ORIGINAL}
#: Keys that Hunyuan writes beside ``alpha``, where nothing reads them.
_IDLE_BESIDE_ALPHA = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
#: Where version 4 keeps what version 5 keeps in the dictionary.
_AT_THE_TOP = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "global_rope_theta"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    _ORIGINAL: (_ORIGINAL,),
}


def read(
    config: Any, *, layer_type: str | None, head_dim: int | None, interleaved: bool | None, convention: str
) -> RopeSpec:
    """See :meth:`RopeSpec.from_hf`."""
    if convention not in CONVENTIONS:
        raise RopeConfigError(f"convention must be one of {', '.join(CONVENTIONS)}, got {shown(convention)}")
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise RopeConfigError(
            f"config must be a transformers configuration or its dictionary, got {type(config).__name__}"
        )
    data = dict(found)
    if data.get("text_config") is not None and "max_position_embeddings" not in data:
        fault(data, "it is a composite; read the configuration of its text part, text_config")
    refuse_canonical_keys(data)
    _refuse_rope_at_the_top(data)
    entry = _entry(data, layer_type)
    refuse_canonical_keys(entry)
    kind = _kind(data, entry)
    _check_keys(data, entry, kind)
    if kind == "dynamic" and convention == "eagle":
        fault(
            data, "rope_type 'dynamic' is refused under convention 'eagle': its table followed what was decoded before"
        )
    max_position = size(data, "max_position_embeddings", _needed(data, data, "max_position_embeddings"))
    if entry.get("max_position_embeddings", max_position) != max_position:
        fault(
            data, f"max_position_embeddings is {max_position}, and {entry['max_position_embeddings']} beside rope_type"
        )
    width = class_head_dim(data, layer_type) if head_dim is None else size(data, "head_dim", head_dim)
    parameters = {name: entry[name] for names in _KEYS[kind] for name in names if entry.get(name) is not None}
    original = parameters.pop(_ORIGINAL, max_position if kind == "dynamic" else None)
    if original is not None:
        size(data, _ORIGINAL, original)
    if kind == "longrope":
        parameters["switch"] = "long" if max_position > original else "short"
    values: dict[str, Any] = {
        "theta": _theta(data, entry),
        "head_dim": width,
        "rotary_dim": _rotary_dim(
            data, entry, kind, width, "head_dim" if head_dim else class_head_dim_key(data, layer_type)
        ),
        "interleaved": _pairing(data, interleaved, convention),
        "axes": _axes(data, entry),
    }
    try:
        return RopeSpec(
            variant=kind, max_position=max_position, original_max_position=original, parameters=parameters, **values
        )
    except RopeConfigError as error:
        raise RopeConfigError(f"config of model_type {shown(data.get('model_type'))}: {error}") from error


def write(spec: RopeSpec, model_type: str) -> dict[str, Any]:
    """See :meth:`RopeSpec.to_hf`."""
    data: dict[str, Any] = {"model_type": model_type, "head_dim": spec.head_dim}
    if spec.variant not in _KEYS:
        fault(data, f"variant '{spec.variant}' is no rope_type there; those are {', '.join(_KEYS)}")
    if model_type in classes()["rope_interleave"]:
        data["rope_interleave"] = spec.interleaved
    pairing = class_pairing(data)
    if pairing is None:
        fault(data, "how it pairs channels is not known, so the spec's pairing could be lost")
    if pairing != spec.interleaved:
        fault(
            data,
            f"it pairs {PAIRS[pairing]}, the spec {PAIRS[spec.interleaved]} (interleaved={spec.interleaved}); "
            "transformers dictionaries do not carry the pairing",
        )
    partial = spec.rotary_dim != spec.head_dim
    if partial and spec.variant == "default" and model_type not in classes()["partial"]:
        fault(
            data, f"it ignores partial_rotary_factor, but rotary_dim is {spec.rotary_dim} of head_dim {spec.head_dim}"
        )
    rope: dict[str, Any] = {"rope_type": spec.variant, "rope_theta": spec.theta}
    if partial or model_type in classes()["partial_required"]:
        rope["partial_rotary_factor"] = spec.rotary_dim / spec.head_dim
    if _ORIGINAL in _KEYS[spec.variant][0]:
        rope[_ORIGINAL] = spec.original_max_position
    if spec.variant == "longrope":
        data[_ORIGINAL] = spec.original_max_position  # Phi-3's class has the field at the top, and it wins
    rope |= {
        name: value for name, value in spec.to_dict()["parameters"].items() if value is not None and name != "switch"
    }
    if spec.axes is not None:
        rope["mrope_section"] = list(reordered(spec.axes.sections, spec.axes.layout, to_hf=True))
        if spec.axes.layout in {"interleaved", "glm"}:
            rope["mrope_interleaved" if spec.axes.layout == "interleaved" else "mrope_interleaved_glm"] = True
    data.update(max_position_embeddings=spec.max_position, rope_parameters=rope)
    back = read(data, layer_type=None, head_dim=None, interleaved=None, convention="serving").to_dict()
    lost = [
        f"{name} {value} would be read as {back[name]}" for name, value in spec.to_dict().items() if back[name] != value
    ]
    if lost:
        fault(data, f"it cannot carry this spec: {'; '.join(lost)}")
    return data


def refuse_canonical_keys(dictionary: Mapping[str, Any]) -> None:
    """Refuse a transformers dictionary that carries keys of our canonical form, rather than overwrite what they say.

    Raises:
        RopeConfigError: a key is canonical-only; the message names it.
    """
    found = [name for name in CANONICAL_ONLY if name in dictionary]
    if found:
        raise RopeConfigError(
            f"config must not carry the canonical-only keys {listed(found)}; "
            "transformers dictionaries have no such keys; the canonical form, which has, is the one with "
            "'schema_version', and from_dict reads it"
        )


def _refuse_rope_at_the_top(data: Mapping[str, Any]) -> None:
    found = sorted(name for name in _INSIDE_ONLY if data.get(name) is not None)
    found += ["type"] if data.get("type") in [*_KEYS] else []
    if found:
        fault(
            data,
            f"{listed(found)} must stand in rope_parameters (or rope_scaling), not at the top; "
            "model_type, max_position_embeddings and the width of a head stand at the top",
        )


def _entry(data: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The rotary keys of one layer type, wherever the configuration keeps them."""
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
    nested = bool(mappings) and all(mappings)
    # Older files scale full attention only; sliding attention is plain, in Gemma 3 and ModernBERT with its own base.
    bases = [data[name] for name in ("rope_local_base_freq", "local_rope_theta") if data.get(name) is not None]
    if model_class(data) == "olmo3" and rope and data.get("rope_parameters") is None:
        bases.append(data.get("rope_theta"))
    if bases and not nested:
        plain = {"rope_type": "default", "rope_theta": bases[0]}
        rope, nested = {"full_attention": _with_top(data, rope), "sliding_attention": plain}, True
    if nested:
        if not isinstance(layer_type, str) or layer_type not in rope:
            fault(data, f"layer_type must be one of {listed(rope)}, got {shown(layer_type)}")
        if rope[layer_type] is None:
            fault(data, f"layer_type '{layer_type}' has no rotary embedding")
        entry = {**dict(_top(data)), **rope[layer_type]}
    else:
        if layer_type is not None and layer_type not in (data.get("layer_types") or ()):
            fault(data, f"layer_type must be None, got {shown(layer_type)}: one rope serves all layers")
        entry = _with_top(data, rope)
    thetas = data.get("layer_rope_theta") or []
    if not isinstance(thetas, Sequence) or any(theta and theta != entry.get("rope_theta") for theta in thetas):
        fault(data, f"layer_rope_theta gives layers other bases, {shown(thetas)}; read one spec for each rope_theta")
    return entry


def _top(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, spellings in _AT_THE_TOP.items():
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


def _kind(data: Mapping[str, Any], entry: dict[str, Any]) -> str:
    """The rope type, by whatever name."""
    aliases = {"mrope": "default", "su": "longrope"}
    if model_class(data) in {"phi3", "phi4_multimodal"}:
        aliases["yarn"] = "longrope"
    names = [entry[key] for key in ("rope_type", "type") if entry.get(key) is not None]
    kinds = {aliases.get(name, name) if isinstance(name, str) else shown(name) for name in names}
    if len(kinds) > 1:
        fault(data, f"rope_type and type contradict each other, got {shown(names[0])} and {shown(names[1])}")
    if not kinds and not set(entry) <= {*_AT_THE_TOP, "rope_type", "type"}:
        fault(data, f"'rope_type' is missing beside {listed(sorted(map(str, entry)))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in _KEYS:
        fault(data, f"rope_type must be one of {', '.join(_KEYS)}, got {shown(kind)}")
    if "mrope" in names and entry.get("mrope_section") is None:
        fault(data, "'mrope_section' is missing beside type 'mrope'")
    if _ORIGINAL not in _KEYS[kind][0] and data.get(_ORIGINAL) is not None:
        entry.pop(_ORIGINAL, None)  # a field of Phi-3's class, which means nothing to the other types
    return kind


def _check_keys(data: Mapping[str, Any], entry: dict[str, Any], kind: str) -> None:
    required, optional = _KEYS[kind]
    accepted = (*required, *optional, *_COMMON)
    if kind == "dynamic" and entry.get("alpha") is not None:
        accepted += _IDLE_BESIDE_ALPHA
        entry["factor"] = entry.get("factor") or 1.0
        if entry.get("mscale") != entry.get("mscale_all_dim"):
            fault(data, "mscale and mscale_all_dim must be equal beside alpha, where nothing reads them")
    faults = [f"{shown(name)} is missing" for name in required if entry.get(name) is None]
    faults += [f"{shown(name)} is unknown" for name in entry if name not in accepted]
    if faults:
        fault(
            data, f"{shortened(', '.join(faults))}; keys of rope_type '{kind}' are {', '.join(dict.fromkeys(accepted))}"
        )


def _needed(data: Mapping[str, Any], where: Mapping[str, Any], name: str) -> Any:
    if where.get(name) is None:
        fault(data, f"{shown(name)} is missing")
    return where[name]


def _theta(data: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
    spellings = _AT_THE_TOP["rope_theta"]
    theta = entry.get("rope_theta")
    if theta is None:
        fault(data, f"'rope_theta' is missing; it stands in rope_parameters, or at the top as {' or '.join(spellings)}")
    if not is_float32(theta) or theta <= 1:
        name = next((name for name in spellings if data.get(name) == theta), "rope_theta")
        fault(data, f"{name} must be a finite float32 number greater than 1, got {shown(theta)}")
    return float(theta)


def _rotary_dim(data: Mapping[str, Any], entry: Mapping[str, Any], kind: str, width: int, key: str) -> int:
    """How many channels rotate; ``key`` is what gives the width of a head."""
    factor = 1.0 if kind == "proportional" else _partial(data, entry, kind)
    rotated = int(width * factor)
    if rotated < 2 or rotated % 2:
        what, got = (
            (key, f"{width}")
            if factor == 1
            else (f"{key} * partial_rotary_factor", f"int({width} * {factor}) = {rotated}")
        )
        fault(data, f"{what} must be an even number of channels, which rotate in pairs, got {got}")
    return rotated


def _partial(data: Mapping[str, Any], entry: Mapping[str, Any], kind: str) -> float:
    factor = entry.get("partial_rotary_factor")
    if factor is None:
        if kind == "default" and model_class(data) in classes()["partial_required"]:
            fault(data, "'partial_rotary_factor' is missing, and this class has a default of its own")
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        fault(data, f"partial_rotary_factor must be a number in (0, 1], got {shown(factor)}")
    return factor


def _pairing(data: Mapping[str, Any], interleaved: bool | None, convention: str) -> bool:
    if interleaved is not None and not isinstance(interleaved, bool):
        fault(data, f"interleaved must be True, False or None, got {shown(interleaved)}")
    known = class_pairing(data) if convention == "serving" else False
    if known is None:
        if interleaved is None:
            fault(
                data, "it does not tell how channels pair; pass interleaved=True (adjacent channels) or False (halves)"
            )
        return interleaved
    if interleaved is not None and interleaved != known:
        who = "this class" if convention == "serving" else f"convention '{convention}'"
        fault(data, f"interleaved must be None or {known}, got {interleaved}: {who} pairs {PAIRS[known]}")
    return known


def _axes(data: Mapping[str, Any], entry: Mapping[str, Any]) -> RopeAxes | None:
    flags = {"interleaved": entry.get("mrope_interleaved"), "glm": entry.get("mrope_interleaved_glm")}
    asked = [name for name, flag in flags.items() if flag]
    own, own_sections = class_axes(data)
    layout = own or (asked[0] if asked else "contiguous")
    sections = entry.get("mrope_section") or own_sections
    if not isinstance(sections, (list, tuple, NoneType)):
        fault(data, f"mrope_section must be a list of ints, got {shown(sections)}")
    if asked not in ([], [layout]) or flags.get(layout) is False:
        fault(data, f"mrope_interleaved must agree with the lane order '{layout}', got {flags}")
    if sections is None:
        if asked:
            fault(data, "'mrope_section' is missing beside mrope_interleaved")
        return None
    if model_class(data) == "hunyuan_vl_text":
        fault(data, "mrope_section is not supported: this class cuts channels, not pairs of them, which is no rotation")
    return RopeAxes(reordered(sections, layout, to_hf=False), layout)
