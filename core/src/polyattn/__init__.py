"""Attention backends and RoPE variants for PyTorch as plugins.

Importing this package imports neither torch nor any plugin: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyattn._backend import AttentionBackend, AttentionResult, BackendBase, PreparedAttention
    from polyattn._config import AttentionConfig
    from polyattn._errors import (
        AttentionInputError,
        BackendLoadError,
        BlockedPluginError,
        ConfigError,
        DuplicatePluginError,
        IncompatiblePluginError,
        LayoutError,
        PluginNotFoundError,
        PolyattnError,
        RopeConfigError,
        UnknownBackendError,
        UnknownRopeVariantError,
        UnsupportedAttentionError,
    )
    from polyattn._functional import attention
    from polyattn._layout import MaskLayout, StructuredMask
    from polyattn._lse import apply_sinks, merge
    from polyattn._modules import AttentionSpec, GroupedQueryAttention, QKNorm, check_servable
    from polyattn._registry import Registry, backends, rope_variants
    from polyattn._request import FEATURES, AttentionRequest, Reason
    from polyattn._rope import RopeFrequencies, RopeSpec, RopeVariant, RotaryEmbedding, RotaryTables, apply_rotary
    from polyattn._scope import AttentionScope
    from polyattn._select import Decision, explain
    from polyattn._yaml import read_yaml

__version__ = "0.1.0"

_MODULES = {
    "_backend": ("AttentionBackend", "AttentionResult", "BackendBase", "PreparedAttention"),
    "_config": ("AttentionConfig",),
    "_errors": (
        "AttentionInputError",
        "BackendLoadError",
        "BlockedPluginError",
        "ConfigError",
        "DuplicatePluginError",
        "IncompatiblePluginError",
        "LayoutError",
        "PluginNotFoundError",
        "PolyattnError",
        "RopeConfigError",
        "UnknownBackendError",
        "UnknownRopeVariantError",
        "UnsupportedAttentionError",
    ),
    "_functional": ("attention",),
    "_layout": ("MaskLayout", "StructuredMask"),
    "_lse": ("apply_sinks", "merge"),
    "_modules": ("AttentionSpec", "GroupedQueryAttention", "QKNorm", "check_servable"),
    "_registry": ("Registry", "backends", "rope_variants"),
    "_request": ("FEATURES", "AttentionRequest", "Reason"),
    "_rope": ("RopeFrequencies", "RopeSpec", "RopeVariant", "RotaryEmbedding", "RotaryTables", "apply_rotary"),
    "_scope": ("AttentionScope",),
    "_select": ("Decision", "explain"),
    "_yaml": ("read_yaml",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "FEATURES",
    "AttentionBackend",
    "AttentionConfig",
    "AttentionInputError",
    "AttentionRequest",
    "AttentionResult",
    "AttentionScope",
    "AttentionSpec",
    "BackendBase",
    "BackendLoadError",
    "BlockedPluginError",
    "ConfigError",
    "Decision",
    "DuplicatePluginError",
    "GroupedQueryAttention",
    "IncompatiblePluginError",
    "LayoutError",
    "MaskLayout",
    "PluginNotFoundError",
    "PolyattnError",
    "PreparedAttention",
    "QKNorm",
    "Reason",
    "Registry",
    "RopeConfigError",
    "RopeFrequencies",
    "RopeSpec",
    "RopeVariant",
    "RotaryEmbedding",
    "RotaryTables",
    "StructuredMask",
    "UnknownBackendError",
    "UnknownRopeVariantError",
    "UnsupportedAttentionError",
    "apply_rotary",
    "apply_sinks",
    "attention",
    "backends",
    "check_servable",
    "explain",
    "merge",
    "read_yaml",
    "rope_variants",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'polyattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"polyattn.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
