"""What to tell somebody whose config names a plugin that is not there, or is there twice."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from polyattn.messages import shown
from polyattn.registry.discovery import AUTO, BACKENDS, READERS, ROPE, Candidate, current

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
    READERS: {"hf_rope": "polyattn-readers", "hf_attention": "polyattn-readers"},
}
#: Words of other software, spelt without underscores, for what a plugin of ours does: a hint in an error, no more.
_ELSEWHERE = {
    BACKENDS: {
        "fa": "fa2 flash flash2 flashattn flashattn2 flashattention flashattention2 varlenattn",
        "flex_attention": "flex",
        "sdpa": "torch torchsdpa pytorch torchnative native nativeflash memefficient xformers cudnn "
        "scaleddotproductattention",
        "eager": "math nativemath none off naive vanilla reference",
    },
    ROPE: {
        "default": "rope standard vanilla mrope",
        "linear": "pi interpolation",
        "dynamic": "ntk ntkaware dynamicntk",
        "longrope": "su phi3",
        "llama3": "llama llama31",
        "proportional": "prope",
    },
}
#: How alike a misspelt name must be: "spda" is "sdpa", and "sage" is not "eager".
_NEAR = 0.75
_OTHER = {BACKENDS: (ROPE, "RoPE variant"), ROPE: (BACKENDS, "backend")}
#: How names of kernels and schemes begin that nobody can install here.
_NOT_HERE = {
    "sequence parallelism does not exist yet": ("usp", "ulysses", "ring", "contextparallel"),
    "this project has no plugin for that kernel; `polyattn new` starts one of your own": (
        *("fa3", "fa4", "flash3", "flash4", "flashattn3", "flashattn4", "flashattention3", "flashattention4"),
        *("sageattention", "sageattn", "flashinfer", "flashmla", "triton", "transformerengine", "paged", "tensorrt"),
    ),
}


def _spelling(name: str) -> str:
    """``name`` without what other software puts around the word: case, separators, an owner, our own prefix."""
    word = name.lower().rpartition("/")[2].replace("-", "_").strip("_ ")
    return word.removeprefix("polyattn_").removeprefix("rope_").replace("_", "").replace(".", "")


def _hint(group: str, name: str, known: Sequence[str]) -> str:
    """The name of ours that ``name`` most likely means; empty where none is near."""
    spelt = {ours.replace("_", ""): ours for ours in known}
    meant = {word: ours for ours, words in _ELSEWHERE.get(group, {}).items() for word in words.split()}
    word = _spelling(name)
    return meant.get(word) or spelt.get(next(iter(difflib.get_close_matches(word, spelt, 1, _NEAR)), ""), "")


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
        return f"'{AUTO}' is not a backend but the choice among them for one request; get one by its name; {listed}"
    if name in first_party:
        return f"no {noun} named '{name}' is installed; `pip install {first_party[name]}` brings it; {listed}"
    text = f"no {noun} named {shown(name)} is installed"
    if group in _OTHER and name in {plugin.name for plugin in current().candidates[_OTHER[group][0]]}:
        return f"{text}, but a {_OTHER[group][1]} of that name is; {listed}"
    for why, beginnings in _NOT_HERE.items() if group == BACKENDS else ():
        if _spelling(name) == "sage" or _spelling(name).startswith(beginnings):
            return f"{noun} {shown(name)} cannot be used: {why}; {listed}"
    meant = _hint(group, name, [*installed, *first_party])
    if meant:
        text += f"; did you mean '{meant}'?"
    if meant and meant not in installed:
        text += f" `pip install {first_party[meant]}` brings it"
    elif group == READERS and not first_party.keys() & set(installed):
        text += f"; `pip install {first_party['hf_rope']}` brings {' and '.join(first_party)}"
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
