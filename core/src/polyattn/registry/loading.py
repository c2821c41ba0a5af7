"""Loading one plugin: what it must provide, and its failure turned into an error that names the plugin."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from polyattn._errors import (
    BackendLoadError,
    IncompatiblePluginError,
    PluginNotFoundError,
    UnknownBackendError,
    UnknownRopeVariantError,
)
from polyattn.messages import shown
from polyattn.registry.discovery import BACKENDS, READERS, ROPE, SCOPES, Candidate, Claim, Scan, current
from polyattn.registry.permissions import trust

PluginError: TypeAlias = BackendLoadError | IncompatiblePluginError


@dataclasses.dataclass(frozen=True)
class Contract:
    """What the plugins of one group must provide.

    Attributes:
        group: entry-point group.
        noun: what such a plugin is called in messages.
        not_found: the error for a name that no plugin of the group has.
        calls: for each method how core calls it: positional arguments, then keywords.
        api_versions: versions of the protocol that this core speaks.
    """

    group: str
    noun: str
    not_found: type[PluginNotFoundError]
    calls: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    api_versions: range = range(1, 2)

    def fault(self, obj: Any, name: str | None = None) -> PluginError | None:
        """What keeps ``obj`` from being such a plugin called ``name`` (``None``: called anything)."""
        required = ("name", "api_version", *self.calls)
        missing = [attribute for attribute in required if not hasattr(obj, attribute)]
        if isinstance(obj, type):
            problem = f"{type_name(obj)} is a class; give an instance"
        elif missing:
            problem = f"{type_name(obj)} lacks {', '.join(missing)}; a {self.noun} has {', '.join(required)}"
        elif not isinstance(obj.api_version, int) or isinstance(obj.api_version, bool):
            problem = f"its api_version must be an int, got {shown(obj.api_version)}"
        elif not self.api_versions[0] <= obj.api_version <= self.api_versions[-1]:  # may be symbolic in a graph
            spoken = " or ".join(map(str, self.api_versions))
            cure = "upgrade polyattn" if obj.api_version > self.api_versions[-1] else "upgrade the plugin"
            return IncompatiblePluginError(
                f"it speaks api_version {obj.api_version}, this polyattn speaks {spoken}; {cure}"
            )
        else:
            problems = [_call_problem(obj, method, *arguments) for method, arguments in self.calls.items()]
            problem = "; ".join(filter(None, problems))
            if not problem and (not isinstance(obj.name, str) or (name is not None and obj.name != name)):
                need = "a str" if name is None else shown(name)
                problem = f"its attribute name must be {need}, got {shown(obj.name)}"
        return BackendLoadError(problem) if problem else None


BACKEND = Contract(
    BACKENDS,
    "backend",
    UnknownBackendError,
    {
        "unsupported": (("layout", "request"), ()),
        "prepare": (("layout", "request"), ()),
        "attend": (("q", "k", "v", "prepared"), ("bias", "sinks")),
    },
)
ROPE_VARIANT = Contract(
    ROPE,
    "RoPE variant",
    UnknownRopeVariantError,
    {"validate": (("spec",), ()), "frequencies": (("spec",), ("device", "length"))},
)
READER = Contract(READERS, "reader", PluginNotFoundError, {"read": (("config",), ())})
SCOPE = Contract(SCOPES, "scope", PluginNotFoundError, {"scope": (("layout", "device_mesh"), ())})


@dataclasses.dataclass(frozen=True)
class PluginInfo(Claim):
    """What is known about one plugin without loading it.

    Attributes:
        status: ``"available"`` (installed, not loaded yet), ``"loaded"``, ``"registered"`` (in code), ``"broken"``,
            ``"incompatible"`` (another api_version), ``"blocked"`` (by a trust list) or ``"conflict"`` (several
            distributions claim the name).
        error: what is wrong and what to do; empty when nothing is.
    """

    status: str = ""
    error: str = ""

    @classmethod
    def of(cls, claims: Collection[Claim], status: str, error: str = "") -> PluginInfo:
        """The info of ``claims`` to one name, their fields joined with commas."""
        joined = {
            field.name: ", ".join(dict.fromkeys(getattr(claim, field.name) for claim in claims))
            for field in dataclasses.fields(Claim)
        }
        return cls(**joined, status=status, error=error)

    def to_dict(self) -> dict[str, str]:
        """The info as a JSON object."""
        return dataclasses.asdict(self)


class Loader:
    """Loads the plugins of one kind, each at most once, and remembers what came of it.

    It holds no lock while a plugin is imported. Where threads load one at once, the first object serves all of them.
    """

    def __init__(self, noun: str, fault: Callable[[Any, str], PluginError | None]) -> None:
        self._noun, self._fault = noun, fault
        self.loaded: dict[Candidate, tuple[Any]] = {}  # each object in a tuple
        # By scan, so that a refresh lets what failed be tried again.
        self._failed: WeakKeyDictionary[Scan, dict[Candidate, PluginError]] = WeakKeyDictionary()

    def get(self, plugin: Candidate) -> tuple[Any, bool]:
        """The object of ``plugin``, a claim without fault, and whether this call brought it.

        Raises:
            BackendLoadError, IncompatiblePluginError: it cannot be used; so until the next scan.
        """
        known, failed = self.loaded.get(plugin), self._failed.setdefault(current(), {})
        if known is not None:
            return known[0], False
        error = failed.get(plugin)
        if error is None:
            found = self._load(plugin)
            if isinstance(found, tuple):
                known = self.loaded.setdefault(plugin, found)
                failed.pop(plugin, None)  # a question that its own import asked, and could not be answered
                return known[0], known is found
            known = self.loaded.get(plugin)
            if known is not None:
                return known[0], False
            error = failed[plugin] = found
        raise copy.copy(error) from error.__cause__

    def describe(self, plugin: Candidate) -> PluginInfo:
        """What is known about ``plugin``, its rivals apart; loads nothing."""
        forbidden = trust.forbids(plugin)
        if forbidden or plugin.fault:
            return PluginInfo.of([plugin], "blocked" if forbidden else "broken", forbidden or plugin.fault)
        failed = None if plugin in self.loaded else self._failed.get(current(), {}).get(plugin)
        if failed:
            status = "incompatible" if isinstance(failed, IncompatiblePluginError) else "broken"
            return PluginInfo.of([plugin], status, str(failed))
        installed = "loaded" if plugin in self.loaded else "available"
        return PluginInfo.of([plugin], installed if plugin.dist else "registered")

    def _load(self, plugin: Candidate) -> tuple[Any] | PluginError:
        """Import, instantiate and check; whatever is raised is the plugin's failure, but for ``KeyboardInterrupt``."""
        kind: type[PluginError] = BackendLoadError
        cause = None
        try:
            obj: Any = importlib.import_module(plugin.module)
            for part in filter(None, plugin.attr.split(".")):
                obj = getattr(obj, part)
            if isinstance(obj, type):
                obj = obj()
            fault = self._fault(obj, plugin.name)
            if not fault:
                return (obj,)
            kind, problem = type(fault), f"used: {fault}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit and an extension's panic are not an Exception
            cause, problem = error, f"loaded: {brief(error)}{_hint(plugin, error)}"
        source = f", from {plugin.source}" if plugin.source else ""
        failure = kind(
            f"{self._noun} '{plugin.name}' ({plugin.label}) cannot be {problem}\n"
            f"  it is {plugin.value}{source}; once mended, refresh() tries again",
            name=plugin.name,
            dist=plugin.dist,
            version=plugin.version,
        )
        failure.__cause__ = cause
        return failure


def brief(error: BaseException) -> str:
    """Type and first line of what a plugin raised, even if its own text cannot be had."""
    try:
        lines = str(error).splitlines()
    except Exception as worse:  # noqa: BLE001 - a faulty __str__ is the plugin's too
        return f"{type(error).__name__}, whose text raises {type(worse).__name__}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def type_name(obj: Any) -> str:
    """A short name of an object or class for messages: ``"acme.Backend"``."""
    kind = obj if isinstance(obj, type) else type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def _call_problem(obj: Any, method: str, positional: tuple[str, ...], keywords: tuple[str, ...]) -> str:
    function = getattr(obj, method)
    if not callable(function):
        return f"{method} must be a method, got {shown(function)}"
    signature: object = ""
    try:
        signature = inspect.signature(function)
        signature.bind(*positional, **dict.fromkeys(keywords))
    except ValueError:
        return ""  # a compiled method need not tell its signature
    except TypeError as error:
        call = ", ".join([*positional, *(f"{keyword}=..." for keyword in keywords)])
        return f"{method}{signature} cannot be called as {method}({call}): {error}"
    return ""


def _hint(plugin: Candidate, error: BaseException) -> str:
    gone = error.name if isinstance(error, ModuleNotFoundError) else None
    if gone and plugin.dist and f"{plugin.module}.".startswith(f"{gone}."):
        return f"; its metadata is installed but its code is not: pip install --force-reinstall {plugin.dist}"
    return ""
