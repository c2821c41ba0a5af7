"""Making polyattn's backends known to transformers, and switching a loaded model to one of them."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from polyattn import ConfigError
from polyattn_transformers import _gate
from polyattn_transformers._attention import attention_forward, prepared_once
from polyattn_transformers._backends import PREFIX, forget, installed, layer_type, load, load_by_type
from polyattn_transformers._fitness import attentions_of, obstacle, refuse_strangers
from polyattn_transformers._mask_function import layout_mask
from polyattn_transformers._versions import check_version

Model = TypeVar("Model", bound=nn.Module)
_check_of_transformers = PreTrainedModel.get_correct_attn_implementation
_end_of_transformers = PreTrainedModel.post_init


def register(*, allow_untested: bool = False) -> tuple[str, ...]:
    """Make every installed backend selectable in transformers, as ``attn_implementation="polyattn_<name>"``.

    Attention and mask function are registered together. Calling it again is harmless, and adds backends that were
    registered in the meantime. No backend is imported before a model asks for it.

    Args:
        allow_untested: accept a transformers newer than this package was tested with.

    Returns:
        The implementations, ``polyattn_auto`` among them.

    Raises:
        ConfigError: a transformers that this package was not tested with.
    """
    check_version(transformers.__version__, allow_untested=allow_untested)
    forget()
    prepared_once.cache_clear()
    implementations = tuple(_add(name) for name in installed())
    PreTrainedModel.get_correct_attn_implementation = _check_implementation  # type: ignore[method-assign]
    PreTrainedModel.post_init = _end_of_init  # type: ignore[method-assign]
    _gate.install()
    return implementations


def use(model: Model, name: str | Mapping[str, str], options: Mapping[str, Any] | None = None) -> Model:
    """Switch a loaded model, all of it, to a backend.

    transformers' own ``set_attn_implementation`` leaves some submodels behind without a word (both stacks of T5, for
    one); this sets every configuration that a module of the model reads, or changes nothing and raises.

    Args:
        model: a transformers model, or a module that contains some.
        name: of the backend, with or without ``polyattn_``; ``"auto"`` decides per layer. Or one for each type that
            ``config.layer_types`` lists, ``{"sliding_attention": "fa", "full_attention": "sdpa"}``.
        options: of the backend, such as ``{"compiled": False}`` of ``flex_attention``; of one backend for all layers.

    Returns:
        ``model``.

    Raises:
        UnknownBackendError, BackendLoadError, IncompatiblePluginError, DuplicatePluginError, BlockedPluginError:
            see the registry.
        ConfigError: the backend does not have these options, some modules attend without going through transformers'
            attention interface, a configuration asks for attention weights, there is no transformers model, an
            argument is of a wrong type, or the types of layers are others than the model's.
        UnsupportedAttentionError: the backend's kernel is missing or broken.
    """
    _check_arguments(model, name, options)
    if PreTrainedModel.get_correct_attn_implementation is not _check_implementation:
        register()
    if isinstance(name, str):
        implementation = _add(load(name, options))
    else:
        _check_types(model, name)
        implementation = _add(load_by_type(name))
    configs = list(_configs(model))
    if not configs or not any(attentions_of(model)):
        raise ConfigError(
            f"model must be or contain a transformers model with attention layers, got {type(model).__name__}"
        )
    refuse_strangers(model, implementation, parts=True)
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        if (reason := obstacle(type(part), part.config)) is not None:
            raise ConfigError(f"{type(model).__name__} cannot run on {implementation}: {type(part).__name__} {reason}")
    if any(getattr(config, "output_attentions", False) for config in configs):
        raise ConfigError(
            "the model's config has output_attentions=True, which no polyattn backend can serve; set it to False, or "
            "keep transformers' own attn_implementation='eager'"
        )
    for config in configs:
        config._attn_implementation = implementation  # noqa: SLF001 (transformers has no public setter for one config)
    return model


def _check_arguments(model: object, name: object, options: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be or contain a transformers model, got {type(model).__name__}; pass the model itself, as "
            "from_pretrained returns it"
        )
    if isinstance(name, Mapping) and all(isinstance(x, str) for pair in name.items() for x in pair):
        if options is not None:
            raise ConfigError(
                f"options must be None beside a backend for each type of layer, got {reprlib.repr(options)[:80]}"
            )
    elif not isinstance(name, str):
        raise ConfigError(
            f"name must be the name of a backend, got {reprlib.repr(name)[:80]}; installed: {', '.join(installed())}; "
            "or a mapping with a name for each type of layer"
        )
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options must map names of the backend's options to values, got {reprlib.repr(options)[:80]}; "
            "pass a dict, or leave it out"
        )


def _check_types(model: nn.Module, names: Mapping[str, str]) -> None:
    """Refuse types of layers that the model does not have, and none for those that it has."""
    layers = [model.get_submodule(name) for name in attentions_of(model)[0]]
    types = list(dict.fromkeys(layer_type(layer) for layer in layers))
    if set(types) != set(names):
        has = ", ".join("layers without a type" if kind is None else kind for kind in types)
        raise ConfigError(
            f"name must have a backend for each type of layer of {type(model).__name__}, which has {has}, "
            f"got {', '.join(names) or 'none'}"
        )


def _add(name: str) -> str:
    """Register attention and mask function of one backend; neither can fail, so never one without the other."""
    implementation = PREFIX + name
    AttentionInterface.register(implementation, functools.partial(attention_forward, polyattn_backend=name))
    AttentionMaskInterface.register(implementation, layout_mask)
    return implementation


def _check_implementation(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
    """What takes the place of ``PreTrainedModel.get_correct_attn_implementation``.

    transformers reads meaning into names: what contains ``sdpa`` is refused for models that its own sdpa does not serve
    (GPT-OSS), likewise ``flex_attention``. Our names are checked here, when a model is configured, and their backend
    is loaded; all others go to transformers.
    """
    if requested_attention is None or not requested_attention.startswith(PREFIX):
        checked: str = _check_of_transformers(self, requested_attention, is_init_check)
        return checked
    name = load(requested_attention)
    if (reason := obstacle(type(self), self.config)) is not None:
        raise ConfigError(
            f"attn_implementation={requested_attention!r} cannot serve {type(self).__name__}, which {reason}"
        )
    refuse_strangers(self, requested_attention, parts=False)  # finds none at the start of __init__
    return _add(name)


def _end_of_init(self: PreTrainedModel) -> None:
    """What takes the place of ``PreTrainedModel.post_init``: the first moment at which the layers are there."""
    implementation = self.config._attn_implementation  # noqa: SLF001
    if isinstance(implementation, str) and implementation.startswith(PREFIX):
        refuse_strangers(self, implementation, parts=False)
    _end_of_transformers(self)  # type: ignore[no-untyped-call]


def _configs(model: nn.Module) -> Iterator[PretrainedConfig]:
    """Every configuration that a module of ``model`` reads, and their sub-configurations, each once."""
    read = (getattr(module, "config", None) for module in model.modules())
    todo = [config for config in read if isinstance(config, PretrainedConfig)]
    seen: set[int] = set()
    while todo:
        config = todo.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        todo += [part for part in parts if isinstance(part, PretrainedConfig)]
