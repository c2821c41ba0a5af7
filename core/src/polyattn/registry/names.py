"""What to tell somebody whose config names a plugin that is not there, or is there twice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from polyattn.messages import shown
from polyattn.registry.discovery import AUTO, BACKENDS, READERS, ROPE, SCOPES, Candidate, current

_VARIANTS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
#: Names that distributions of this project bring.
FIRST_PARTY = {
    BACKENDS: {
        "eager": "polyattn-eager",
        "sdpa": "polyattn-sdpa",
        "flex_attention": "polyattn-flex",
        "fa": "polyattn-fa2",
    },
    ROPE: {name: f"polyattn-rope-{name}" for name in _VARIANTS},
    READERS: {"hf_rope": "polyattn-readers", "hf_attention": "polyattn-readers"},
    SCOPES: {"context_parallel": "polyattn-context-parallel"},
}
#: Words of other software, without separators, for what a plugin of ours does: a hint in an error, never resolved.
_ELSEWHERE = {
    BACKENDS: {
        "fa": r"fa2|flash(attn|attention)?2?|varlen(attn)?",
        "flex_attention": r"(torch)?flex(attn|attention)?|compiled",
        "sdpa": r"(py)?torch(sdpa|native)?|native(flash)?|fused(attn)?|(mem(ory)?)?efficient(attention)?|xformers|"
        r"cudnn(attention)?|scaleddotproductattention",
        "eager": r"(native|torch)?math|none|off|false|disabled|manual|naive|vanilla|standard|plain|unfused|reference",
    },
    ROPE: {
        "default": r"rope|standard|plain|vanilla|partial|mrope",
        "linear": r"pi|(position)?interpolation|linearscaling",
        "dynamic": r"ntk|ntkaware|dynamicntk|ntkdynamic",
        "longrope": r"su|phi3",
        "proportional": r"prope|gemma4",
    },
}
#: Words for what nobody can install here.
_NOT_HERE = {
    "sequence parallelism is a scope, in polyattn-context-parallel; name a backend that runs inside it, and set "
    "`context_parallel: {method: auto}` beside it": (r"usp.*|ulysses|ring(attention|flashattn)?|contextparallel"),
    "this project has no plugin for that kernel; `polyattn new` starts one of your own": (
        r"(fa|flash|flashattn|flashattention)[34]|sage(attn|attention)?|flashinfer|flashmla|triton(attn)?|te|"
        r"transformerengine|aiter|paged.*|tensorrt|trtllmmha|cutlass|linearattention|mamba|radial|magi"
    ),
}
#: How alike a misspelt name must be: "spda" is "sdpa", and "sage" is not "eager".
_NEAR = 0.75
_OTHER = {BACKENDS: (ROPE, "RoPE variant"), ROPE: (BACKENDS, "backend")}


def unknown(group: str, noun: str, name: str, installed: Sequence[str]) -> str:
    """The error text for ``name``, which none of the ``installed`` names is; ``noun``: what such a plugin is called."""
    first_party = FIRST_PARTY.get(group, {})
    listed = f"installed: {', '.join(installed) or 'none'}"
    if group == BACKENDS and name == AUTO:
        return f"'{AUTO}' is not a backend but the choice among them for one request; get one by its name; {listed}"
    if name in first_party:
        return f"no {noun} named '{name}' is installed; `pip install {first_party[name]}` brings it; {listed}"
    text = f"no {noun} named {shown(name)} is installed"
    other, what = _OTHER.get(group, ("", ""))
    if name in {plugin.name for plugin in current().candidates.get(other, ())}:
        return f"{text}, but a {what} of that name is; {listed}"
    # Other software puts an owner, a prefix, capitals and separators around a word.
    word = re.sub(r"[-_ ]", "", re.sub(r"(.*/)?(polyattn[-_])?(rope[-_])?", "", name.lower(), count=1))
    for why, words in _NOT_HERE.items() if group == BACKENDS else ():
        if re.fullmatch(words, word):
            return f"{noun} {shown(name)} cannot be used: {why}; {listed}"
    spelt = {known.replace("_", ""): known for known in (*installed, *first_party)}
    meant = [ours for ours, words in _ELSEWHERE.get(group, {}).items() if re.fullmatch(words, word)]
    meant += [spelt[near] for near in difflib.get_close_matches(word, spelt, 1, _NEAR)]
    if meant:
        text += f"; did you mean '{meant[0]}'?"
    if meant and meant[0] not in installed:
        text += f" `pip install {first_party[meant[0]]}` brings it"
    elif group == READERS and not first_party.keys() & set(installed):
        text += f"; `pip install {first_party['hf_rope']}` brings {' and '.join(first_party)}"
    return f"{text}; {listed}"


def conflict(noun: str, name: str, rivals: Sequence[Candidate]) -> str:
    """The error text for ``name``, which all of ``rivals`` claim and could be loaded as."""
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
