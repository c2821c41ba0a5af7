"""Print the oldest or the newest versions that the distributions accept, as constraints for pip.

    python tools/bounds.py oldest > oldest.txt && pip install --constraint oldest.txt ...

The numbers are read from the ``pyproject.toml`` of every distribution; ``make nightly`` tests the workspace with them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
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


def bounds(operator: str) -> dict[str, set[Version]]:
    """The versions behind ``operator`` in the requirements of all distributions of the workspace, of each package."""
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    found = defaultdict(set)
    for folder in (line.removeprefix("-e ").strip() for line in lines if line.startswith("-e ")):
        for need in requirements(folder):
            found[need.name] |= {Version(part.version) for part in need.specifier if part.operator == operator}
    return {name: versions for name, versions in sorted(found.items()) if versions}


if __name__ == "__main__":
    if sys.argv[1:] == ["oldest"]:
        sys.stdout.writelines(f"{name}=={max(versions)}\n" for name, versions in bounds(">=").items())
    elif sys.argv[1:] == ["newest"]:
        sys.stdout.writelines(f"{name}<{min(versions)}\n" for name, versions in bounds("<").items())
    else:
        sys.exit(__doc__)
