"""Hooks: what any number of installed packages may do at once, through pluggy.

A hook plugin is an entry point of the group ``polyattn.hooks`` whose value is a module, an object or a class with
functions marked by ``pluggy.HookimplMarker("polyattn")``::

    hookimpl = pluggy.HookimplMarker("polyattn")


    @hookimpl
    def polyattn_prepared(prepared):
        print(prepared.backend.name, prepared.layout.describe())

They are loaded one by one, at the first question about a hook, and never by ``import polyattn``. One that cannot be
loaded, or that asks for a hook or an argument which does not exist, is left out and shown by ``polyattn doctor``.
"""

from __future__ import annotations

import difflib
import functools
import logging
from typing import Any

import pluggy

from polyattn._errors import BackendLoadError
from polyattn._reasons import Reason
from polyattn.messages import shown
from polyattn.registry import discovery
from polyattn.registry.discovery import HOOKS, Candidate
from polyattn.registry.loading import Failed, Fault, Loaded, Outcome, PluginInfo, describe, load
from polyattn.registry.once import Once, TableLock
from polyattn.registry.trust import trust

_logger = logging.getLogger("polyattn")
_spec = pluggy.HookspecMarker("polyattn")


class Specifications:
    """Every hook there is. An implementation may take any subset of the arguments."""

    @staticmethod
    @_spec
    def polyattn_backend_loaded(name: str, backend: object) -> None:
        """Observe that a backend (an ``AttentionBackend``) was loaded, once for each."""

    @staticmethod
    @_spec(firstresult=True)
    def polyattn_select_backend(layout: object, request: object, candidates: tuple[str, ...]) -> str | None:
        """A site's policy for ``auto``: one of ``candidates``, all of which can do the request, or ``None``.

        ``layout`` is a ``MaskLayout``, ``request`` an ``AttentionRequest``.
        """

    @staticmethod
    @_spec
    def polyattn_prepared(prepared: object) -> None:
        """Observe that a layout and a request were prepared (a ``PreparedAttention``): tracing, counters."""

    @staticmethod
    @_spec
    def polyattn_check_servable(spec: object, target: str) -> tuple[Reason, ...] | None:
        """Why the serving engine ``target`` cannot serve ``spec``, an ``AttentionSpec``."""


NAMES = tuple(name for name in dir(Specifications) if name.startswith("polyattn_"))
#: Hooks that only watch: an exception of theirs is logged and stops nothing.
_OBSERVERS = frozenset({"polyattn_backend_loaded", "polyattn_prepared"})


def installed(name: str) -> bool:
    """Whether any plugin implements the hook ``name``; once hooks are loaded this is a lookup in a set."""
    known = _state.implemented
    return name in (_load() if known is None else known)


def call(hook: str, /, **arguments: Any) -> Any:
    """Call every implementation of ``hook``; ask :func:`installed` first.

    Returns:
        The results that are not ``None``, as a list; for ``polyattn_select_backend`` the first one or ``None``.
        The exception of a hook that decides passes through; that of an observer, ``SystemExit`` too, is logged with its
        traceback.
    """
    try:
        return getattr(_manager.hook, hook)(**arguments)
    except BaseException as error:
        if hook not in _OBSERVERS or isinstance(error, KeyboardInterrupt):
            raise
        _logger.exception("an implementation of the hook %s failed; nothing but its observation is lost", hook)
        return []


def register(plugin: object, name: str) -> None:
    """Add a hook plugin in code.

    Raises:
        BackendLoadError: it has no hook, or one with an unknown name or argument, or ``name`` is taken.
    """
    fault = _fault(plugin)
    with _lock:
        if not fault and _manager.has_plugin(name):
            fault = BackendLoadError, f"there is a hook plugin of that name: {shown(_manager.get_plugin(name))}"
        if not fault:
            _manager.register(plugin, name)
    if fault:
        kind, problem = fault
        raise kind(f"hook plugin '{name}' cannot be used: {problem}", name=name)
    refresh()


def unregister(name: str) -> None:
    """Remove the hook plugin that :func:`register` added as ``name``."""
    with _lock:
        _manager.unregister(name=name)
    refresh()


def refresh() -> None:
    """When next asked, look again at what is installed and allowed, and try again what failed."""
    _outcomes.forget(lambda _, outcome: isinstance(outcome, Failed))
    with _lock:
        _state.generation += 1
        _state.implemented = None


def infos() -> tuple[PluginInfo, ...]:
    """Every installed hook plugin; those that no question about a hook has loaded yet are ``"available"``."""
    plugins = discovery.current().candidates[HOOKS]
    return tuple(describe(plugin, _outcomes.peek(plugin), trust.forbids(plugin)) for plugin in plugins)


def _load() -> frozenset[str]:
    generation = _state.generation
    usable: dict[str, Any] = {}
    for plugin in discovery.current().candidates[HOOKS]:
        if plugin.fault or trust.forbids(plugin):
            continue
        outcome, first = _outcomes.get(plugin, functools.partial(load, plugin, "hook plugin", _fault))
        if isinstance(outcome, Loaded):
            usable[f"{plugin.dist}:{plugin.name}={plugin.value}"] = outcome.obj
        elif first:
            _logger.warning("%s", outcome.message)
    with _lock:
        for name in _from_metadata - usable.keys():
            _from_metadata.remove(name)
            _manager.unregister(name=name)
        for name, plugin_object in usable.items():
            # Several entry points may lead to one object, whose functions are called once.
            if name not in _from_metadata and not _manager.is_registered(plugin_object):
                _manager.register(plugin_object, name)
                _from_metadata.add(name)
        names = frozenset(name for name in NAMES if getattr(_manager.hook, name).get_hookimpls())
        if generation == _state.generation:
            _state.implemented = names
    return names


def _fault(plugin: object) -> Fault | None:
    """What keeps ``plugin`` from being a hook plugin, found without adding it."""
    trial = _new_manager()
    try:
        trial.register(plugin, "hook plugin")
    except pluggy.PluginValidationError as error:
        return BackendLoadError, " ".join(str(error).split())
    callers = trial.get_hookcallers(plugin) or ()
    unknown = [
        caller.name
        for caller in callers
        if not caller.has_spec() and not all(implementation.optionalhook for implementation in caller.get_hookimpls())
    ]
    if unknown:
        close = difflib.get_close_matches(unknown[0], NAMES, 1)
        meant = f", did you mean {close[0]}?" if close else ";"
        return BackendLoadError, f"there is no hook {', '.join(unknown)}{meant} the hooks are {', '.join(NAMES)}"
    if not callers:
        return BackendLoadError, 'it has no function marked with pluggy.HookimplMarker("polyattn")'
    return None


class _State:
    implemented: frozenset[str] | None = None  # hooks that some plugin implements; None: not looked yet
    generation = 0  # counts refreshes, so that a load that one overtook does not undo it


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("polyattn")
    manager.add_hookspecs(Specifications)
    return manager


_lock = TableLock()
_manager = _new_manager()
_outcomes: Once[Candidate, Outcome] = Once(final=lambda outcome: isinstance(outcome, Loaded))
_from_metadata: set[str] = set()
_state = _State()
