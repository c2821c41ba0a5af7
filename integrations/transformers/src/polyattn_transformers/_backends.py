"""The names under which transformers knows polyattn's backends, and the backend objects behind them.

A backend is loaded once, when a model is configured, and found by its name in the forward: looking at what is installed
cannot be traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from polyattn import AttentionBackend, ConfigError, UnknownBackendError, UnsupportedAttentionError, backends
from polyattn.registry import AUTO
from polyattn.select import resolve_backend

PREFIX = "polyattn_"


@dataclasses.dataclass(frozen=True, eq=False)
class ByLayerType:
    """A backend for each type of layer.

    Attributes:
        kinds: the backend of each name that ``config.layer_types`` lists.
    """

    kinds: Mapping[str, AttentionBackend]

    def of(self, module: nn.Module) -> AttentionBackend:
        """The backend of an attention layer."""
        kind = layer_type(module)
        found = None if kind is None else self.kinds.get(kind)
        if found is None:
            raise ConfigError(
                f"layer_types must name a type with a backend, got {kind} for {type(module).__name__}; there are "
                f"backends for {', '.join(self.kinds)}: call polyattn_transformers.use again"
            )
        return found


_loaded: dict[str, AttentionBackend | ByLayerType] = {}


def installed() -> tuple[str, ...]:
    """Names of every backend that is there, and ``auto``."""
    return (*backends.names(), AUTO)


def load(name: str, options: Mapping[str, Any] | None = None) -> str:
    """Load a backend for a config value.

    Args:
        name: of the backend, with or without prefix, or what this function returned earlier.
        options: of the backend.

    Returns:
        The name by which :func:`loaded` finds it: that of the backend, followed by its options if there are any.

    Raises:
        UnknownBackendError: nothing has that name; lists what there is.
        BackendLoadError, IncompatiblePluginError, DuplicatePluginError, BlockedPluginError: see the registry.
        ConfigError: the backend does not have these options.
        UnsupportedAttentionError: its kernel is missing or broken.
    """
    bare = name.removeprefix(PREFIX)
    if "[" in bare and bare in _loaded and not options:
        return bare
    try:
        backend = resolve_backend(bare, dict(options or {}))
    except UnknownBackendError as error:
        have = ", ".join(PREFIX + known for known in installed())
        text = f"attn_implementation '{PREFIX}{bare}': {error}\n  implementations: {have}"
        raise UnknownBackendError(text) from error
    _check_kernel(backend)
    if options:
        bare += "[" + ", ".join(f"{key}={value!r}" for key, value in options.items()) + "]"
    _loaded[bare] = backend
    return bare


def load_by_type(names: Mapping[str, str]) -> str:
    """Load a backend for each type of layer; see :func:`load`. Gives one name for all of them."""
    kinds = {kind: loaded(load(name)) for kind, name in names.items()}
    bare = "by_layer[" + ", ".join(f"{kind}={name.removeprefix(PREFIX)}" for kind, name in names.items()) + "]"
    _loaded[bare] = ByLayerType({kind: one for kind, one in kinds.items() if not isinstance(one, ByLayerType)})
    return bare


def layer_type(module: nn.Module) -> str | None:
    """What the configuration calls an attention layer; ``None`` in a model whose layers have no types."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return types[index] if types and isinstance(index, int) and index < len(types) else None


def _check_kernel(backend: AttentionBackend) -> None:
    """Refuse a backend that can run nowhere, before any forward; which device a model goes to is not known yet."""
    ask = getattr(backend, "device_reasons", None)
    reasons = [] if ask is None else [one for one in ask(torch.device("cpu")) if one.feature == "kernel"]
    if reasons:
        raise UnsupportedAttentionError(backend.name, reasons)


def loaded(name: str) -> AttentionBackend | ByLayerType:
    """The backend that was loaded as ``name``; loads it where a configuration was changed behind transformers' back."""
    if name not in _loaded:
        load(name)
    return _loaded[name]


def forget() -> None:
    """Look again what the plain names mean at their next use."""
    for name in [name for name in _loaded if "[" not in name]:
        del _loaded[name]
