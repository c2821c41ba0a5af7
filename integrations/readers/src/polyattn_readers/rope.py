"""Rotary keys of transformers configurations in the styles of versions 4 and 5: read strictly, written to be read back.

Version 4 keeps ``rope_theta`` at the top and scaling in ``rope_scaling``; version 5 keeps everything in
``rope_parameters``, one dictionary for all layers or one for each layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from polyattn import RopeConfigError, RopeSpec, rope_variants
from polyattn.messages import is_float32, listed, shortened, shown
from polyattn.registry import FIRST_PARTY, ROPE
from polyattn.rope import UNBOUNDED, RopeAxes
from polyattn_readers.model_classes import (
    PAIRS,
    class_axes,
    class_head_dim,
    class_head_dim_key,
    class_pairing,
    class_theta,
    classes,
    fault,
    model_class,
    refuse_class,
    reordered,
    size,
    with_common_names,
    written_widths,
)
from polyattn_readers.rope_entry import (
    AT_THE_TOP,
    ORIGINAL,
    refuse_canonical_keys,
    refuse_unread_keys,
    rope_entry,
)

CONVENTIONS = ("serving", "dflash", "eagle")
#: Keys that may stand beside every type. ``llama_4_scaling_beta`` scales queries and does not concern the rotation.
_COMMON = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "llama_4_scaling_beta"),
    *("mrope_section", "mrope_interleaved", "mrope_interleaved_glm"),
)
#: Keys that Hunyuan writes beside ``alpha``, where nothing reads them.
_IDLE_BESIDE_ALPHA = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


class RopeReader:
    """Reads and writes rotary specs as configurations of transformers; what ``RopeSpec.from_hf`` looks up by name."""

    name = "hf_rope"
    api_version = 1

    def read(
        self,
        config: Any,
        *,
        layer_type: str | None = None,
        head_dim: int | None = None,
        interleaved: bool | None = None,
        convention: str = "serving",
        max_position: int | None = None,
    ) -> RopeSpec:
        """See :meth:`polyattn.RopeSpec.from_hf`."""
        return _read(config, layer_type, head_dim, interleaved, convention, max_position)

    def write(self, spec: RopeSpec, model_type: str) -> dict[str, Any]:
        """See :meth:`polyattn.RopeSpec.to_hf`."""
        return _write(spec, model_type)


def _read(
    data: Any, layer_type: str | None, head_dim: int | None, interleaved: bool | None, convention: str, most: int | None
) -> RopeSpec:
    if convention not in CONVENTIONS:
        raise RopeConfigError(f"convention must be one of {', '.join(CONVENTIONS)}, got {shown(convention)}")
    found = data.to_dict() if hasattr(data, "to_dict") else data
    if not isinstance(found, Mapping):
        raise RopeConfigError(
            f"config must be a transformers configuration or its dictionary, got {type(data).__name__}"
        )
    data = with_common_names(found)
    if data.get("text_config") is not None and "max_position_embeddings" not in data:
        fault(data, "it is a composite; read the configuration of its text part, text_config")
    refuse_class(data)
    refuse_canonical_keys(data)
    refuse_unread_keys(data)
    entry = rope_entry(data, layer_type)
    refuse_canonical_keys(entry, data)
    kind = _kind(data, entry)
    keys = _keys_of(kind)
    if keys is None and kind in rope_variants.names():
        fault(data, f"rope_type must be a variant that declares hf_keys, got {shown(kind)}, which declares none")
    if keys is None:
        fault(data, f"rope_type must be one of {', '.join(_readable())}, got {shown(kind)}")
    _check_keys(data, entry, kind, keys)
    if kind == "dynamic" and convention == "eagle":
        fault(
            data, "rope_type 'dynamic' is refused under convention 'eagle': its table followed what was decoded before"
        )
    max_position = _max_position(data, most)
    if entry.get("max_position_embeddings", max_position) != max_position:
        fault(
            data, f"max_position_embeddings is {max_position}, and {entry['max_position_embeddings']} beside rope_type"
        )
    width = class_head_dim(data, layer_type) if head_dim is None else _given_width(data, layer_type, head_dim)
    parameters = {name: entry[name] for name in keys if entry.get(name) is not None}
    original = parameters.pop(ORIGINAL, max_position if kind == "dynamic" else None)
    if original is not None:
        size(data, ORIGINAL, original)
    if kind == "longrope":
        parameters["switch"] = "long" if max_position > original else "short"
    values: dict[str, Any] = {
        "theta": _theta(data, entry, convention),
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


def _write(spec: RopeSpec, model_type: str) -> dict[str, Any]:
    if spec.max_position == UNBOUNDED:
        raise RopeConfigError(
            f"max_position must be the longest sequence of the model in an export, got {UNBOUNDED}, which is what the "
            "short form of a rope in a config stands for; give the rope in the canonical form there"
        )
    width = "qk_rope_head_dim" if model_type in classes()["keys"]["qk_rope_head_dim"] else "head_dim"
    data: dict[str, Any] = {"model_type": model_type, width: spec.head_dim}
    keys = _keys_of(spec.variant)
    if keys is None:
        fault(
            data,
            f"variant '{spec.variant}' declares no hf_keys, so no rope_type stands for it there",
        )
    data |= {key: values[0] for key, values in classes()["rotates_if"].get(model_type, {}).items()}
    refuse_class(data)
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
    if keys.get(ORIGINAL):
        rope[ORIGINAL] = spec.original_max_position
    if spec.variant == "longrope":
        data[ORIGINAL] = spec.original_max_position  # Phi-3's class has the field at the top, and it wins
    rope |= {
        name: value for name, value in spec.to_dict()["parameters"].items() if value is not None and name != "switch"
    }
    if spec.axes is not None:
        rope["mrope_section"] = list(reordered(spec.axes.sections, spec.axes.layout, to_hf=True))
        if spec.axes.layout in {"interleaved", "glm"}:
            rope["mrope_interleaved" if spec.axes.layout == "interleaved" else "mrope_interleaved_glm"] = True
    data.update(max_position_embeddings=spec.max_position, rope_parameters=rope)
    back = RopeSpec.from_hf(data).to_dict()
    lost = [
        f"{name} {value} would be read as {back[name]}" for name, value in spec.to_dict().items() if back[name] != value
    ]
    if lost:
        fault(data, f"it cannot carry this spec: {'; '.join(lost)}")
    return data


def _kind(data: Mapping[str, Any], entry: dict[str, Any]) -> str:
    """The rope type, by whatever name."""
    aliases = {"mrope": "default", "su": "longrope"}
    if model_class(data) in {"phi3", "phi4_multimodal"}:
        aliases["yarn"] = "longrope"
    names = [entry[key] for key in ("rope_type", "type") if entry.get(key) is not None]
    kinds = {aliases.get(name, name) if isinstance(name, str) else shown(name) for name in names}
    if len(kinds) > 1:
        fault(data, f"rope_type and type contradict each other, got {shown(names[0])} and {shown(names[1])}")
    if not kinds and not set(entry) <= {*AT_THE_TOP, "rope_type", "type"}:
        fault(data, f"'rope_type' is missing beside {listed(sorted(map(str, entry)))}")
    kind = kinds.pop() if kinds else "default"
    if "mrope" in names and entry.get("mrope_section") is None:
        fault(data, "'mrope_section' is missing beside type 'mrope'")
    return kind


def _keys_of(kind: str) -> Mapping[str, bool] | None:
    """The keys that the variant ``kind`` declares, with whether each is required; ``None`` where it declares none."""
    known = kind in rope_variants.names() or kind in FIRST_PARTY[ROPE]  # get says what to install
    keys: Mapping[str, bool] | None = getattr(rope_variants.get(kind), "hf_keys", None) if known else None
    if keys is not None and not (isinstance(keys, Mapping) and all(isinstance(key, str) for key in keys)):
        raise RopeConfigError(
            f"hf_keys of RoPE variant '{kind}' must be a mapping from keys to bools, got {shown(keys)}"
        )
    return keys


def _readable() -> list[str]:
    """The variants that configurations may name."""
    return sorted({*rope_variants.names(), *FIRST_PARTY[ROPE]})


def _check_keys(data: Mapping[str, Any], entry: dict[str, Any], kind: str, keys: Mapping[str, bool]) -> None:
    if not keys.get(ORIGINAL) and data.get(ORIGINAL) is not None:
        entry.pop(ORIGINAL, None)  # a field of Phi-3's class, which means nothing to the other types
    required = [name for name, needed in keys.items() if needed]
    accepted = (*keys, *_COMMON)
    if kind == "dynamic" and entry.get("alpha") is not None:
        accepted += _IDLE_BESIDE_ALPHA
        entry["factor"] = entry.get("factor") or 1.0
        if entry.get("mscale") != entry.get("mscale_all_dim"):
            fault(data, "mscale and mscale_all_dim must be equal beside alpha, where nothing reads them")
    faults = [f"{shown(name)} is missing" for name in required if entry.get(name) is None]
    faults += [f"{shown(name)} is unknown" for name in entry if name not in accepted]
    if kind not in FIRST_PARTY[ROPE]:
        above = [name for name in keys if name != ORIGINAL and name not in entry and data.get(name) is not None]
        faults += [f"{shown(name)} must stand beside rope_type, not at the top" for name in above]
    if faults:
        fault(
            data, f"{shortened(', '.join(faults))}; keys of rope_type '{kind}' are {', '.join(dict.fromkeys(accepted))}"
        )


def _given_width(data: Mapping[str, Any], layer_type: str | None, given: int) -> int:
    """The argument ``head_dim``, which fills in what the configuration leaves open and changes nothing."""
    size(data, "head_dim", given)
    key, said = class_head_dim_key(data, layer_type), written_widths(data, layer_type)
    if len(said) == 1 and given not in said:
        fault(data, f"head_dim must be None or {shown(*said)}, as '{key}' says, got {shown(given)}; leave it out")
    return given


def _max_position(data: Mapping[str, Any], given: int | None) -> int:
    found = data.get("max_position_embeddings")
    if found is None and given is None:
        fault(data, "'max_position_embeddings' is missing; add it, or pass max_position=")
    if None not in (found, given) and found != given:
        fault(data, f"max_position must be None or {found}, as max_position_embeddings says, got {shown(given)}")
    return size(data, "max_position_embeddings" if given is None else "max_position", found if given is None else given)


def _theta(data: Mapping[str, Any], entry: Mapping[str, Any], convention: str) -> float:
    spellings = AT_THE_TOP["rope_theta"]
    theta = entry.get("rope_theta")
    fixed = classes()["fixed_theta"].get(model_class(data))
    if fixed is not None and theta not in (None, fixed):
        fault(data, f"rope_theta is {shown(theta)}, but this class has {fixed} and does not read it")
    if theta is None:
        theta = class_theta(data) if fixed is None and convention != "serving" else fixed
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
    if key == "qk_rope_head_dim" and factor != 1:  # the factor is of the whole head, of which that is the rotated part
        if int(factor * (data.get("head_dim") or 0)) != width:
            fault(data, f"partial_rotary_factor {factor} of head_dim {data.get('head_dim')} must be {key}, {width}")
        return width
    own = data.get("rotary_dim")
    if own is None and model_class(data) in classes()["fixed_theta"]:
        fault(data, "'rotary_dim' is missing")
    if own is not None:
        read_alone = classes()["rotary_dim"][model_class(data)] and entry.get("partial_rotary_factor") is None
        if not read_alone and rotated != own:
            fault(data, f"rotary_dim is {shown(own)}, but {rotated} channels rotate by partial_rotary_factor")
        rotated, factor, key = size(data, "rotary_dim", own), 1.0, "rotary_dim"
    if rotated < 2 or rotated % 2:
        what, got = (
            (key, f"{rotated}")
            if factor == 1
            else (f"{key} * partial_rotary_factor", f"int({width} * {factor}) = {rotated}")
        )
        fault(data, f"{what} must be an even number of channels, which rotate in pairs, got {got}")
    return rotated


def _partial(data: Mapping[str, Any], entry: Mapping[str, Any], kind: str) -> float:
    factor = entry.get("partial_rotary_factor")
    if factor is None:
        if model_class(data) in classes()["partial_required"]:
            fault(data, "'partial_rotary_factor' is missing, and this class has a default of its own")
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        fault(data, f"partial_rotary_factor must be a number in (0, 1], got {shown(factor)}")
    return factor


def _pairing(data: Mapping[str, Any], interleaved: bool | None, convention: str) -> bool:
    if interleaved is not None and not isinstance(interleaved, bool):
        fault(data, f"interleaved must be True, False or None, got {shown(interleaved)}")
    known = class_pairing(data) if convention == "serving" else False
    if known is False and data.get("rope_interleave"):
        fault(data, f"rope_interleave is true, but convention '{convention}' pairs {PAIRS[False]}; take one of them")
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
        fault(data, "mrope_section is not supported: this class cuts channels, not pairs; that is not a rotation")
    return RopeAxes(reordered(sections, layout, to_hf=False), layout)
