"""The names under which transformers knows polyattn's backends, and the backend objects behind them."""

from __future__ import annotations

from polyattn import AttentionBackend, UnknownBackendError, backends
from polyattn._select import AUTO, resolve_backend

PREFIX = "polyattn_"

_resolved: dict[str, AttentionBackend] = {}


def installed() -> tuple[str, ...]:
    """Names of every backend that is there, and ``auto``."""
    return (*backends.names(), AUTO)


def bare_name(name: str) -> str:
    """``sdpa`` of ``polyattn_sdpa`` or of ``sdpa``."""
    return name.removeprefix(PREFIX)


def resolve(name: str) -> AttentionBackend:
    """Load the backend for a config value; what :func:`resolved` returns from then on.

    Args:
        name: of the backend, without prefix.

    Raises:
        UnknownBackendError: nothing has that name; lists what there is.
        BackendLoadError, IncompatiblePluginError, DuplicatePluginError, BlockedPluginError: see the registry.
    """
    try:
        _resolved[name] = resolve_backend(name)
    except UnknownBackendError as error:
        have = ", ".join(PREFIX + known for known in installed())
        text = f"attn_implementation '{PREFIX}{name}': {error}\n  implementations: {have}"
        raise UnknownBackendError(text) from error
    return _resolved[name]


def resolved(name: str) -> AttentionBackend:
    """The backend that was loaded for ``name`` when the model was configured; loads it where that was skipped."""
    found = _resolved.get(name)
    return resolve(name) if found is None else found
