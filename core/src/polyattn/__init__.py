"""Attention backends and RoPE variants for PyTorch as plugins.

Importing this package imports neither torch nor any plugin: each public name is loaded when it is first used. Names
that live in another distribution of the project come from there, and say how to install it where it is missing.
"""

from __future__ import annotations

from typing import Any

from polyattn._wings import installed, is_installed

__version__ = "0.1.0"

#: Module -> the public names that it defines.
_MODULES = {
    "polyattn._backend": ("AttentionBackend", "AttentionResult", "BackendBase", "PreparedAttention"),
    "polyattn._errors": (
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
    "polyattn._functional": ("attention",),
    "polyattn._layout": ("MaskLayout", "StructuredMask"),
    "polyattn._lse": ("merge",),
    "polyattn._reasons": ("FEATURES", "Reason"),
    "polyattn._request": ("AttentionRequest",),
    "polyattn._scope": ("AttentionScope",),
    "polyattn.kernels": ("apply_sinks",),
    "polyattn.select": ("Decision", "explain"),
    "polyattn.registry": ("Registry", "backends", "rope_variants"),
    "polyattn.rope": ("RopeFrequencies", "RopeSpec", "RopeVariant", "RotaryEmbedding", "RotaryTables", "apply_rotary"),
    "polyattn_modules": (
        "AttentionConfig",
        "AttentionSpec",
        "GroupedQueryAttention",
        "KVCache",
        "LatentAttention",
        "LatentSpec",
        "PackedTree",
        "QKNorm",
        "check_servable",
        "pack_tree",
        "read_yaml",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

#: Without the names of distributions that are missing, so that ``import *``, ``help`` and completion work.
__all__ = sorted(  # noqa: PLE0605 - the names stand in the stub beside this file too, for type checkers
    name for module, names in _MODULES.items() if is_installed(module) for name in names
)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'polyattn' has no attribute '{name}'")
    value = getattr(installed(home, f"polyattn.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
