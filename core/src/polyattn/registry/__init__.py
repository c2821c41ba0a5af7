"""Finding plugins by name: what is installed, what may be loaded, and loading it; knows neither torch nor a backend."""

from polyattn.registry import discovery, hooks
from polyattn.registry.discovery import AUTO, BACKENDS, ROPE, illegal_name
from polyattn.registry.loading import PluginInfo, brief
from polyattn.registry.names import FIRST_PARTY
from polyattn.registry.permissions import trust
from polyattn.registry.registry import Registry, backends, readers, restored, rope_variants, scopes

__all__ = [
    "AUTO",
    "BACKENDS",
    "FIRST_PARTY",
    "ROPE",
    "PluginInfo",
    "Registry",
    "backends",
    "brief",
    "discovery",
    "hooks",
    "illegal_name",
    "readers",
    "restored",
    "rope_variants",
    "scopes",
    "trust",
]
