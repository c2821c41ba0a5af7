"""Entries of a configuration, read strictly, and the weights of a layer by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from polyattn import ConfigError
from polyattn.messages import shown


def text_part(config: Any) -> dict[str, Any]:
    """A configuration, or its ``text_config``, as a dictionary.

    Raises:
        ConfigError: it is neither a configuration nor a dictionary.
    """
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise ConfigError(f"config must be a transformers configuration or its dictionary, got {type(config).__name__}")
    text = found.get("text_config")
    return dict(text if isinstance(text, Mapping) else found)


def fault(data: Mapping[str, Any], text: str) -> NoReturn:
    """Refuse a configuration, whose class is named."""
    raise ConfigError(f"config of model_type {shown(data.get('model_type'))}: {text}")


def required(data: Mapping[str, Any], name: str) -> Any:
    """An entry that must be there."""
    if data.get(name) is None:
        fault(data, f"'{name}' is missing")
    return data[name]


def integer(data: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """An entry that must be an int of at least ``least``."""
    value = required(data, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        fault(data, f"{name} must be an int >= {least}, got {shown(value)}")
    return value


def layer_index(layer: object) -> int:
    """The index of a layer.

    Raises:
        ConfigError: it is not one.
    """
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise ConfigError(f"layer must be the index of a layer, an int >= 0, got {shown(layer)}")
    return layer


def weights_of(state: Mapping[str, Tensor], data: Mapping[str, Any], layer: int) -> dict[str, Tensor]:
    """The weights of a layer's attention by the names in it."""
    inside = f"layers.{layer}.self_attn."
    found = {name.split(inside, 1)[1]: value for name, value in state.items() if inside in name}
    if not found:
        first = sorted(state)[:3]
        got = ", ".join(first) + ", ..." if first else "none"
        fault(data, f"the state dict must have keys with '{inside}', got {got}")
    # Versions before 4.32 saved the frequencies of every layer.
    return {name: value for name, value in found.items() if name != "rotary_emb.inv_freq"}


def refuse_other(ours: Mapping[str, Any], theirs: Mapping[str, Any], layer: int, build: str) -> None:
    """Refuse weights for a layer of another structure than the configuration describes.

    Args:
        ours: the written spec of the layer.
        theirs: the one that the configuration describes.
        layer: its index.
        build: how the right layer is built, in code.

    Raises:
        ConfigError: names every field that differs.
    """
    pairs = {name: (ours[name], theirs[name]) for name in ours}
    for name, (one, other) in list(pairs.items()):
        if isinstance(one, dict) and isinstance(other, dict):
            del pairs[name]
            pairs |= {f"{name}.{key}": (one.get(key), other.get(key)) for key in one | other}
    differ = [f"{name} {shown(one)} instead of {shown(other)}" for name, (one, other) in pairs.items() if one != other]
    if differ:
        raise ConfigError(
            f"the layer must be as the configuration describes layer {layer}, got {'; '.join(differ)}; build it with "
            f"{build}, give the convention= that it was read with, or load weights into another structure with "
            "load_state_dict"
        )
