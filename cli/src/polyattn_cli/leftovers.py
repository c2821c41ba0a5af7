"""What is written about plugins and reaches none: metadata that cannot be read, misspelt sections, names in lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from polyattn.registry import brief, discovery, trust

_NEAR = 0.87  # how alike a section must be to a group of ours to be meant for it


def leftovers() -> list[str]:
    """What to look at, one text each."""
    problems: list[str] = []
    for dist in discovery.distributions(problems):
        where = getattr(dist, "_path", dist)
        try:
            text = dist.read_text("entry_points.txt") or ""
        except Exception as error:  # noqa: BLE001 - any metadata may be broken in any way
            problems.append(f"{where}: {brief(error)}")
        else:
            problems += [f"{where}/entry_points.txt: {problem}" for problem in _misspelt(text)]
    plugins = [plugin for group in discovery.current().candidates.values() for plugin in group]
    dists = {discovery.normalized(plugin.dist) for plugin in plugins}
    problems += [
        f"{where} allows '{dist}', which is not installed or brings no plugin"
        for where, names in trust.allowing().items()
        for dist in names
        if discovery.normalized(dist) not in dists
    ]
    problems += [
        f"{where} disables '{name}', which no installed plugin is called"
        for where, names in trust.disabling().items()
        for name in names
        if not any(plugin.is_called(name) for plugin in plugins)
    ]
    return problems


def _misspelt(text: str) -> Iterator[str]:
    """Sections that were meant for a group of ours and are not one: nobody looks at what stands in them."""
    for line in filter(lambda line: line.startswith("["), map(str.strip, text.splitlines())):
        section = line[1:].removesuffix("]").strip()
        meant = difflib.get_close_matches(section.lower(), discovery.GROUPS, 1, _NEAR)
        if meant and (section not in discovery.GROUPS or not line.endswith("]")):
            yield f"the section {discovery.printable(line)} is not a group of polyattn; did you mean [{meant[0]}]?"
