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
from typing import TypeAlias

from polyattn.registry.discovery import Candidate, normalized

ALLOW = "POLYATTN_ALLOW"
DISABLE = "POLYATTN_DISABLE"


#: Every list at one moment: allow and disable from the environment, then from code; ``None``: nobody gave that list.
Rules: TypeAlias = tuple[str | None, str | None, tuple[str, ...] | None, tuple[str, ...]]


class Trust:
    """The lists of this process."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] | None = None
        self._disabled: tuple[str, ...] = ()

    def allow(self, dists: Iterable[str] | None) -> None:
        """Load plugins of these distributions only; ``None`` lifts the list again."""
        self._allowed = None if dists is None else tuple(dists)

    def disable(self, names: Iterable[str]) -> None:
        """Never load these names (``"name"`` or ``"dist:name"``); replaces the names given before."""
        self._disabled = tuple(names)

    def rules(self) -> Rules:
        """What the lists say now, to compare with what they said before."""
        return os.environ.get(ALLOW), os.environ.get(DISABLE), self._allowed, self._disabled

    def forbids(self, plugin: Candidate) -> str:
        """Which list forbids ``plugin``, for a message; empty when none does."""
        for where, names in self._disable_lists():
            if any(_matches(entry, plugin) for entry in names):
                return f"{where} disables it"
        if plugin.dist:
            for where, dists in self._allow_lists():
                if normalized(plugin.dist) not in map(normalized, dists):
                    return f"{where} does not allow its distribution '{plugin.dist}'"
        return ""

    def absent(self, installed: Iterable[str]) -> list[str]:
        """Allowed distributions that are not among ``installed``, one text each."""
        known = set(map(normalized, installed))
        return [
            f"{where} allows '{dist}', which is not installed or brings no plugin"
            for where, dists in self._allow_lists()
            for dist in dists
            if normalized(dist) not in known
        ]

    def idle(self, plugins: Iterable[Candidate]) -> list[str]:
        """Disabled names that none of ``plugins`` has, one text each: they may be misspelt."""
        known = tuple(plugins)
        return [
            f"{where} disables '{entry}', which no installed plugin is called"
            for where, names in self._disable_lists()
            for entry in names
            if not any(_matches(entry, plugin) for plugin in known)
        ]

    def _disable_lists(self) -> list[tuple[str, tuple[str, ...]]]:
        given = os.environ.get(DISABLE, "")
        return [(f"{DISABLE}={given}", _split(given)), (f"backends.disable({list(self._disabled)})", self._disabled)]

    def _allow_lists(self) -> list[tuple[str, tuple[str, ...]]]:
        lists = []
        if ALLOW in os.environ:
            lists.append((f"{ALLOW}={os.environ[ALLOW]}", _split(os.environ[ALLOW])))
        if self._allowed is not None:
            lists.append((f"backends.allow({list(self._allowed)})", self._allowed))
        return lists


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _matches(entry: str, plugin: Candidate) -> bool:
    dist, _, name = entry.rpartition(":")
    return name == plugin.name and (not dist or normalized(dist) == normalized(plugin.dist))


trust = Trust()
