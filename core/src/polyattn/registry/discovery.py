"""What is installed, read from distribution metadata alone: nothing here imports a plugin or torch.

One scan serves the whole process until :func:`rescan`. Of every installed distribution it opens one small file,
``entry_points.txt``. What is wrong with an entry point is kept beside it, never raised: one bad package harms no other.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata

from polyattn.messages import shown

BACKENDS = "polyattn.backends"
ROPE = "polyattn.rope"
HOOKS = "polyattn.hooks"
READERS = "polyattn.readers"
SCOPES = "polyattn.scopes"
GROUPS = (BACKENDS, ROPE, HOOKS, READERS, SCOPES)
#: The name in a config that stands for "decide per request"; no plugin may have it.
AUTO = "auto"

_LEGAL_NAME = re.compile(r"[a-z][a-z0-9_]*")
# What would act on a terminal instead of being shown there: controls, and marks that turn the direction of writing.
_ACTS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_VALUE = re.compile(r"([\w.]+)\s*(?::\s*([\w.]+)\s*)?(?:\[.*\]\s*)?")
_HEADER = re.compile(r"^(name|version|summary):(.*)$", re.IGNORECASE | re.MULTILINE)
_logger = logging.getLogger("polyattn")
_scans: dict[str, Scan] = {}


@dataclasses.dataclass(frozen=True)
class Claim:
    """Who claims a name.

    Attributes:
        name: the name, as in a config.
        group: entry-point group.
        value: what the metadata says (``"module:attribute"``), or what was registered.
        dist: distribution's name; empty when registered in code.
        version: distribution's version.
        summary: distribution's one-line summary.
        source: the metadata file that the entry point comes from.
    """

    name: str
    group: str
    value: str = ""
    dist: str = ""
    version: str = ""
    summary: str = ""
    source: str = ""

    @property
    def label(self) -> str:
        """Who makes the claim: ``"polyattn-sdpa 0.1.0"``."""
        return f"{self.dist} {self.version}" if self.dist else "registered in code"

    def is_called(self, name: str) -> bool:
        """Whether ``name``, or ``"dist:name"``, means it."""
        dist, _, bare = name.rpartition(":")
        return bare == self.name and (not dist or normalized(dist) == normalized(self.dist))


@dataclasses.dataclass(frozen=True)
class Candidate(Claim):
    """One claim to a name, with what loads it.

    Attributes:
        module: module to import; empty when ``fault`` is set or an object was registered.
        attr: attribute path inside the module; may be empty.
        fault: why it can never be loaded; empty when nothing is wrong with the metadata.
        serial: tells registrations in code apart; 0 for installed entry points.
    """

    module: str = ""
    attr: str = ""
    fault: str = ""
    serial: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """The installed claims of each group at one moment, sorted by name and distribution."""

    candidates: Mapping[str, tuple[Candidate, ...]]


def current() -> Scan:
    """The scan of this process, made at the first call."""
    return _scans.get("now") or _scans.setdefault("now", _scan())


def rescan() -> Scan:
    """Look again, also for modules that were installed since; readers see the old scan until the new one is whole."""
    importlib.invalidate_caches()
    scan = _scans["now"] = _scan()
    return scan


def normalized(dist: str) -> str:
    """The one spelling of a distribution's name: ``"Polyattn_FA2"`` and ``"polyattn-fa2"`` are the same."""
    # Other letters than these have look-alikes in lower case: the Kelvin sign.
    return re.sub(r"[A-Z]", lambda letter: letter[0].lower(), re.sub(r"[-_.]+", "-", dist.strip()))


def candidate(group: str, name: str, value: str, **origin: Any) -> Candidate:
    """A claim with its value taken apart, or with the fault that keeps it from ever loading."""
    fault = illegal_name(group, name)
    match = _VALUE.fullmatch(value)
    module, attr = match.groups("") if match else ("", "")
    if not fault and not all(map(str.isidentifier, (f"{module}.{attr}" if attr else module).split("."))):
        fault = f"the entry point's value must be 'module' or 'module:attribute', got {shown(value)}"
    if fault:
        module = attr = ""
    return Candidate(name, group, value, **origin, module=module, attr=attr, fault=fault)


def illegal_name(group: str, name: str) -> str:
    """Why a plugin of ``group`` may not be called ``name``; empty when it may."""
    if not _LEGAL_NAME.fullmatch(name):
        return f"a plugin's name must match {_LEGAL_NAME.pattern}, got {name!a}"  # look-alikes are told apart
    if group == BACKENDS and name == AUTO:
        return f"the name '{AUTO}' is reserved: it means that polyattn decides for each request"
    return ""


def _scan() -> Scan:
    problems: list[str] = []
    found: dict[str, list[tuple[Candidate, bool]]] = {}
    for dist in distributions(problems):
        try:
            for claim, whole in list(_claims(dist)):
                found.setdefault(normalized(claim.dist), []).append((claim, whole))
        except Exception as error:  # noqa: BLE001 - any metadata may be broken in any way; `polyattn doctor` shows it
            problems.append(f"{getattr(dist, '_path', dist)}: {type(error).__name__}: {error}")
    for problem in problems:
        _logger.warning("not all metadata can be read: %s", problem)
    claims = [claim for mine in found.values() for claim in _distinct(mine)]
    for claim in filter(lambda claim: claim.fault, claims):
        _logger.warning("plugin %r of %s is ignored: %s (%s)", claim.name, claim.label, claim.fault, claim.source)
    claims.sort(key=lambda claim: (claim.name, claim.dist, claim.version, claim.value))
    return Scan({group: tuple(claim for claim in claims if claim.group == group) for group in GROUPS})


def distributions(problems: list[str]) -> list[Any]:
    """Every installed distribution; a finder that fails is a problem and hides nothing of the others."""
    found: list[Any] = []
    # Like an import, it passes over what is not text on sys.path.
    path = [entry for entry in sys.path if isinstance(entry, str) and "\0" not in entry]
    context = importlib_metadata.DistributionFinder.Context(path=path)  # type: ignore[no-untyped-call]
    for finder in sys.meta_path:
        try:
            found += getattr(finder, "find_distributions", lambda _: ())(context)
        except Exception as error:  # noqa: BLE001 - a finder of somebody else may be broken in any way
            problems.append(f"{shown(finder)} of sys.meta_path: {type(error).__name__}: {error}")
    return found


def printable(text: str) -> str:
    """``text`` from metadata, safe to print."""
    return _ACTS.sub(lambda match: ascii(match[0])[1:-1], text.removeprefix("\ufeff"))


def _claims(dist: Any) -> Iterator[tuple[Candidate, bool]]:
    """Every claim of a folder of metadata, and whether its main file is there."""
    text = dist.read_text("entry_points.txt")
    if not text or "polyattn." not in text:
        return
    folder = str(getattr(dist, "_path", "")).rstrip("\\/")  # inside a zip it ends with a slash
    stem = re.split(r"[\\/]", folder)[-1]
    if stem.startswith("~"):
        return  # pip renames to this what it is about to remove
    header = header_of(printable(dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""))
    from_name = re.sub(r"\.(dist|egg)-info$", "", stem).split("-")
    origin = {
        # Never empty, which would make it a registration in code, and those need no allowance.
        "dist": header.get("name") or from_name[0] or "unnamed",
        "version": header.get("version") or (from_name[1] if len(from_name) > 1 else "unknown"),
        "summary": header.get("summary", ""),
        "source": f"{folder}/entry_points.txt" if folder else "",
    }
    group = ""
    for line in map(str.strip, printable(text).splitlines()):
        if line.startswith("["):
            group = line[1:-1].strip() if line.endswith("]") else ""
        elif group in GROUPS and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield candidate(group, name.strip(), value.strip(), **origin), bool(header)


def _distinct(found: list[tuple[Candidate, bool]]) -> list[Candidate]:
    """The claims of one distribution that count.

    A distribution that stands on ``sys.path`` twice is the first of the two, as for an import. What is left over in the
    same folder (egg-info beside dist-info, metadata without its main file) makes no second claim.
    """
    claims = [claim for claim, whole in found if whole] or [claim for claim, _ in found]
    distinct: dict[tuple[str, ...], Candidate] = {}
    for claim in sorted(claims, key=lambda claim: (".dist-info/" in claim.source, claim.source)):
        if Path(claim.source).parent.parent == Path(claims[0].source).parent.parent:
            distinct[claim.group, claim.name, claim.module or claim.value, claim.attr] = claim
    return list(distinct.values())


def header_of(metadata: str) -> dict[str, str]:
    """Name, version and summary of a distribution's metadata."""
    # The email parser that the whole file would need costs more than the rest of a scan.
    return {key.lower(): value.strip() for key, value in _HEADER.findall(metadata.partition("\n\n")[0])}
