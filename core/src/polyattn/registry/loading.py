"""Importing one plugin and checking what it brought, with every failure turned into an error that names the plugin."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

from polyattn._errors import BackendLoadError, IncompatiblePluginError
from polyattn.registry.discovery import Candidate

Fault: TypeAlias = tuple[type[BackendLoadError | IncompatiblePluginError], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A plugin that was imported and checked."""

    obj: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Failed:
    """A plugin that cannot be used, remembered so that its import is not repeated at every question."""

    plugin: Candidate
    kind: type[BackendLoadError | IncompatiblePluginError]
    message: str
    cause: BaseException | None = None

    @property
    def status(self) -> str:
        """``"incompatible"`` for another api_version, else ``"broken"``."""
        return "incompatible" if self.kind is IncompatiblePluginError else "broken"

    def throw(self) -> NoReturn:
        """Raise the failure, chained to what the plugin raised."""
        plugin = self.plugin
        raise self.kind(self.message, name=plugin.name, dist=plugin.dist, version=plugin.version) from self.cause


Outcome: TypeAlias = Loaded | Failed


@dataclasses.dataclass(frozen=True)
class PluginInfo:
    """What is known about one plugin without loading it.

    Attributes:
        name: the name in a config.
        group: entry-point group.
        status: ``"available"`` (installed, not loaded yet), ``"loaded"``, ``"registered"`` (in code), ``"broken"``,
            ``"incompatible"`` (another api_version), ``"blocked"`` (by a trust list) or ``"conflict"`` (several
            distributions claim the name).
        dist: distribution's name; empty when registered in code.
        version: distribution's version.
        summary: distribution's one-line summary.
        value: ``"module:attribute"``.
        source: the metadata file that the entry point comes from.
        error: what is wrong and what to do; empty when nothing is.
    """

    name: str
    group: str
    status: str
    dist: str = ""
    version: str = ""
    summary: str = ""
    value: str = ""
    source: str = ""
    error: str = ""

    @classmethod
    def of(cls, plugin: Candidate, status: str, error: str = "") -> PluginInfo:
        """The info of one claim."""
        fields = {field.name: getattr(plugin, field.name, "") for field in dataclasses.fields(cls)}
        return cls(**{**fields, "status": status, "error": error})

    def to_dict(self) -> dict[str, str]:
        """The info as a JSON object."""
        return dataclasses.asdict(self)


def describe(plugin: Candidate, outcome: Outcome | None, forbidden: str) -> PluginInfo:
    """The info of one claim that has no rival."""
    if forbidden:
        return PluginInfo.of(plugin, "blocked", forbidden)
    if plugin.fault:
        return PluginInfo.of(plugin, "broken", plugin.fault)
    if isinstance(outcome, Failed):
        return PluginInfo.of(plugin, outcome.status, outcome.message)
    if not plugin.dist:
        return PluginInfo.of(plugin, "registered")
    return PluginInfo.of(plugin, "available" if outcome is None else "loaded")


def load(plugin: Candidate, noun: str, fault: Callable[[Any], Fault | None]) -> Outcome:
    """Import ``plugin``, instantiate it if it is a class, and check it.

    Args:
        plugin: a claim without fault.
        noun: what such a plugin is called in messages.
        fault: what is wrong with the object, or ``None``.

    Returns:
        The object, or why there is none. Whatever is raised is the plugin's failure (``SystemExit`` and the panic of an
        extension too, which do not derive from ``Exception``); only ``KeyboardInterrupt`` passes through.
    """
    where = f"{noun} '{plugin.name}' ({plugin.label})"
    try:
        obj: Any = importlib.import_module(plugin.module)
        for part in filter(None, plugin.attr.split(".")):
            obj = getattr(obj, part)
        if isinstance(obj, type):
            obj = obj()
        found = fault(obj)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is its own failure
        text = f"{where} cannot be loaded: {brief(error)}{_hint(plugin, error)}\n{_origin(plugin)}"
        return Failed(plugin, BackendLoadError, text, error)
    if found:
        kind, problem = found
        return Failed(plugin, kind, f"{where} cannot be used: {problem}\n{_origin(plugin)}")
    return Loaded(obj)


class Outcomes:
    """What came of loading each plugin of one kind, found by each at most once and remembered.

    No lock is held while a plugin is imported. Where threads load one at once, the first object serves all of them.
    """

    def __init__(self) -> None:
        self._loaded: dict[Candidate, Loaded] = {}
        self._failed: dict[Candidate, Failed] = {}

    def peek(self, plugin: Candidate) -> Outcome | None:
        """What came of ``plugin``, if it was loaded."""
        return self._loaded.get(plugin) or self._failed.get(plugin)

    def get(self, plugin: Candidate, noun: str, fault: Callable[[Any], Fault | None]) -> tuple[Outcome, bool]:
        """What came of ``plugin``, loaded if need be (see :func:`load`), and whether this call brought it."""
        known, failed = self.peek(plugin), self._failed
        if known is not None:
            return known, False
        outcome = load(plugin, noun, fault)
        if isinstance(outcome, Loaded):
            known = self._loaded.setdefault(plugin, outcome)
            failed.pop(plugin, None)  # a question that its own import asked, and could not be answered
        else:
            known = self._loaded.get(plugin)
            if known is None:
                known = failed[plugin] = outcome
        return known, known is outcome

    def put(self, plugin: Candidate, obj: Any) -> None:
        """Let ``obj`` be what ``plugin`` brought."""
        self._loaded[plugin] = Loaded(obj)

    def retry(self, installed: Iterable[Candidate]) -> None:
        """Forget what failed, and what was loaded of distributions that are no longer among ``installed``."""
        self._failed = {}  # a load that is under way notes its failure in the old one
        known = set(installed)
        for plugin in list(self._loaded):
            if plugin.dist and plugin not in known:
                self.forget(plugin)

    def forget(self, plugin: Candidate) -> None:
        """Drop what came of ``plugin``."""
        self._loaded.pop(plugin, None)


def brief(error: BaseException) -> str:
    """Type and first line of what a plugin raised, even if its own text cannot be had."""
    try:
        lines = str(error).splitlines()
    except Exception as worse:  # noqa: BLE001 - a faulty __str__ is the plugin's too
        return f"{type(error).__name__}, whose text raises {type(worse).__name__}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _origin(plugin: Candidate) -> str:
    source = f", from {plugin.source}" if plugin.source else ""
    return f"  it is {plugin.value}{source}; once mended, refresh() tries again"


def _hint(plugin: Candidate, error: BaseException) -> str:
    gone = error.name if isinstance(error, ModuleNotFoundError) else None
    if gone and plugin.dist and f"{plugin.module}.".startswith(f"{gone}."):
        return f"; its metadata is installed but its code is not: pip install --force-reinstall {plugin.dist}"
    return ""
