"""What a model of transformers is made of, as far as documents packed into a row are concerned."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

#: Names of layers that mix tokens in another way than by asking which tokens each may see.
MIXERS = re.compile(
    r"Mamba|SSM|Delta(Net|Attention)|Recurrent|Rglru|Linear\w*Attention$|Lightning|Rwkv|[mx]LSTM|Retention|Fourier|Patcher"
)
#: What numbers the tokens of RoBERTa and its relatives: positions start behind that of padding.
_NUMBERS_TOKENS = frozenset({"create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"})
#: What takes positions of two axes and does not say so by its rotary module.
_TWO_AXES = "NeoMME"
_MAKES_MASK = re.compile(r"(create|update|prepare|make)\w*mask")


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What the gate must know of a model.

    Attributes:
        names: positional parameters of its forward, without ``self``.
        makes_masks: whether its forward makes the masks of its layers, or there is no model inside that would.
        takes_positions: whether its forward has a parameter ``position_ids``.
        relative: whether it knows positions by the distance of tokens only.
        first_position: the position of the first token of a document.
        several_axes: whether it derives positions of several axes from pictures.
        takes_axes: whether it takes positions of several axes, ``[A, B, K]``.
        joins_two: whether it has an encoder and a decoder.
        mixers: layers that mix tokens in another way than attention does, each as ``name (class)``.
        turns: context lengths beyond which its rotation changes for all tokens of a forward, and whether it goes on
            changing from there.
        scales_from: the place in the row from which it scales queries by it; ``None``: it does not.
        configs: the configurations of the models inside through which the tokens of a text go.
    """

    names: tuple[str, ...]
    makes_masks: bool
    takes_positions: bool
    relative: bool
    first_position: int
    several_axes: bool
    takes_axes: bool
    joins_two: bool
    mixers: tuple[str, ...]
    turns: tuple[tuple[int, bool], ...]
    scales_from: int | None
    configs: tuple[PretrainedConfig, ...]


Asking = TypeVar("Asking", bound="Callable[..., Parts]")
_known: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def functions_of(kind: type[Any]) -> Iterator[FunctionType]:
    """Every function that a class or one of its bases defines, without its decorators."""
    for base in kind.__mro__:
        if base is PreTrainedModel:
            continue  # knows of everything, and attends to nothing
        for value in vars(base).values():
            if isinstance(value, FunctionType):
                yield inspect.unwrap(value)


def asks_interface(kind: type[Any]) -> bool:
    """Whether an attention class gets its attention function from transformers' interface."""
    return any("ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names for function in functions_of(kind))


@cast("Callable[[Asking], Asking]", torch._dynamo.assume_constant_result)  # noqa: SLF001 (a model keeps its parts)
def polyattn_parts(model: PreTrainedModel, _identity: int) -> Parts:
    """What ``model`` is made of, looked at once; a graph that asked for ``id(model)`` serves this model alone."""
    if model not in _known:
        _known[model] = _look(model)
    return _known[model]


def _look(model: PreTrainedModel) -> Parts:
    kind = type(model)
    parameters = inspect.signature(kind.forward).parameters
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = dict(_own_modules("", model))
    scales = [place for module in own.values() if (place := _scales_from(module)) is not None]
    texts = {id(module.config): module.config for module in own.values() if isinstance(module, PreTrainedModel)}
    axes = any(_splits_axes(module) for module in model.modules())
    pictures = any(hasattr(module, "get_rope_index") for module in model.modules())
    inner = any(isinstance(module, PreTrainedModel) for module in model.modules() if module is not model)
    return Parts(
        names=tuple(name for name, parameter in parameters.items() if parameter.kind in plain)[1:],
        makes_masks=not inner or any(_MAKES_MASK.search(name) for name in _code(kind).co_names),
        takes_positions="position_ids" in parameters,
        relative=any(hasattr(module, "relative_attention_bias") for module in own.values()),
        first_position=max((_first_position(module) for module in own.values()), default=0),
        several_axes=pictures,
        takes_axes=pictures or axes or kind.__name__.startswith(_TWO_AXES),
        joins_two="decoder_input_ids" in parameters,
        mixers=tuple(f"{name} ({type(module).__name__})" for name, module in own.items() if _mixes(module)),
        turns=tuple(sorted({turn for module in own.values() for turn in _turns(module)})),
        scales_from=min(scales, default=None),
        configs=tuple(texts.values()),
    )


def _code(kind: type[Any]) -> CodeType:
    function: Any = inspect.unwrap(kind.forward)
    code: CodeType = function.__code__
    return code


def _own_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules through which the tokens of a text go: not those of towers for pictures and sound."""
    yield name, module
    for key, child in module.named_children():
        tower = isinstance(child, PreTrainedModel) and "position_ids" not in inspect.signature(child.forward).parameters
        if not tower:
            yield from _own_modules(f"{name}.{key}" if name else key, child)


def _mixes(module: nn.Module) -> bool:
    """Whether a module hands something from token to token without attention: a state, or a convolution."""
    children = list(module.children())
    if isinstance(module, nn.RNNBase) or any(isinstance(one, nn.Conv1d) and one.kernel_size[0] > 1 for one in children):
        return True
    name = type(module).__name__
    inside = any(MIXERS.search(type(one).__name__) for one in module.modules() if one is not module)
    named = bool(MIXERS.search(name)) and "Norm" not in name
    return named and not inside and bool(children) and not asks_interface(type(module))


def _splits_axes(module: nn.Module) -> bool:
    """Whether a layer splits its angles among several axes: a rotary module, or an attention layer of older models."""
    if getattr(module, "mrope_section", None):
        return True
    settings = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    reads = any("mrope_section" in function.__code__.co_consts for function in functions_of(type(module)))
    return reads and bool(settings.get("mrope_section"))


def _first_position(module: nn.Module) -> int:
    padding = getattr(module, "padding_idx", None)
    if not isinstance(padding, int) or isinstance(module, nn.Embedding):
        return 0
    numbers = any(_NUMBERS_TOKENS & set(function.__code__.co_names) for function in functions_of(type(module)))
    return padding + 1 if numbers else 0


def _scales_from(module: nn.Module) -> int | None:
    """From which place in the row a layer without rotation scales its queries by it (Llama 4)."""
    scales = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    return int(getattr(module, "floor_scale", 1)) if scales else None


def _turns(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """Where a rotary module turns the tokens of a short document otherwise, because a long one is beside it."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    if kinds is None or config is None:
        return
    parameters = getattr(config, "rope_parameters", None) or {}
    for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        own = parameters.get(layer, parameters)
        if kind == "longrope":
            yield int(own["original_max_position_embeddings"]), False
        elif kind == "dynamic":
            yield int(config.max_position_embeddings), True
