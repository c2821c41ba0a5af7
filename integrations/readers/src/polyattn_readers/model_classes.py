"""What transformers' model classes decide by themselves about their rope; the facts stand in ``model_classes.json``.

A configuration does not say which channels form a pair, how several axes share the lanes, or whether the class reads
``partial_rotary_factor`` at all. The lists were taken from transformers 5.19.0; a test compares every class with them.

* ``half``, ``adjacent``: the pairing; ``rope_interleave``: classes with a field for it.
* ``partial``: classes that rotate part of a head under plain rope; ``partial_required``: whose own default is a part.
* ``axes``: the order of lanes of several axes, with each class's own sections.
* ``refused``: classes whose rotation no spec describes, by reason; ``rotates_if``: values under which a class rotates;
  ``local_only``: classes of which only sliding layers rotate.
* ``keys``: keys at the top that only some classes read. Those of ``qk_rope_head_dim`` have a part of each head for the
  rope alone. ``rotary_dim``: classes that have this key, false where they do not compute with it.
* ``names``: other names of sizes and base; ``wide_full_attention``: classes whose full attention has wider heads.
* ``by_layer``: classes with a rope for each layer type; ``scaled``: classes that scale when nothing is said.
* ``fixed_theta``: where the code fixes the base; ``theta``: the base of a class when none is given, unless that is
  10000 (null: it is not one number).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NoReturn

from polyattn import RopeConfigError
from polyattn.messages import shown

QUOTIENT = "hidden_size / num_attention_heads"
PAIRS = {True: "adjacent channels", False: "halves"}


@functools.cache
def classes() -> dict[str, Any]:
    """The lists of model classes."""
    source = resources.files("polyattn_readers").joinpath("model_classes.json")  # also inside a zip
    lists: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return lists


@functools.cache
def known_classes() -> frozenset[str]:
    """The classes whose pairing is known."""
    return frozenset(name for kind in ("half", "adjacent", "rope_interleave") for name in classes()[kind])


def model_class(data: Mapping[str, Any]) -> str:
    """The class that holds the rope: older files of composite models name the whole, newer ones the text part."""
    name = data.get("model_type")
    if not isinstance(name, str):
        return ""
    return f"{name}_text" if name not in known_classes() and f"{name}_text" in known_classes() else name


def with_common_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which sizes and base stand under the names that most classes have for them.

    Raises:
        RopeConfigError: the two names have different values.
    """
    renamed = dict(data)
    for name, own in classes()["names"].get(model_class(data), {}).items():
        place, _, key = own.rpartition(".")
        found = data.get(place) if place else data
        value = found.get(key) if isinstance(found, Mapping) else None
        if None not in (value, data.get(name)) and value != data[name]:
            fault(data, f"{name} is {shown(data[name])} and {own} is {shown(value)}: they contradict each other")
        if value is not None:
            renamed[name] = value
    return renamed


def refuse_class(data: Mapping[str, Any]) -> None:
    """Refuse a class whose rotation no spec describes, and a configuration of a model that does not rotate.

    Raises:
        RopeConfigError: with the reason.
    """
    name = model_class(data)
    for reason, models in classes()["refused"].items():
        if name in models:
            fault(data, f"the rope of this class is not supported: {reason}")
    kind = data.get("position_embedding_type")
    unread = name in known_classes() and kind != "nope"  # ModernBERT's files say "absolute", which its class ignores
    says_so = isinstance(kind, str) and any(word in kind for word in ("rope", "rotary"))
    if kind is not None and not unread and not says_so:
        fault(data, f"position_embedding_type is {shown(kind)}, so this model has no rotary embedding")
    for key, values in classes()["rotates_if"].get(name, {}).items():
        if data.get(key) not in values:
            fault(
                data,
                f"{key} is {shown(data.get(key))}, so this model has no rotary embedding; "
                f"it has one if that is {shown(values[0])}",
            )


def rotates(data: Mapping[str, Any], layer_type: str) -> bool:
    """Whether layers of this type rotate: recurrent and convolutional ones do not, nor some classes' full attention."""
    if model_class(data) in classes()["local_only"] and layer_type == "full_attention":
        return model_class(data).startswith("exaone") and data.get("sliding_window") is None
    return layer_type != "linear_attention" and any(word in layer_type for word in ("attention", "hybrid", "sparse"))


def class_pairing(data: Mapping[str, Any]) -> bool | None:
    """Whether the class pairs adjacent channels; ``None`` where it is not known."""
    name, given = model_class(data), data.get("rope_interleave")
    if given is not None and not isinstance(given, bool):
        fault(data, f"rope_interleave must be true or false, got {shown(given)}")
    if name in classes()["rope_interleave"]:
        return given is not False
    pairing = True if name in classes()["adjacent"] else False if name in classes()["half"] else None
    if given not in (None, pairing):
        fault(data, f"rope_interleave is {shown(given)}, which this class does not read")
    return pairing


def class_theta(data: Mapping[str, Any]) -> float | None:
    """The base that the class takes when none is given; ``None`` where it is not known, or depends on the layer."""
    name = model_class(data)
    theta: float | None = classes()["theta"].get(name, 10000.0) if name in known_classes() else None
    return theta


def class_head_dim(data: Mapping[str, Any], layer_type: str | None) -> int:
    """The width of a head, under whatever name the class has for it; of latent attention that of its rotated part."""
    name = class_head_dim_key(data, layer_type)
    if name == "per_layer_config":
        return _layer_width(data, layer_type)
    if name != QUOTIENT:
        if data.get(name) is None:
            fault(data, f"'{name}' is missing, by which this class gives the width that counts here; pass head_dim=")
        return size(data, name, data[name])
    hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        fault(data, f"'head_dim' is missing and {QUOTIENT} is {hidden} / {heads}; pass head_dim=")
    return hidden // heads


def class_head_dim_key(data: Mapping[str, Any], layer_type: str | None) -> str:
    """What the configuration gives the width of a head by: a key, or the quotient of two."""
    name = model_class(data)
    if name in classes()["keys"]["qk_rope_head_dim"]:
        return "qk_rope_head_dim"
    wide = layer_type == "full_attention" and (name in classes()["wide_full_attention"] or name not in known_classes())
    names = ("qk_rope_head_dim", "global_head_dim" if wide else "", "per_layer_config")
    found = [key for key in names if data.get(key) is not None]
    if wide and name in known_classes():
        return [*found, "global_head_dim"][0]
    found += [key for key in ("attention_head_dim", "head_dim", "kv_channels") if data.get(key) is not None]
    return [*found, QUOTIENT][0]


def written_widths(data: Mapping[str, Any], layer_type: str | None) -> list[Any]:
    """The widths of a head that are written out for a layer type: none, one, or several of its layers."""
    name = class_head_dim_key(data, layer_type)
    if name != "per_layer_config":
        return [] if data.get(name) is None else [data[name]]
    types, layers = data.get("layer_types"), data[name]
    if not isinstance(types, Sequence) or not isinstance(layers, Mapping):
        return []
    if not all(isinstance(own, Mapping) and str(index).isdecimal() for index, own in layers.items()):
        return []
    own = {int(index): values.get("head_dim") for index, values in layers.items()}
    found: list[Any] = []
    for i, kind in enumerate(types):
        width = own.get(i) or data.get("head_dim")
        if layer_type in (None, kind) and width not in found:
            found.append(width)
    return found


def _layer_width(data: Mapping[str, Any], layer_type: str | None) -> int:
    """The width of a head where ``per_layer_config`` gives some layers, by index, values of their own."""
    widths = written_widths(data, layer_type)
    if not widths:
        fault(data, "per_layer_config must map indices of layers to their values, beside layer_types; pass head_dim=")
    if len(widths) != 1:
        got = ", ".join(sorted(map(str, widths))) or "none"
        fault(data, f"per_layer_config must give the layers of one type one head_dim, got {got}; pass head_dim=")
    return size(data, "head_dim", widths[0])


def class_axes(data: Mapping[str, Any]) -> tuple[str, list[int]] | tuple[None, None]:
    """The lane order of a class with several axes, and its own sections as it lists them."""
    name = model_class(data)
    return next(
        ((layout, models[name]) for layout, models in classes()["axes"].items() if name in models), (None, None)
    )


def reordered(sections: Iterable[int], layout: str, *, to_hf: bool) -> tuple[int, ...]:
    """Sections between the order of position axes (time, height, width) and the order in which the class lists them.

    ERNIE lists height, width, time; all others list them as the axes stand.
    """
    listed = tuple(sections)
    if layout != "ernie":
        return listed
    return (*listed[1:], *listed[:1]) if to_hf else (*listed[-1:], *listed[:-1])


def size(data: Mapping[str, Any], name: str, value: Any) -> int:
    """``value``, if it is a number of channels or positions."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
        fault(data, f"{name} must be an int >= 1 and less than 2**63, got {shown(value)}")
    return value


def fault(data: Mapping[str, Any], text: str) -> NoReturn:
    """Raise what is wrong with a configuration."""
    raise RopeConfigError(f"config of model_type {shown(data.get('model_type'))}: {text}")
