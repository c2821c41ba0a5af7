"""From the name in a config to the object behind it: backends and RoPE variants, each in a :class:`Registry`.

Between two distributions that claim one name neither order of installation nor ``sys.path`` decides, but the caller, by
writing ``"dist-name:name"``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from polyattn._errors import (
    BackendLoadError,
    BlockedPluginError,
    ConfigError,
    DuplicatePluginError,
    PluginNotFoundError,
    PolyattnError,
)
from polyattn.messages import shown
from polyattn.registry import discovery, hooks
from polyattn.registry.discovery import BACKENDS, Candidate, candidate, illegal_name
from polyattn.registry.loading import BACKEND, READER, ROPE_VARIANT, SCOPE, Contract, Loader, PluginInfo, type_name
from polyattn.registry.names import conflict, unknown
from polyattn.registry.permissions import trust

_logger = logging.getLogger("polyattn")
_serials = itertools.count(1)
#: What the metadata alone says about a name, by the error that ``get`` would raise.
_STATUS = {DuplicatePluginError: "conflict", BlockedPluginError: "blocked", BackendLoadError: "broken"}


class Registry:
    """The plugins of one group, by name.

    ``names()`` and ``info(name)`` read distribution metadata and import nothing. ``get(name)`` imports one plugin,
    checks it, and from then on returns the same object to every thread; the error of a plugin that cannot be used is
    raised by ``get`` of its own name, and only there. Every method may be called from any thread, and by a plugin while
    it is imported: no lock is held, and no table is changed but by single operations on a dict.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._registered: dict[str, Candidate] = {}
        self._overrides: dict[int, Candidate] = {}  # the last one of a name holds
        self._registrations = 0  # of the last change to either
        self._loader = Loader(contract.noun, contract.fault)
        self._ready: tuple[object, dict[str, Any]] = (None, {})  # what names were found to mean in one state

    def names(self) -> tuple[str, ...]:
        """Every installed or registered name, sorted, whether or not it can be loaded; imports no plugin."""
        legal = [plugin.name for plugin in self._installed() if not illegal_name(plugin.group, plugin.name)]
        return tuple(sorted({*legal, *self._in_code()}))

    def loaded(self) -> tuple[str, ...]:
        """The names whose plugin is loaded and allowed, so that :meth:`get` imports nothing."""
        sound = {name: _sound(self._claims_of(name)) for name in self.names()}
        return tuple(name for name, claims in sound.items() if len(claims) == 1 and claims[0] in self._loader.loaded)

    def state(self) -> tuple[object, ...]:
        """What decides which object a name means; while it is equal, each name means the same object."""
        return discovery.current(), trust.rules(), self._registrations

    def info(self, name: str) -> PluginInfo:
        """What is known about ``name``; imports no plugin.

        The fields of several distributions that claim it are joined with commas; :meth:`infos` tells them apart.
        """
        claims = self._claims(name)
        try:
            return self._loader.describe(self._choose(name, claims))
        except PolyattnError as error:
            return PluginInfo.of(claims, _STATUS[type(error)], str(error))

    def infos(self) -> tuple[PluginInfo, ...]:
        """What is known about every claim to any name, rivals, blocked and broken ones apart; imports no plugin."""
        infos = list(map(self._loader.describe, self._in_code().values()))
        for name, group in itertools.groupby(self._installed(), key=operator.attrgetter("name")):
            claims = list(group)
            rivals = _sound(claims)
            infos += map(self._loader.describe, claims if len(rivals) < 2 else set(claims).difference(rivals))
            if len(rivals) > 1:
                text = conflict(self._contract.noun, name, rivals)
                infos += [PluginInfo.of([plugin], "conflict", text) for plugin in rivals]
        return tuple(sorted(infos, key=lambda info: (info.name, info.dist, info.version, info.value)))

    def get(self, name: str) -> Any:
        """The plugin object called ``name``, imported and checked at its first use.

        Raises:
            PluginNotFoundError: nothing has that name; the text says which names there are and how to get it.
            DuplicatePluginError: several distributions claim it.
            BlockedPluginError: an allow or disable list forbids it; none of its code was run.
            BackendLoadError: importing or checking it failed, now or earlier; :meth:`refresh` tries again.
            IncompatiblePluginError: it speaks another ``api_version``.
        """
        state = self.state()
        known, objects = self._ready
        if known != state:
            objects = {}
            self._ready = state, objects
        found = objects.get(name) if isinstance(name, str) else None
        if found is None:
            found = objects[name] = self._object(self._choose(name, self._claims(name)))
        return found

    def resolve(self, name_or_object: Any, options: Any = None) -> Any:
        """The plugin object for a name from a config, or the given object, with ``options`` set unless they are empty.

        Raises:
            ConfigError: the plugin has no options, or not these.
            BackendLoadError, IncompatiblePluginError: the object is not such a plugin; for a name see :meth:`get`.
        """
        obj = self.get(name_or_object) if isinstance(name_or_object, str) else self._checked(name_or_object)
        if not options:
            return obj
        if not hasattr(obj, "configure"):
            raise ConfigError(
                f"{self._contract.noun} '{obj.name}' has no options, got {shown(options)}; leave them out"
            )
        return self._checked(obj.configure(options))

    def register(self, name: str, obj: Any, replace: bool = False) -> None:
        """Make ``obj`` available as ``name`` in this process.

        Args:
            obj: a plugin object, a class to instantiate, or ``"module:attribute"``, which is imported at first use.
            replace: whether it may hide what is installed or registered under that name.

        Raises:
            DuplicatePluginError: the name is taken and ``replace`` is off.
            BackendLoadError, IncompatiblePluginError: the name is not legal or the object is not such a plugin.
        """
        known = self._registered.get(name)
        holders = [known] if known else _sound(self._claims_installed(name))
        if not replace and any(_leads_to(holder, obj) for holder in holders):
            return  # a plugin that registers at import what its own entry point names
        claim = self._claim(name, obj)
        if replace:
            holders, self._registered[name] = [], claim
        elif not holders:
            known = self._registered.setdefault(name, claim)  # another thread may have come first
            holders = [] if known is claim else [known]
        if holders:
            taken = ", ".join(f"{holder.label} ({holder.value})" for holder in holders)
            raise DuplicatePluginError(
                f"cannot register {_value(obj)} as {self._contract.noun} '{name}': the name is taken by {taken}; "
                "choose another name, pass replace=True, or use override() for a while"
            )
        self._registrations = next(_serials)

    def unregister(self, name: str) -> None:
        """Take back what :meth:`register` did to ``name``; an error says that it did nothing."""
        claim = self._registered.pop(name, None)
        if claim is None:
            raise self._contract.not_found(
                f"no {self._contract.noun} '{name}' was registered in code; what is installed is uninstalled with pip, "
                f"or kept from loading with disable([{shown(name)}])"
            )
        self._forget(claim)

    @contextlib.contextmanager
    def override(self, name: str, obj: Any) -> Iterator[Any]:
        """Let ``name`` mean ``obj`` (see :meth:`register`) in all threads meanwhile; contexts may nest and overlap."""
        claim = self._claim(name, obj)
        self._overrides[claim.serial] = claim
        self._registrations = next(_serials)
        try:
            yield self._object(claim)
        finally:
            del self._overrides[claim.serial]
            self._forget(claim)

    def refresh(self) -> None:
        """Look again at what is installed, for the whole process, and let what failed be tried again."""
        discovery.rescan()
        hooks.refresh()

    def allow(self, dists: Iterable[str] | None) -> None:
        """Load only plugins of these distributions, of any group; ``None`` lifts it.

        It holds for this process, beside ``POLYATTN_ALLOW``, which spawned processes inherit too.
        """
        trust.allow(dists)
        hooks.refresh()

    def disable(self, names: Iterable[str]) -> None:
        """Never load these names (``"name"`` or ``"dist-name:name"``), of any group; the last list given holds.

        It holds for this process, beside ``POLYATTN_DISABLE``, which spawned processes inherit too.
        """
        trust.disable(names)
        hooks.refresh()

    def __repr__(self) -> str:
        return f"<Registry {self._contract.group}>"

    def _installed(self) -> tuple[Candidate, ...]:
        return discovery.current().candidates[self._contract.group]

    def _in_code(self) -> dict[str, Candidate]:
        """What each name means that was registered or is overridden."""
        return {**self._registered, **{claim.name: claim for claim in list(self._overrides.values())}}

    def _claims(self, name: str) -> list[Candidate]:
        if not isinstance(name, str):
            raise self._contract.not_found(f"a {self._contract.noun}'s name must be a str, got {shown(name)}")
        claims = self._claims_of(name)
        if not claims:
            raise self._contract.not_found(unknown(self._contract.group, self._contract.noun, name, self.names()))
        return claims

    def _claims_of(self, name: str) -> list[Candidate]:
        installed, in_code = self._claims_installed(name), self._in_code().get(name)
        return [in_code] if in_code else installed

    def _claims_installed(self, name: str) -> list[Candidate]:
        return [plugin for plugin in self._installed() if plugin.is_called(name)]

    def _choose(self, name: str, claims: list[Candidate]) -> Candidate:
        """The one of ``claims`` that may and can be loaded."""
        sound, noun = _sound(claims), self._contract.noun
        if len(sound) == 1:
            return sound[0]
        if sound:
            raise DuplicatePluginError(conflict(noun, name, sound))
        forbidden = {plugin: trust.forbids(plugin) for plugin in claims}
        first = next((plugin for plugin in claims if not forbidden[plugin]), claims[0])
        about = {"name": name, "dist": first.dist, "version": first.version}
        if forbidden[first]:
            who = "; ".join(f"{plugin.label}: {why}" for plugin, why in forbidden.items())
            raise BlockedPluginError(f"{noun} '{name}' may not be loaded ({who})", **about)
        text = f"{noun} '{name}' ({first.label}) cannot be loaded: {first.fault}\n  from {first.source}"
        raise BackendLoadError(text, **about)

    def _object(self, plugin: Candidate) -> Any:
        obj, first = self._loader.get(plugin)
        if first:
            _logger.info("loaded %s '%s': %s (%s)", self._contract.noun, plugin.name, plugin.label, plugin.value)
            if self._contract.group == BACKENDS and hooks.installed("polyattn_backend_loaded"):
                hooks.call("polyattn_backend_loaded", name=plugin.name, backend=obj)
        return obj

    def _checked(self, obj: Any, name: str | None = None) -> Any:
        fault = self._contract.fault(obj, name)
        if fault:
            text = f"{type_name(obj)} is not a valid {self._contract.noun}: {fault}"
            raise type(fault)(text, name=name or "")
        return obj

    def _claim(self, name: str, obj: Any) -> Candidate:
        """A claim made in code; an object is checked now, and is loaded already."""
        group = self._contract.group
        serial, lazy = next(_serials), isinstance(obj, str)
        claim = candidate(group, name, obj if lazy else "_", serial=serial)
        if claim.fault:
            raise BackendLoadError(
                f"cannot register {_value(obj)} as {self._contract.noun} {shown(name)}: {claim.fault}", name=name
            )
        if not lazy:
            claim = Candidate(name, group, _value(obj), serial=serial)
            self._loader.loaded[claim] = (self._checked(obj() if isinstance(obj, type) else obj, name),)
        return claim

    def _forget(self, claim: Candidate) -> None:
        self._registrations = next(_serials)
        self._loader.loaded.pop(claim, None)


def _sound(claims: Iterable[Candidate]) -> list[Candidate]:
    return [plugin for plugin in claims if not plugin.fault and not trust.forbids(plugin)]


def _leads_to(holder: Candidate, obj: Any) -> bool:
    """Whether ``obj`` is what ``holder``'s entry point names; imports nothing."""
    if isinstance(obj, str):
        return obj == holder.value
    target: Any = sys.modules.get(holder.module)
    for part in filter(None, holder.attr.split(".")):
        target = getattr(target, part, None)
    return target is not None and (obj is target or type(obj) is target)


def _value(obj: Any) -> str:
    return obj if isinstance(obj, str) else type_name(obj)


backends = Registry(BACKEND)
rope_variants = Registry(ROPE_VARIANT)
readers = Registry(READER)
scopes = Registry(SCOPE)


def restored(name: str, kind: type[Any], options: Any) -> Any:
    """A backend that was pickled: the process's own object where ``name`` means the same class, so that workers share.

    Else it is made of its class, such as one of two rivals, or one that was never registered.
    """
    with contextlib.suppress(PluginNotFoundError, DuplicatePluginError):
        known = backends.get(name)
        if type(known) is kind:
            return known if known.options == options else known.configure(options)
    return kind() if options is None else kind(options)
