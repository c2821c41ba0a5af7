"""Every exception that polyattn raises on purpose; all survive pickling with their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyattn._reasons import Reason


class PolyattnError(Exception):
    """Base of every error that polyattn raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as cls(*args); what __init__ derived is in __dict__, but for the name of an ImportError.
        name = {"name": self.name} if isinstance(self, ImportError) else {}
        return (_rebuild, (type(self), self.args, {**self.__dict__, **name}))


def _rebuild(cls: type[PolyattnError], args: tuple[Any, ...], state: dict[str, Any]) -> PolyattnError:
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


class PluginNotFoundError(PolyattnError, LookupError, ValueError):
    """No installed plugin has the name; the message lists what is installed and what to do.

    A ``ValueError`` too, since validators of configurations such as pydantic's take that for one fault among others.
    """


class UnknownBackendError(PluginNotFoundError):
    """No installed attention backend has the name."""


class UnknownRopeVariantError(PluginNotFoundError):
    """No installed RoPE variant has the name."""


class DuplicatePluginError(PolyattnError):
    """Several distributions register one name; the message names each and both cures."""


class _PluginError(PolyattnError):
    """An error about one plugin; carries which."""

    name: str | None

    def __init__(self, message: str, *, name: str = "", dist: str = "", version: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.dist = dist
        self.version = version


class BackendLoadError(_PluginError, ImportError):
    """Importing or checking a plugin failed; ``__cause__`` is what the plugin raised."""


class IncompatiblePluginError(_PluginError):
    """The plugin's ``api_version`` lies outside the range that this core accepts."""


class BlockedPluginError(_PluginError):
    """The name is installed but may not be loaded; the message says which list forbids it."""


class UnsupportedAttentionError(PolyattnError, ValueError):
    """A backend cannot honour a layout and request.

    Attributes:
        backend: name of the backend that refuses.
        reasons: every :class:`Reason`, in the order in which the backend found them.
        alternatives: names of the loaded backends that can do the same work; ``None`` where nobody asked them.
        not_asked: names of the installed backends that are not loaded, and so were not asked.
    """

    def __init__(
        self,
        backend: str,
        reasons: Sequence[Reason],
        alternatives: Sequence[str] | None = None,
        not_asked: Sequence[str] = (),
    ) -> None:
        self.backend = backend
        self.reasons: tuple[Reason, ...] = tuple(reasons)
        self.alternatives: tuple[str, ...] | None = None if alternatives is None else tuple(alternatives)
        self.not_asked: tuple[str, ...] = tuple(not_asked)
        lines = [f"backend '{backend}' cannot do this attention:", *(f"  - {reason}" for reason in self.reasons)]
        if self.alternatives:
            lines.append(f"  installed backends that can: {', '.join(self.alternatives)}")
        elif self.alternatives is not None and not self.not_asked:
            lines.append("  no installed backend can; `polyattn explain` shows each one's reasons")
        if self.not_asked:
            asleep = f"  not asked, because they are not loaded: {', '.join(self.not_asked)}"
            lines.append(f"{asleep}; `polyattn explain` or explain(layout, request) asks them")
        super().__init__("\n".join(lines))


class LayoutError(PolyattnError, ValueError):
    """A mask layout contradicts itself or does not fit the tensors it is used with."""


class AttentionInputError(PolyattnError, ValueError):
    """A tensor or scalar argument breaks the conventions that all backends share."""


class RopeConfigError(PolyattnError, ValueError):
    """A rotary spec or a model configuration is incomplete, unknown or contradictory."""


class ConfigError(PolyattnError, ValueError):
    """A training configuration is wrong; the message names the key, what it got and what it needs.

    Attributes:
        faults: the errors that the message lists, where several things are wrong; else empty.
    """

    faults: tuple[PolyattnError, ...] = ()
