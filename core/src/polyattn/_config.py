"""Attention as a training config names it: backend, options, rotary spec and window, with overrides for layer groups.

::

    attn_backend: sdpa
    rope: {schema_version: 1, variant: default, theta: 10000.0, ...}
    window: null
    groups:
      - {layers: "0::6", window: null}
      - {layers: [1, 2, 3, 4, 5], window: 512, attn_backend: flex_attention}

Everything is checked when the config is built: names, loading, options, rotary parameters and, with a
``serving_target``, what the serving engine can read. One error lists all that is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from polyattn._backend import AttentionBackend
from polyattn._errors import ConfigError, PolyattnError
from polyattn._rope import RopeSpec
from polyattn._select import resolve_backend

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What one layer uses, overrides applied.

    Attributes:
        backend: the resolved backend object.
        rope: the rotary spec, or ``None`` for none.
        window: keys that a query sees, itself included, or ``None`` for all.
    """

    backend: AttentionBackend
    rope: RopeSpec | None
    window: int | None


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Overrides for some layers; a field that is not in ``overrides`` keeps the config's own value.

    Attributes:
        layers: indices, or a slice in Python's notation (``"5::6"``: every sixth layer from the sixth on).
        overrides: any of ``attn_backend``, ``backend_options``, ``rope``, ``window``.
    """

    layers: tuple[int, ...] | str
    overrides: Mapping[str, Any]

    def covers(self, layer: int) -> bool:
        """Whether the group speaks of layer ``layer``."""
        if isinstance(self.layers, str):
            start, stop, step = _slice(self.layers)
            return layer >= start and (stop is None or layer < stop) and (layer - start) % step == 0
        return layer in self.layers


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention of a model, as its training config says it.

    Args:
        attn_backend: name of a backend, ``"auto"``, or a backend object.
        backend_options: options of that backend.
        rope: a :class:`RopeSpec`, its canonical dictionary, a transformers rope dictionary with ``head_dim`` beside it,
            or ``None``.
        window: keys that a query sees, itself included, or ``None``.
        groups: overrides for groups of layers; later groups win. Each is a mapping with ``layers`` and the fields to
            override.

    Raises:
        ConfigError, UnknownBackendError, BackendLoadError, RopeConfigError, ...: the fault, when there is one.
        ConfigError: all faults in one message, when there are several.
    """

    attn_backend: str | AttentionBackend = "auto"
    backend_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope: RopeSpec | Mapping[str, Any] | None = None
    window: int | None = None
    groups: Sequence[LayerGroup | Mapping[str, Any]] = ()
    _default: LayerAttention = dataclasses.field(init=False, repr=False, compare=False)
    _resolved: tuple[LayerAttention, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        faults = _Faults()
        no_groups: tuple[LayerGroup, ...] = ()
        groups = faults.catch("groups", self._checked_groups, no_groups)
        own = {field: getattr(self, field) for field in _LAYER_FIELDS}
        default = LayerAttention(**faults.resolved("", own))
        resolved = [
            dataclasses.replace(default, **faults.resolved(f"groups[{i}].", self._overrides(group)))
            for i, group in enumerate(groups)
        ]
        faults.raise_all()
        for name, value in (("rope", default.rope), ("groups", groups)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "backend_options", dict(self.backend_options))
        object.__setattr__(self, "_default", default)
        object.__setattr__(self, "_resolved", tuple(resolved))

    def layer(self, index: int) -> LayerAttention:
        """What layer ``index`` uses: the last group that covers it, else the config itself."""
        found = self._default
        for group, resolved in zip(self.groups, self._resolved, strict=True):
            if isinstance(group, LayerGroup) and group.covers(index):
                found = resolved
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionConfig:
        """Build from a mapping of the fields above.

        Raises:
            ConfigError: an unknown key; the message lists the known ones.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"the attention config must be a mapping, got {type(data).__name__}")
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        unknown = [repr(key) for key in data if key not in known]
        if unknown:
            raise ConfigError(
                f"unknown key {', '.join(unknown)} in the attention config; the keys are {', '.join(known)}"
            )
        return cls(**data)

    @classmethod
    def from_yaml(cls, path: str | Path) -> AttentionConfig:
        """Build from a YAML file that holds the fields above.

        Raises:
            ConfigError: the file is missing, unreadable or not YAML; the message names it.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the attention config {str(path)!r}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(path)!r} must be a YAML file, got: {error}") from error
        return cls.from_dict({} if data is None else data)

    def _overrides(self, group: LayerGroup) -> dict[str, Any]:
        """The overrides of a group; options belong to the backend that they stand beside."""
        fields = dict(group.overrides)
        if "attn_backend" in fields:
            fields.setdefault("backend_options", {})
        elif "backend_options" in fields:
            fields["attn_backend"] = self.attn_backend
        return fields

    def _checked_groups(self) -> tuple[LayerGroup, ...]:
        if isinstance(self.groups, (str, Mapping)) or not isinstance(self.groups, Sequence):
            raise ConfigError(f"groups must be a list of mappings, got {type(self.groups).__name__}")
        return tuple(_group(group, index) for index, group in enumerate(self.groups))


_LAYER_FIELDS = ("attn_backend", "backend_options", "rope", "window")


class _Faults:
    """Collects what is wrong, so that one error can say all of it."""

    def __init__(self) -> None:
        self.found: list[PolyattnError] = []

    def catch(self, where: str, build: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return build()
        except PolyattnError as error:
            error.args = (f"{where}: {error}", *error.args[1:])
            self.found.append(error)
            return otherwise

    def resolved(self, where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a :class:`LayerAttention` that ``fields`` speaks of."""
        builders: dict[str, Callable[[], Any]] = {}
        if "attn_backend" in fields:
            builders["backend"] = lambda: _backend(fields["attn_backend"], fields["backend_options"])
        if "rope" in fields:
            builders["rope"] = lambda: _rope(fields["rope"])
        if "window" in fields:
            builders["window"] = lambda: _window(fields["window"])
        names = {"backend": "attn_backend"}
        return {name: self.catch(f"{where}{names.get(name, name)}", build, None) for name, build in builders.items()}

    def raise_all(self) -> None:
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = "\n".join(f"  - {error}" for error in self.found)
            raise ConfigError(f"the attention config has {len(self.found)} faults:\n{lines}") from self.found[0]


def _backend(name: Any, options: Any) -> AttentionBackend:
    if isinstance(name, str) or hasattr(name, "attend"):
        if not isinstance(options, Mapping):
            raise ConfigError(f"backend_options must be a mapping, got {type(options).__name__}")
        return resolve_backend(name, dict(options) or None)
    raise ConfigError(f"must be the name of a backend, got {name!r}; `polyattn list` shows the names")


def _rope(value: Any) -> RopeSpec | None:
    if value is None or isinstance(value, RopeSpec):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping or null, got {type(value).__name__}")
    if "schema_version" in value:
        return RopeSpec.from_dict(dict(value))
    return RopeSpec.from_hf(dict(value))


def _window(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ConfigError(f"must be an int >= 1 or null, got {value!r}")


def _group(value: LayerGroup | Mapping[str, Any], index: int) -> LayerGroup:
    if isinstance(value, LayerGroup):
        return value
    if not isinstance(value, Mapping) or "layers" not in value:
        raise ConfigError(f"groups[{index}] must be a mapping with 'layers', got {value!r}")
    unknown = [key for key in value if key != "layers" and key not in _LAYER_FIELDS]
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(map(repr, unknown))} in groups[{index}]; "
            f"the keys are layers, {', '.join(_LAYER_FIELDS)}"
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
