"""Groups of layers, and what a config overrides for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyattn import ConfigError
from polyattn.messages import listed, shown


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

    def lies_within(self, layers: int) -> bool:
        """Whether a model of ``layers`` layers has every layer of the list, or one of the slice."""
        return _slice(self.layers)[0] < layers if isinstance(self.layers, str) else max(self.layers) < layers


def group_fields(value: object, where: str) -> dict[str, Any]:
    """The keys and values of a group, ``layers`` among them.

    Args:
        value: a mapping, or a group that was read before.
        where: what to call it in messages.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, LayerGroup):
        return {"layers": value.layers, **value.overrides}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping with 'layers', got {shown(value)}")
    return dict(value)


def check_group_keys(fields: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    """Refuse a group with other keys than ``layers`` and ``known``, or with none of those.

    Raises:
        ConfigError: names the keys.
    """
    if "layers" not in fields:
        raise ConfigError(f"{where} must be a mapping with 'layers', got {shown(dict(fields))}")
    unknown = [key for key in fields if key != "layers" and key not in known]
    if unknown:
        raise ConfigError(f"unknown key {listed(unknown)} in {where}; the keys are layers, {', '.join(known)}")
    if len(fields) == 1:
        raise ConfigError(
            f"{where} must override something for its layers, got only layers={shown(fields['layers'])}; "
            f"give one of {', '.join(known)}, or leave the group out"
        )


def read_layers(value: object, where: str) -> tuple[int, ...] | str:
    """Which layers a group speaks of.

    Raises:
        ConfigError: it is neither a slice nor a list of indices, or speaks of no layer, or of one twice.
    """
    if isinstance(value, str):
        _slice(value, where)
        return value
    if (
        not isinstance(value, Sequence)
        or not value
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        raise ConfigError(f"{where} must be a list of indices >= 0 or a slice such as '5::6', got {shown(value)}")
    if len(set(value)) < len(value):
        raise ConfigError(f"{where} must name each layer once, got {shown(list(value))}")
    return tuple(value)


def _slice(text: str, where: str = "layers") -> tuple[int, int | None, int]:
    try:
        numbers = [int(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        numbers = []
    start, stop, step = (*numbers, None, None)[:3] if 2 <= len(numbers) <= 3 else (-1, None, None)
    start, step = (0 if start is None else start), (1 if step is None else step)
    if start < 0 or step < 1 or (stop is not None and stop < 0):
        raise ConfigError(f"{where} must be a slice 'start:stop:step' of non-negative numbers, got {shown(text)}")
    if stop is not None and stop <= start:
        raise ConfigError(f"{where} must speak of a layer, got {shown(text)}: a slice that stops at {stop} holds none")
    return start, stop, step
