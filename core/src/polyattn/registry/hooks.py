"""Hooks: what any number of installed packages may do at once, through pluggy.

A hook plugin is an entry point of the group ``polyattn.hooks`` whose value is a module, an object or a class with
functions marked by ``pluggy.HookimplMarker("polyattn")`` and called like one of :class:`Specifications`.

They are loaded at the first question about a hook. One that cannot be loaded, or that asks for a hook or an argument
which does not exist, is left out and shown by ``polyattn doctor``.
"""

from __future__ import annotations

import difflib
import logging
from typing import Any, NamedTuple

import pluggy

from polyattn._errors import BackendLoadError, PluginNotFoundError
from polyattn._reasons import Reason
from polyattn.messages import shown
from polyattn.registry import discovery
from polyattn.registry.discovery import HOOKS
from polyattn.registry.loading import Loader, PluginInfo
from polyattn.registry.permissions import trust

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


class _Found(NamedTuple):
    manager: pluggy.PluginManager
    names: frozenset[str]  # hooks that some plugin implements


_looks: list[list[_Found]] = [[]]  # what was found, if anything; a refresh replaces the inner list, not what is in it
_in_code: dict[str, object] = {}


def installed(name: str) -> bool:
    """Whether any plugin implements the hook ``name``; once hooks are loaded this is a lookup in a set."""
    return name in _loaded().names


def call(hook: str, /, **arguments: Any) -> Any:
    """What the implementations of ``hook`` return, ``None`` left out; of a first result that one, or ``None``.

    The exception of a hook that decides passes through; that of an observer, ``SystemExit`` too, is logged.
    """
    caller = getattr(_loaded().manager.hook, hook)
    try:
        return caller(**arguments)
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
    if not fault and _in_code.setdefault(name, plugin) is not plugin:
        fault = BackendLoadError(f"there is a hook plugin of that name: {shown(_in_code[name])}")
    if fault:
        raise BackendLoadError(f"hook plugin '{name}' cannot be used: {fault}", name=name)
    refresh()


def unregister(name: str) -> None:
    """Remove the hook plugin that :func:`register` added as ``name``; ``PluginNotFoundError`` where there is none."""
    if _in_code.pop(name, None) is None:
        raise PluginNotFoundError(
            f"no hook plugin '{name}' was registered in code; got {', '.join(_in_code) or 'none'}"
        )
    refresh()


def refresh() -> None:
    """When next asked, look again at what is installed and allowed."""
    _looks[0] = []


def infos() -> tuple[PluginInfo, ...]:
    """Every installed hook plugin; those that no question about a hook has loaded yet are ``"available"``."""
    return tuple(map(_loader.describe, discovery.current().candidates[HOOKS]))


def _loaded() -> _Found:
    look = _looks[0]
    if look:
        return look[0]
    manager = _new_manager()
    for plugin in discovery.current().candidates[HOOKS]:
        if plugin.fault or trust.forbids(plugin):
            continue
        try:
            obj, _ = _loader.get(plugin)
        except BackendLoadError as error:
            _logger.warning("%s", error)
            continue
        if not manager.is_registered(obj):  # several entry points may lead to one object
            manager.register(obj, f"{plugin.dist}:{plugin.name}={plugin.value}")
    for name, in_code in list(_in_code.items()):
        if not manager.is_registered(in_code):
            manager.register(in_code, name)
    names = frozenset(name for name in NAMES if getattr(manager.hook, name).get_hookimpls())
    look.insert(0, _Found(manager, names))
    return look[0]


def _fault(plugin: object, _name: str = "") -> BackendLoadError | None:
    """What keeps ``plugin`` from being a hook plugin, found without adding it."""
    trial = _new_manager()
    try:
        trial.register(plugin, "hook plugin")
    except pluggy.PluginValidationError as error:
        return BackendLoadError(" ".join(str(error).split()))
    callers = trial.get_hookcallers(plugin) or ()
    unknown = [
        caller.name
        for caller in callers
        if not caller.has_spec() and not all(implementation.optionalhook for implementation in caller.get_hookimpls())
    ]
    if unknown:
        close = difflib.get_close_matches(unknown[0], NAMES, 1)
        meant = f", did you mean {close[0]}?" if close else ";"
        return BackendLoadError(f"there is no hook {', '.join(unknown)}{meant} the hooks are {', '.join(NAMES)}")
    if not callers:
        return BackendLoadError('it has no function marked with pluggy.HookimplMarker("polyattn")')
    return None


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("polyattn")
    manager.add_hookspecs(Specifications)
    return manager


_loader = Loader("hook plugin", _fault)
