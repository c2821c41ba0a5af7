"""Whether a model can run on polyattn at all, asked when it is configured."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from polyattn import ConfigError
from polyattn_transformers._parts import MIXERS, asks_interface

_NO_ATTENTION = re.compile(rf"{MIXERS.pattern}|Linear|Output|Pool|Bias|MLP")
#: How many layers a message names.
_SHOWN = 6
_OWN = {"_supports_sdpa": "sdpa", "_supports_flash_attn": "flash_attention_2", "_supports_flex_attn": "flex_attention"}


def obstacle(kind: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """Why no model of a class and configuration can run on polyattn, and what can; ``None`` if it may.

    The classes in the module that defines ``kind`` are looked at: there is no model yet.
    """
    module = sys.modules.get(kind.__module__)
    classes = [] if module is None else [value for value in vars(module).values() if inspect.isclass(value)]
    own = [value for value in classes if value.__module__ == kind.__module__ and issubclass(value, nn.Module)]
    attentions = [value for value in own if attends(value)]
    if (choices := _choices(module)) is not None:
        reason = f"chooses a class for its attention by name and has {', '.join(map(repr, choices))} only"
    elif attentions and not any(asks_interface(value) for value in attentions):
        choices, reason = ["eager"], "attends without transformers' attention interface"
    elif not attentions and any(MIXERS.search(value.__name__) for value in own) and _takes_text(kind):
        return "has no attention layers; leave attn_implementation out"
    elif (change := _change(kind, config)) is not None:
        choices, reason = ["eager"], change
    else:
        return None
    choices = [*choices, *(name for flag, name in _OWN.items() if getattr(kind, flag, False) and name not in choices)]
    text = f"{reason}; choose transformers' own attn_implementation {' or '.join(map(repr, choices))}"
    parts = [name for name in config.sub_configs if isinstance(getattr(config, name, None), PretrainedConfig)]
    if parts:
        text += (
            f", or polyattn for a part that can: attn_implementation={{{parts[0]!r}: ...}}, where the parts are "
            f"{', '.join(parts)}"
        )
    return text


def attentions_of(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the attention layers that ask transformers' interface, and of those that attend by themselves.

    An attention class with another one inside is a wrapper and belongs to neither; so does torch's own
    ``nn.MultiheadAttention``, which stays as it is under every implementation.
    """
    kinds = {name: type(module) for name, module in model.named_modules()}
    found = {name: kind for name, kind in kinds.items() if kind is nn.MultiheadAttention or attends(kind)}
    wrappers = {
        outer for outer in found for name in found if name != outer and name.startswith(f"{outer}." if outer else "")
    }
    layers = {name: kind for name, kind in found.items() if name not in wrappers}
    followers = [name for name, kind in layers.items() if asks_interface(kind)]
    strangers = [
        f"{name} ({kind.__name__})"
        for name, kind in layers.items()
        if name not in followers and kind is not nn.MultiheadAttention
    ]
    return followers, strangers


def refuse_strangers(model: nn.Module, implementation: str, *, parts: bool) -> None:
    """Refuse a model of which some layers would attend by themselves.

    Args:
        model: what goes to ``implementation``.
        implementation: how it is called in the message.
        parts: whether models inside with a configuration of their own go there too.

    Raises:
        ConfigError: names these layers.
    """
    strangers = attentions_of(model)[1]
    if strangers and not parts:
        others = [f"{name}." for name, part in model.named_modules() if _has_own_config(part, model)]
        strangers = [name for name in strangers if not name.startswith(tuple(others))]
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise ConfigError(
            f"{type(model).__name__} cannot run on {implementation}, because these modules attend without "
            f"transformers' attention interface: {', '.join(strangers[:_SHOWN])}{more}; of a model with several parts "
            f"choose those that can, attn_implementation={{'text_config': {implementation!r}}}, or switch them "
            "one by one with polyattn_transformers.use"
        )


def _has_own_config(part: nn.Module, model: nn.Module) -> bool:
    return isinstance(part, PreTrainedModel) and part.config is not getattr(model, "config", None)


def attends(kind: type[Any]) -> bool:
    """Whether a class is a softmax attention of transformers; linear attention has no mask and no backend."""
    if not issubclass(kind, nn.Module) or issubclass(kind, PreTrainedModel) or kind.__module__.startswith("torch."):
        return False
    named = "Attention" in kind.__name__ and not _NO_ATTENTION.search(kind.__name__)
    return named or asks_interface(kind)


def _choices(module: Any) -> list[str] | None:
    """The implementations of a module that has a dictionary of attention classes keyed by them."""
    for name, value in [] if module is None else vars(module).items():
        if name.endswith("ATTENTION_CLASSES") and isinstance(value, dict) and "eager" in value:
            return [str(key) for key in value]
    return None


def _takes_text(kind: type[PreTrainedModel]) -> bool:
    return "input_ids" in inspect.signature(kind.forward).parameters


def _change(kind: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """What a model does to the mask between making it and attending, which no layout can follow."""
    return next(_changes(kind.__name__, config.get_text_config()), None)


def _changes(name: str, config: PretrainedConfig) -> Iterator[str]:
    numbers = ("index_topk", "indexer_budget")
    if any(getattr(config, number, None) is not None for number in numbers):
        yield "chooses keys for each query, and the indexer computes on a mask of numbers"
    if "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        yield "chooses blocks of keys for each query by an indexer"
    if name.startswith("Doge"):
        yield "adds a mask of its own, made from the values, to a mask of numbers"
    if name.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant", "LightGlue")):
        yield "turns its mask of numbers round"
    if name.startswith("T5Gemma2") and not re.search("Encoder|Vision", name):
        yield "joins the masks of its encoder and its decoder into one of numbers"
    sparse = getattr(config, "attention_type", None) == "block_sparse"
    if sparse and name.startswith("BigBirdPegasus") and not re.search("Causal|Decoder", name):
        yield "attends in random blocks by itself (set config.attention_type = 'original_full' to use all keys)"
