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
#: Words of other software for what a plugin of ours does; a hint in an error, never resolved.
_ELSEWHERE = {
    BACKENDS: {
        "fa": "fa2 flash flash2 flash_2 flash_attn flash_attn2 flash_attn_2 flash_attention flash_attention2 "
        "flash_attention_2 flashattention flashattention2 flashattention_2 flashattn varlen varlen_attn",
        "flex_attention": "flex flexattention flexattn flex_attn torch_flex compiled",
        "sdpa": "torch pytorch torch_sdpa torch_native native native_flash fused fused_attn mem_efficient "
        "memory_efficient memory_efficient_attention efficient efficient_attention xformers cudnn cudnn_attention "
        "scaled_dot_product_attention",
        "eager": "math native_math none off false disabled manual naive vanilla standard plain unfused local reference "
        "baseline slow torch_math",
    },
    ROPE: {
        "default": "rope standard plain vanilla partial mrope m_rope",
        "linear": "pi interpolation position_interpolation linear_scaling",
        "dynamic": "ntk ntk_aware dynamic_ntk ntk_dynamic",
        "longrope": "su long_rope phi3",
        "llama3": "llama llama_3 llama31 llama3_1 llama3.1",
        "yarn": "deepseek_yarn",
        "proportional": "p_rope prope gemma4",
    },
}
#: How alike a misspelt name must be: "spda" is "sdpa", and "sage" is not "eager".
_NEAR = 0.75
_OTHER = {BACKENDS: {ROPE: "RoPE variant"}, ROPE: {BACKENDS: "backend"}}
#: Words for what nobody can install here.
_NOT_HERE = {
    "sequence parallelism does not exist yet": "usp ulysses ring ring_attention ring_flash_attn context_parallel",
    "this project has no plugin for that kernel; `polyattn new` starts one of your own": (
        "fa3 fa4 flash3 flash_3 flash4 flash_attn_3 flash_attn3 flash_attention_3 flash_attention_4 flash_attn_4 "
        "sage sageattn sageattention sage_attention flashinfer flash_infer flashmla flash_mla triton triton_attn "
        "te transformer_engine aiter paged paged_attention paged_eager paged_sdpa tensorrt trtllm_mha cutlass "
        "linear_attention mamba spas radial magi"
    ),
}


def _spelling(name: str) -> str:
    """``name`` without what other software puts around the word: case, hyphens, an owner, our own prefix."""
    word = name.lower().rpartition("/")[2].strip().lstrip("_").replace("-", "_").replace(" ", "_")
    return word.removeprefix("polyattn_").removeprefix("rope_")


def _hint(group: str, name: str, known: Sequence[str]) -> str:
    """The name of ours that ``name`` most likely means; empty where none is near."""
    word = _spelling(name)
    for ours, words in _ELSEWHERE.get(group, {}).items():
        if word in words.split():
            return ours
    return next(iter(difflib.get_close_matches(word, known, 1, _NEAR)), "")


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
    for other, what in _OTHER.get(group, {}).items():
        if name in {plugin.name for plugin in current().candidates[other]}:
            return f"{text}, but a {what} of that name is; {listed}"
    for why, words in _NOT_HERE.items() if group == BACKENDS else ():
        if _spelling(name).startswith("usp_") or _spelling(name) in words.split():
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
