"""What the plugins of a group must provide, checked when they are loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from polyattn._errors import (
    BackendLoadError,
    IncompatiblePluginError,
    PluginNotFoundError,
    UnknownBackendError,
    UnknownRopeVariantError,
)
from polyattn.messages import shown
from polyattn.registry.discovery import BACKENDS, READERS, ROPE, SCOPES
from polyattn.registry.loading import Fault


@dataclasses.dataclass(frozen=True)
class Contract:
    """What the plugins of one group must provide.

    Attributes:
        group: entry-point group.
        noun: what such a plugin is called in messages.
        not_found: the error for a name that no plugin of the group has.
        api_versions: versions of the protocol that this core speaks.
        calls: for each method how core calls it: positional arguments, then keywords.
    """

    group: str
    noun: str
    not_found: type[PluginNotFoundError]
    api_versions: range
    calls: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]

    def fault(self, obj: Any, name: str | None = None) -> Fault | None:
        """What keeps ``obj`` from being such a plugin called ``name`` (``None``: called anything)."""
        if isinstance(obj, type):
            return BackendLoadError, f"{type_name(obj)} is a class; give an instance"
        required = ("name", "api_version", *self.calls)
        missing = [attribute for attribute in required if not hasattr(obj, attribute)]
        if missing:
            return (
                BackendLoadError,
                f"{type_name(obj)} lacks {', '.join(missing)}; a {self.noun} has {', '.join(required)}",
            )
        version, oldest, newest = obj.api_version, self.api_versions[0], self.api_versions[-1]
        if not isinstance(version, int) or isinstance(version, bool):
            return BackendLoadError, f"its api_version must be an int, got {shown(version)}"
        if not oldest <= version <= newest:
            spoken = oldest if oldest == newest else f"{oldest} to {newest}"
            cure = "upgrade polyattn" if version > newest else "upgrade the plugin"
            return IncompatiblePluginError, f"it speaks api_version {version}, this polyattn speaks {spoken}; {cure}"
        problems = [_call_problem(obj, method, *arguments) for method, arguments in self.calls.items()]
        if any(problems):
            return BackendLoadError, "; ".join(filter(None, problems))
        if not isinstance(obj.name, str) or (name is not None and obj.name != name):
            return (
                BackendLoadError,
                f"its attribute name must be {'a str' if name is None else shown(name)}, got {shown(obj.name)}",
            )
        return None


def type_name(obj: Any) -> str:
    """A short name of an object or class for messages: ``"acme.Backend"``."""
    kind = obj if isinstance(obj, type) else type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def _call_problem(obj: Any, method: str, positional: tuple[str, ...], keywords: tuple[str, ...]) -> str:
    function = getattr(obj, method)
    if not callable(function):
        return f"{method} must be a method, got {shown(function)}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""  # a compiled method need not tell its signature
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*positional, *(f"{keyword}=..." for keyword in keywords)])
        return f"{method}{signature} cannot be called as {method}({call}): {error}"
    return ""


BACKEND = Contract(
    BACKENDS,
    "backend",
    UnknownBackendError,
    api_versions=range(1, 2),
    calls={
        "unsupported": (("layout", "request"), ()),
        "prepare": (("layout", "request"), ()),
        "attend": (("q", "k", "v", "prepared"), ("bias", "sinks")),
    },
)
ROPE_VARIANT = Contract(
    ROPE,
    "RoPE variant",
    UnknownRopeVariantError,
    api_versions=range(1, 2),
    calls={"validate": (("spec",), ()), "frequencies": (("spec",), ("device", "length"))},
)
READER = Contract(
    READERS,
    "reader",
    PluginNotFoundError,
    api_versions=range(1, 2),
    calls={"read": (("config",), ())},
)
SCOPE = Contract(SCOPES, "scope", PluginNotFoundError, api_versions=range(1, 2), calls={"make": (("layout",), ())})
