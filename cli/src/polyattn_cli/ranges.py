"""Packages that are installed in a version outside the range that polyattn, or what needs polyattn, declares."""

from __future__ import annotations

import itertools

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from polyattn.registry import brief, discovery


def outside() -> tuple[list[str], list[str]]:
    """What to do about each such package, and which metadata could not be read; one text each.

    Every range comes from the metadata of a distribution, which is where pip reads it.
    """
    unreadable: list[str] = []
    versions: dict[str, str] = {}
    askers: dict[tuple[str, SpecifierSet], list[str]] = {}
    for dist in discovery.distributions(unreadable):
        try:
            text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
            header = discovery.header_of(text)
            name, version = discovery.normalized(header.get("name", "")), header.get("version", "")
            if name in versions:
                continue  # the first one on sys.path is what is imported
            versions[name] = version
            needs = _needs(text) if "polyattn" in text else []
        except Exception as error:  # noqa: BLE001 - any metadata may be broken in any way
            unreadable.append(f"{getattr(dist, '_path', dist)}: {brief(error)}")
            continue
        if name == "polyattn" or any(discovery.normalized(need.name) == "polyattn" for need in needs):
            for need in needs:
                key = (discovery.normalized(need.name), need.specifier)
                askers.setdefault(key, []).append(f"{name} {version}")
    found = []
    for (package, specifier), names in askers.items():
        version = versions.get(package, "")
        if version and not specifier.contains(version, prereleases=True):
            declared = ",".join(sorted(map(str, specifier), reverse=True))
            found.append(
                f"{package} {version} is outside the range {declared} that {_listed(names)}; "
                f"run: pip install '{package}{declared}'"
            )
    return found, unreadable


def _needs(text: str) -> list[Requirement]:
    header = itertools.takewhile(str.strip, text.splitlines())
    every = [Requirement(line.partition(":")[2]) for line in header if line.lower().startswith("requires-dist:")]
    return [need for need in every if need.marker is None or need.marker.evaluate({"extra": ""})]


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'declares' if len(names) == 1 else 'declare'}"
