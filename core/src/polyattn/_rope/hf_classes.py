"""What transformers' model classes decide by themselves about their rope; the facts stand in ``hf_classes.json``.

A configuration does not say which channels form a pair, how several axes share the lanes, or whether the class reads
``partial_rotary_factor`` at all. The lists were taken from transformers 5.19.0: ``half`` and ``adjacent`` pairing,
``rope_interleave`` for classes with a field for it, ``partial`` for those that rotate part of a head under plain rope,
``partial_required`` for those of them whose own default is not the whole head, ``axes`` with each class's own sections.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NoReturn

from polyattn._errors import RopeConfigError
from polyattn._numbers import shown

PAIRS = {True: "adjacent channels", False: "halves"}


@functools.cache
def classes() -> dict[str, Any]:
    """The lists of model classes."""
    source = resources.files("polyattn._rope").joinpath("hf_classes.json")  # also inside a zip
    lists: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return lists


def model_class(data: Mapping[str, Any]) -> str:
    """The class that holds the rope: older files of composite models name the whole, newer ones the text part."""
    name = data.get("model_type")
    if not isinstance(name, str):
        return ""
    known = {*classes()["half"], *classes()["adjacent"]}
    return f"{name}_text" if name not in known and f"{name}_text" in known else name


def class_pairing(data: Mapping[str, Any]) -> bool | None:
    """Whether the class pairs adjacent channels; ``None`` where it is not known."""
    name = model_class(data)
    if name in classes()["rope_interleave"]:
        given = data.get("rope_interleave", True)
        if not isinstance(given, bool):
            fault(data, f"rope_interleave must be true or false, got {shown(given)}")
        return given
    if name in classes()["adjacent"]:
        return True
    return False if name in classes()["half"] else None


def class_head_dim(data: Mapping[str, Any], layer_type: str | None) -> int:
    """The width of a head, under whatever name the class has for it."""
    name = class_head_dim_key(data, layer_type)
    if name in data:
        return size(data, name, data[name])
    hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        fault(
            data,
            f"'head_dim' is missing and hidden_size / num_attention_heads is {shown(hidden)} / {shown(heads)}; "
            "pass head_dim=",
        )
    return hidden // heads


def class_head_dim_key(data: Mapping[str, Any], layer_type: str | None) -> str:
    """What the configuration gives the width of a head by: a key, or the quotient of two."""
    names = ["attention_head_dim", "head_dim", "kv_channels", "qk_rope_head_dim"]
    if layer_type == "full_attention":
        names.insert(0, "global_head_dim")
    return next((name for name in names if data.get(name) is not None), "hidden_size / num_attention_heads")


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
