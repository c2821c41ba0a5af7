"""What to tell somebody whose config names a plugin that is not there, or is there twice."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from polyattn._discovery import AUTO, BACKENDS, ROPE, Candidate, current

#: Names that distributions of this project bring.
FIRST_PARTY = {
    BACKENDS: {
        "eager": "polyattn-eager",
        "sdpa": "polyattn-sdpa",
        "flex_attention": "polyattn-flex",
        "fa": "polyattn-fa2",
    },
    ROPE: {
        name: f"polyattn-rope-{name}"
        for name in ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
    },
}
#: What other software calls them; a hint in an error, never resolved.
_ELSEWHERE = {
    BACKENDS: {
        "flash": "fa",
        "flash_attn": "fa",
        "flash_attention": "fa",
        "flash_attention_2": "fa",
        "fa2": "fa",
        "flex": "flex_attention",
    },
    ROPE: {"ntk": "dynamic", "su": "longrope"},
}
_OTHER = {BACKENDS: {ROPE: "RoPE variant"}, ROPE: {BACKENDS: "backend"}}
_NOT_YET = {"usp": "sequence parallelism does not exist yet"}


def unknown(group: str, noun: str, name: str, installed: Sequence[str]) -> str:
    """The error text for ``name``, which nothing installed or registered has.

    Args:
        group: entry-point group.
        noun: what a plugin of the group is called.
        name: what was asked for.
        installed: the names that do exist.
    """
    first_party = FIRST_PARTY.get(group, {})
    listed = f"installed: {', '.join(installed) or 'none'}"
    if group == BACKENDS and name == AUTO:
        return f"'{AUTO}' is no backend but the choice among them for one request; get one by its name; {listed}"
    if group == BACKENDS and name in _NOT_YET:
        return f"{noun} '{name}' cannot be used: {_NOT_YET[name]}; {listed}"
    if name in first_party:
        return f"no {noun} named '{name}' is installed; `pip install {first_party[name]}` brings it; {listed}"
    text = f"no {noun} named {name!r} is installed"
    for other, what in _OTHER.get(group, {}).items():
        if name in {plugin.name for plugin in current().candidates[other]}:
            return f"{text}, but a {what} of that name is; {listed}"
    close = difflib.get_close_matches(name.lower(), {*installed, *first_party}, 1)
    meant = _ELSEWHERE.get(group, {}).get(name.lower()) or (close[0] if close else "")
    if meant:
        text += f"; did you mean '{meant}'?"
    if meant and meant not in installed:
        text += f" `pip install {first_party[meant]}` brings it"
    return f"{text}; {listed}"


def conflict(noun: str, name: str, rivals: Sequence[Candidate]) -> str:
    """The error text for ``name``, which all of ``rivals`` claim.

    Args:
        noun: what a plugin of the group is called.
        name: what was asked for.
        rivals: two claims or more that could be loaded.
    """
    lines = [f"{len(rivals)} plugins claim the {noun} name '{name}':"]
    lines += [f"  - {rival.label}: {rival.value}, from {rival.source}" for rival in rivals]
    dists = sorted({rival.dist for rival in rivals})
    if len(dists) > 1:
        chosen = " or ".join(f'"{dist}:{rivals[0].name}"' for dist in dists)
        lines.append(f"  uninstall all but one (pip uninstall {dists[0]}), or write which one you mean: {chosen}")
    elif len({rival.source for rival in rivals}) == 1:
        lines.append(f"  {dists[0]} itself names it {len(rivals)} times, which only its author can mend")
    else:
        lines.append(f"  leftovers of another version: pip uninstall {dists[0]} until it is gone, then install it")
    return "\n".join(lines)
