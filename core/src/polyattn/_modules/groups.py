"""Groups of layers, and what a config overrides for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyattn._errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Overrides for some layers; a field that is not in ``overrides`` keeps the config's own value.

    Attributes:
        layers: indices, or a slice in Python's notation (``"5::6"``: every sixth layer from the sixth on).
        overrides: fields of :class:`AttentionConfig`, all but ``serving_target`` and ``groups``.
    """

    layers: tuple[int, ...] | str
    overrides: Mapping[str, Any]

    def covers(self, layer: int) -> bool:
        """Whether the group speaks of layer ``layer``."""
        if isinstance(self.layers, str):
            start, stop, step = _slice(self.layers)
            return layer >= start and (stop is None or layer < stop) and (layer - start) % step == 0
        return layer in self.layers


def layer_group(value: LayerGroup | Mapping[str, Any], index: int, fields: Sequence[str]) -> LayerGroup:
    """Read a group of a config.

    Args:
        value: a mapping with ``layers`` and the fields to override, or a group.
        index: where it stands in the config's list, for messages.
        fields: what may be overridden.

    Raises:
        ConfigError: a key is unknown, or ``layers`` is neither a slice nor a list of indices.
    """
    if isinstance(value, LayerGroup):
        return value
    if not isinstance(value, Mapping) or "layers" not in value:
        raise ConfigError(f"groups[{index}] must be a mapping with 'layers', got {value!r}")
    unknown = [key for key in value if key != "layers" and key not in fields]
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(map(repr, unknown))} in groups[{index}]; the keys are layers, {', '.join(fields)}"
        )
    layers = value["layers"]
    if isinstance(layers, str):
        _slice(layers)
    elif isinstance(layers, Sequence) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers
    ):
        layers = tuple(layers)
    else:
        raise ConfigError(
            f"groups[{index}].layers must be a list of indices >= 0 or a slice such as '5::6', got {layers!r}"
        )
    return LayerGroup(layers, {key: value[key] for key in value if key != "layers"})


def _slice(text: str) -> tuple[int, int | None, int]:
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    start, stop, step = (*numbers, None, None, None)[:3] if 2 <= len(numbers) <= 3 else (-1, None, None)
    start, step = (0 if start is None else start), (1 if step is None else step)
    if start < 0 or step < 1 or (stop is not None and stop < 0):
        raise ConfigError(f"layers must be a slice 'start:stop:step' of non-negative numbers, got {text!r}")
    return start, stop, step
