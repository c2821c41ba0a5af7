"""Which plugins may be loaded at all, decided by name before any of their code runs.

Two lists, each from the environment and from code; a plugin must pass all of them:

* allow, of distributions: ``POLYATTN_ALLOW=polyattn-sdpa,acme-attention`` (set but empty: none at all);
* disable, of names: ``POLYATTN_DISABLE=fa`` or, for one of two rivals, ``POLYATTN_DISABLE=acme-attention:fa``.

They hold for the plugins of every group. The environment is read at every question, so what a launcher sets reaches
spawned workers. Objects that a program registers itself have no distribution and need no allowance.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from polyattn._errors import ConfigError
from polyattn.messages import shown
from polyattn.registry.discovery import Candidate, normalized

ALLOW = "POLYATTN_ALLOW"
DISABLE = "POLYATTN_DISABLE"


class Trust:
    """The lists of this process."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] | None = None
        self._disabled: tuple[str, ...] | None = None

    def allow(self, dists: Iterable[str] | None) -> None:
        """Load plugins of these distributions only; ``None`` lifts the list again."""
        self._allowed = None if dists is None else _texts("allow", dists)

    def disable(self, names: Iterable[str]) -> None:
        """Never load these names (``"name"`` or ``"dist:name"``); replaces the names given before."""
        self._disabled = _texts("disable", names) or None

    def rules(self) -> tuple[object, ...]:
        """What the lists say now, to compare with what they said before."""
        return os.environ.get(ALLOW), os.environ.get(DISABLE), self._allowed, self._disabled

    def allowing(self) -> dict[str, tuple[str, ...]]:
        """Each allow list by where it was given."""
        return _lists(ALLOW, "allow", self._allowed)

    def disabling(self) -> dict[str, tuple[str, ...]]:
        """Each disable list by where it was given."""
        return _lists(DISABLE, "disable", self._disabled)

    def forbids(self, plugin: Candidate) -> str:
        """Which list forbids ``plugin``, for a message; empty when none does."""
        for where, names in self.disabling().items():
            if any(map(plugin.is_called, names)):
                return f"{where} disables it"
        for where, dists in self.allowing().items() if plugin.dist else ():
            if normalized(plugin.dist) not in map(normalized, dists):
                return f"{where} does not allow its distribution '{plugin.dist}'"
        return ""


def _lists(variable: str, method: str, in_code: tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
    lists, given = {}, os.environ.get(variable)
    if given is not None:
        lists[f"{variable}={given}"] = tuple(filter(None, map(str.strip, given.split(","))))
    if in_code is not None:
        lists[f"backends.{method}({list(in_code)})"] = in_code
    return lists


def _texts(method: str, given: Iterable[str]) -> tuple[str, ...]:
    texts = tuple(given)
    if isinstance(given, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{method}() needs a list of strings, got {shown(given)}")
    return texts


trust = Trust()
