"""Attention as a training config names it: backend, options and structure, with overrides for groups of layers.

::

    attn_backend: sdpa
    rope: {schema_version: 1, variant: default, theta: 10000.0, ...}    # or, beside sizes, {rope_theta: 10000.0}
    qk_norm: {position: before, scope: head, weighted: true, eps: 1.0e-6}
    window: 512
    context_parallel: {mesh: cp, method: auto, balance: auto}           # of polyattn-context-parallel
    groups:
      - {layers: "5::6", window: null, attn_backend: flex_attention}

Everything is checked when the config is built: names, loading, options and every field; with the sizes also what the
backends cannot do, and with a ``serving_target`` what the engine cannot read. One error lists all that is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from polyattn import (
    AttentionBackend,
    AttentionScope,
    ConfigError,
    MaskLayout,
    PolyattnError,
    UnsupportedAttentionError,
)
from polyattn.messages import listed, shown
from polyattn.registry import scopes
from polyattn.select import resolve_backend
from polyattn_modules.fields import FIELDS, SIZES, QKNorm, Structure, problem_of, written_window
from polyattn_modules.groups import LayerGroup, check_group_keys, group_fields, read_layers
from polyattn_modules.kind import LayerKind
from polyattn_modules.layer import LayerAttention
from polyattn_modules.rope_forms import ShortRope, read_rope
from polyattn_modules.serving import require_servable
from polyattn_modules.spec import check_count, write_hf
from polyattn_modules.yaml_files import read_yaml

_T = TypeVar("_T")
#: What a config says of a layer, and a group of layers may override.
_LAYER_FIELDS = ("attn_backend", "backend_options", *FIELDS)


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Structure):
    """The attention of a model, as its training config says it.

    Beside the arguments below it takes every field of :class:`Structure` by its name.

    Args:
        attn_backend: name of a backend, ``"auto"``, or a backend object.
        backend_options: options of that backend.
        rope: a :class:`RopeSpec`, its canonical dictionary, what :meth:`RopeSpec.to_hf` writes (the rotary keys of a
            transformers configuration, with ``model_type``, ``head_dim`` and ``max_position_embeddings``), or ``None``.
            Beside such keys, ``convention`` says how a draft model's are meant; see :meth:`RopeSpec.from_hf`. Beside
            sizes, ``{"rope_theta": 10000.0}`` is enough; see :class:`ShortRope`.
        qk_norm: a :class:`QKNorm`, its dictionary, or ``None``.
        hidden_size, num_heads, num_kv_heads, head_dim, v_head_dim: sizes, for a config that says them. Then whole
            layers can be built from it, and what a backend cannot do for them is an error of the config. A config does
            not know the device: that a backend cannot run there, or that its kernel is not installed, is an error of
            the first thing that does, which is a layer built with ``device=`` or on an accelerator, else the first
            forward, before any matrix product.
        serving_target: the engine that will serve the model; see :func:`polyattn.check_servable`. Needs the sizes.
        context_parallel: the options of the scope ``context_parallel`` (``{}`` for its defaults), an object with its
            methods, or ``None``; see :meth:`scope`.
        groups: overrides for groups of layers; later groups win. Each is a mapping with ``layers`` (a list of indices,
            or a slice such as ``"5::6"``) and the fields to override.

    Raises:
        ConfigError, UnknownBackendError, BackendLoadError, RopeConfigError, UnsupportedAttentionError, ...: the fault,
            when there is one.
        ConfigError: all faults in one message, when there are several.
    """

    attn_backend: str | AttentionBackend = "auto"
    backend_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    rope: Any = None
    qk_norm: Any = None
    groups: Sequence[LayerGroup | Mapping[str, Any]] = ()
    serving_target: str | None = None
    context_parallel: Any = None
    _default: LayerAttention = dataclasses.field(init=False, repr=False, compare=False)
    _resolved: tuple[LayerAttention, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        faults = _Faults()
        groups = self._read_groups(faults)
        own = {name: getattr(self, name) for name in _LAYER_FIELDS}
        layers = [_read_fields(own, "", faults)]
        layers += [
            {**layers[0], **_read_fields(self._overrides(group), f"groups[{index}].", faults)}
            for index, group in enumerate(groups)
        ]
        parallel = faults.catch("context_parallel", lambda: _parallel(self.context_parallel), None)
        resolved = []
        for where, fields in zip(("", *(f"groups[{index}]" for index in range(len(groups)))), layers, strict=True):
            if _FAULTY not in fields.values():
                layer = faults.catch(where, lambda: self._layer(fields), None, inherited=True)  # noqa: B023
                resolved += [] if layer is None else [layer]
        faults.raise_all()
        rope = layers[0]["rope"]
        object.__setattr__(self, "rope", {"rope_theta": rope.theta} if isinstance(rope, ShortRope) else rope)
        object.__setattr__(self, "qk_norm", resolved[0].qk_norm)
        object.__setattr__(self, "window", resolved[0].window)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "backend_options", dict(self.backend_options))
        object.__setattr__(self, "context_parallel", parallel)
        object.__setattr__(self, "_default", resolved[0])
        object.__setattr__(self, "_resolved", tuple(resolved[1:]))

    def layer(self, index: int) -> LayerAttention:
        """What layer ``index`` uses: the last group that covers it, else the config itself."""
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ConfigError(f"layer must be an index >= 0, got {shown(index)}")
        found = self._default
        for group, resolved in zip(self.groups, self._resolved, strict=True):
            if isinstance(group, LayerGroup) and group.covers(index):
                found = resolved
        return found

    def scope(self, layout: MaskLayout | Mapping[str, MaskLayout], device_mesh: Any = None) -> AttentionScope:
        """What layers share in one forward: of whole sequences, or of this rank's part under ``context_parallel``.

        Args:
            layout: the mask of the whole sequences; several by name under ``context_parallel`` only.
            device_mesh: the ``DeviceMesh`` that ``context_parallel`` names a dimension of; not needed without.

        Raises:
            ConfigError: several layouts without ``context_parallel``.
            ContextParallelError: the mesh or the layout does not fit.
        """
        if self.context_parallel is not None:
            scope: AttentionScope = self.context_parallel.scope(layout, device_mesh)
            return scope
        if not isinstance(layout, MaskLayout):
            raise ConfigError(f"layout must be a MaskLayout without context_parallel, got {type(layout).__name__}")
        return AttentionScope(layout)

    def check_layers(self, layers: int) -> None:
        """Refuse groups that a model of ``layers`` layers has no layer for.

        Raises:
            ConfigError: names each such group.
        """
        check_count(layers)
        faults = [
            f"groups[{index}].layers must lie within the {layers} layers of the model, got {shown(_layers_of(group))}"
            for index, group in enumerate(self.groups)
            if isinstance(group, LayerGroup) and not group.lies_within(layers)
        ]
        if faults:
            raise ConfigError("; ".join(faults))

    def to_hf(self, model_type: str, *, layers: int) -> dict[str, Any]:
        """Write the attention part of a transformers configuration; see :meth:`AttentionSpec.to_hf`.

        Args:
            model_type: the class that will read it.
            layers: how many layers the model has.

        Raises:
            ConfigError: a size is missing, a group speaks of no layer of the model, the ``serving_target`` cannot serve
                a layer, or the class would read one otherwise.
            RopeConfigError: the class cannot carry a rotary spec.
        """
        self.check_layers(layers)
        return write_hf([self.layer(index).spec for index in range(layers)], model_type, self.serving_target)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionConfig:
        """Build from a mapping of the fields above.

        Raises:
            ConfigError: an unknown key; the message lists the known ones. Or see above.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"the attention config must be a mapping, got {type(data).__name__}")
        known = [*_LAYER_FIELDS, "groups", "serving_target", "context_parallel"]
        unknown = [key for key in data if key not in known]
        faults = _Faults()
        if unknown:
            text = f"unknown key {listed(unknown)} in the attention config; the keys are {', '.join(known)}"
            faults.add("", ConfigError(text))
        config = faults.catch("", lambda: cls(**{key: data[key] for key in data if key in known}), None)
        faults.raise_all()
        assert config is not None
        return config

    @classmethod
    def from_yaml(cls, path: str | Path) -> AttentionConfig:
        """Build from a YAML file that holds the fields above.

        Raises:
            ConfigError: the file is missing, does not hold a YAML mapping, or gives a key twice; the message names it.
                Or ``path`` is not a path.
        """
        if not isinstance(path, (str, Path)):
            raise ConfigError(
                f"path must be a str or a Path, the file to read, got {type(path).__name__}; "
                "a mapping is read by AttentionConfig.from_dict"
            )
        return cls.from_dict(read_yaml(path, "the attention config"))

    def _overrides(self, group: LayerGroup) -> dict[str, Any]:
        """The overrides of a group; options belong to the backend that they stand beside."""
        fields = dict(group.overrides)
        if "attn_backend" in fields:
            fields.setdefault("backend_options", {})
        elif "backend_options" in fields:
            fields["attn_backend"] = self.attn_backend
        return fields

    def _layer(self, fields: Mapping[str, Any]) -> LayerAttention:
        """The layer, unless fields contradict each other, or backend or serving engine cannot do them."""
        rope = fields["rope"]
        layer = LayerAttention(**{**fields, "rope": rope.spec(fields) if isinstance(rope, ShortRope) else rope})
        if all(getattr(layer, name) is None for name in SIZES):
            if self.serving_target is not None:
                raise ConfigError(f"serving_target must come with the sizes {', '.join(SIZES[:3])}, got none of them")
            return layer
        spec = layer.spec
        reasons = LayerKind(layer.backend, spec).refusals(torch.float32, None)
        if reasons:
            raise UnsupportedAttentionError(layer.backend.name, reasons)
        if self.serving_target is not None:
            require_servable(spec, self.serving_target)
        return layer

    def _read_groups(self, faults: _Faults) -> tuple[LayerGroup, ...]:
        """The groups; of a faulty one whatever can be read, so that its other fields are looked at too."""
        if isinstance(self.groups, (str, Mapping)) or not isinstance(self.groups, Sequence):
            faults.add("", ConfigError(f"groups must be a list of mappings, got {type(self.groups).__name__}"))
            return ()
        groups = []
        nothing: dict[str, Any] = {}
        nowhere: tuple[int, ...] | str = ()
        for index, value in enumerate(self.groups):
            where = f"groups[{index}]"
            fields = faults.catch("", lambda: group_fields(value, where), nothing)  # noqa: B023
            layers = nowhere
            if fields:
                faults.catch("", lambda: check_group_keys(fields, where, _LAYER_FIELDS), None)  # noqa: B023
            if "layers" in fields:
                layers = faults.catch("", lambda: read_layers(fields["layers"], f"{where}.layers"), nowhere)  # noqa: B023
            groups.append(LayerGroup(layers, {key: fields[key] for key in fields if key in _LAYER_FIELDS}))
        return tuple(groups)


class _Faults:
    """Collects what is wrong, so that one error can say all of it."""

    def __init__(self) -> None:
        self.found: dict[str, PolyattnError] = {}

    def catch(self, where: str, build: Callable[[], _T], otherwise: _T, *, inherited: bool = False) -> _T:
        """What ``build`` gives; ``otherwise`` when it raises, which is kept.

        Args:
            where: put before the message.
            build: what to try.
            otherwise: what to go on with.
            inherited: whether the same fault in another place is the same one, which is said once.
        """
        try:
            return build()
        except PolyattnError as error:
            self.add(where, error, inherited=inherited)
            return otherwise

    def add(self, where: str, error: PolyattnError, *, inherited: bool = False) -> None:
        for fault in (isinstance(error, ConfigError) and error.faults) or (error,):
            text = str(fault)
            if where:
                fault.args = (f"{where}: {text}", *fault.args[1:])
            self.found.setdefault(text if inherited else str(fault), fault)

    def raise_all(self) -> None:
        errors = list(self.found.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            lines = "\n".join(f"  - {error}" for error in errors)
            several = ConfigError(f"the attention config has {len(errors)} faults:\n{lines}")
            several.faults = tuple(errors)
            raise several from errors[0]


_FAULTY: Any = object()


def _layers_of(group: LayerGroup) -> object:
    return group.layers if isinstance(group.layers, str) else list(group.layers)


def _read_fields(fields: Mapping[str, Any], where: str, faults: _Faults) -> dict[str, Any]:
    """The fields of a :class:`LayerAttention` that ``fields`` speaks of, ``_FAULTY`` where one is wrong."""
    resolved = {}
    for name, value in fields.items():
        if name == "attn_backend":
            options = fields["backend_options"]
            resolved["backend"] = faults.catch(f"{where}{name}", lambda: _backend(value, options), _FAULTY)  # noqa: B023
        elif name != "backend_options":
            resolved[name] = faults.catch(f"{where}{name}", lambda: _field(name, value), _FAULTY)  # noqa: B023
    return resolved


def _backend(name: Any, options: Any) -> AttentionBackend:
    if isinstance(name, str) or hasattr(name, "attend"):
        if not isinstance(options, Mapping):
            raise ConfigError(f"backend_options must be a mapping, got {type(options).__name__}")
        return resolve_backend(name, dict(options) or None)
    raise ConfigError(f"must be the name of a backend, got {shown(name)}; `polyattn list` shows the names")


def _parallel(value: Any) -> Any:
    if value is None or hasattr(value, "scope"):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping such as {{mesh: cp, method: auto, balance: auto}}, got {shown(value)}")
    return scopes.resolve("context_parallel", dict(value))


def _field(name: str, value: Any) -> Any:
    if name == "rope":
        return read_rope(value)
    if name == "qk_norm" and value is not None and not isinstance(value, QKNorm):
        return QKNorm.from_dict(value)
    problem = "" if name in SIZES and value is None else problem_of(name, value)
    if problem:
        raise ConfigError(problem)
    return written_window(value) if name == "window" else value
