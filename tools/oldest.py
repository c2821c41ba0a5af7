"""Print the oldest version of each package that the distributions accept, as constraints for pip.

    python tools/oldest.py > oldest.txt && pip install --constraint oldest.txt ...

The numbers are read from the ``pyproject.toml`` of every distribution; ``make nightly`` tests the workspace with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parent.parent


def requirements(folder: str) -> Iterator[Requirement]:
    """What the distribution in ``folder`` needs of other people, its extras included."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for needs in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values()):
        yield from (need for need in map(Requirement, needs) if not need.name.startswith("polyattn"))


def oldest() -> dict[str, Version]:
    """The lowest version that every distribution of the workspace accepts, of each package."""
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    bounds: dict[str, Version] = {}
    for folder in (line.removeprefix("-e ").strip() for line in lines if line.startswith("-e ")):
        for need in requirements(folder):
            (bound,) = (Version(part.version) for part in need.specifier if part.operator == ">=")
            bounds[need.name] = max(bound, bounds.get(need.name, bound))
    return bounds


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted(oldest().items()))
