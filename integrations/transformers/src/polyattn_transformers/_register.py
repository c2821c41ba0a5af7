"""Making polyattn's backends known to transformers, and switching a loaded model to one of them."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import transformers
from polyattn import ConfigError
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from polyattn_transformers import _attention
from polyattn_transformers._attention import attention_forward
from polyattn_transformers._backends import PREFIX, bare_name, installed, resolve
from polyattn_transformers._mask import layout_mask
from polyattn_transformers._versions import check_version


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
    names = installed()
    for name in names:
        _register_one(name)
    _attention.forget()
    _guard_names()
    return tuple(PREFIX + name for name in names)


def use(model: nn.Module, name: str) -> nn.Module:
    """Switch a loaded model, all of it, to a backend.

    transformers' own ``set_attn_implementation`` leaves some submodels behind without a word (both stacks of T5, for
    one); this sets every configuration that a module of the model reads, or changes nothing and raises.

    Args:
        model: a transformers model, or a module that contains some.
        name: of the backend, with or without ``polyattn_``; ``"auto"`` decides per layer.

    Returns:
        ``model``.

    Raises:
        UnknownBackendError, BackendLoadError, IncompatiblePluginError, DuplicatePluginError, BlockedPluginError: see the
            registry.
        ConfigError: some modules attend without going through transformers' attention interface, a configuration asks
            for attention weights, or there is no transformers model.
    """
    bare = bare_name(name)
    resolve(bare)
    register_names = register()
    implementation = PREFIX + bare
    assert implementation in register_names or _register_one(bare)
    configs = list(_configs(model))
    if not configs:
        raise ConfigError(f"model must be or contain a transformers model, got {type(model).__name__}")
    if strangers := _strangers(model):
        raise ConfigError(
            f"{type(model).__name__} cannot run on {implementation}, because these modules attend without "
            f"transformers' attention interface: {', '.join(strangers)}; switch the submodels that do use it, one by one"
        )
    if any(getattr(config, "output_attentions", False) for config in configs):
        raise ConfigError(
            "the model's config has output_attentions=True, which no polyattn backend can serve; set it to False, or "
            "keep transformers' own attn_implementation='eager'"
        )
    for config in configs:
        config._attn_implementation = implementation  # noqa: SLF001 (transformers has no public setter for one config)
    return model


def _register_one(name: str) -> bool:
    AttentionInterface.register(PREFIX + name, functools.partial(attention_forward, backend=name))
    AttentionMaskInterface.register(PREFIX + name, layout_mask)
    return True


def _guard_names() -> None:
    """Let our names through transformers' check of implementations.

    The check reads meaning into names: what contains ``sdpa`` is refused for models that transformers' own sdpa does not
    serve (GPT-OSS), likewise ``flex_attention``. Our names are checked here instead, and their backend is loaded.
    """
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "_polyattn"):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention is None or not requested_attention.startswith(PREFIX):
            checked: str = original(self, requested_attention, is_init_check)
            return checked
        bare = bare_name(requested_attention)
        resolve(bare)
        if not _reaches_interface(type(self)):
            raise ConfigError(
                f"attn_implementation={requested_attention!r} cannot serve {type(self).__name__}, whose attention does "
                "not go through transformers' attention interface; it runs with attn_implementation='eager' only"
            )
        _register_one(bare)
        return requested_attention

    get_correct_attn_implementation._polyattn = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _reaches_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the module that defines a model class has attention classes and none of them uses the interface."""
    module = sys.modules.get(model.__module__)
    if module is None:
        return True
    classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    attentions = [value for value in classes if _attends(value)]
    return not attentions or any(_uses_interface(value) for value in attentions)


def _configs(model: nn.Module) -> Iterator[PretrainedConfig]:
    """Every configuration that a module of ``model`` reads, and their sub-configurations, each once."""
    todo = [config for module in model.modules() if isinstance(config := getattr(module, "config", None), PretrainedConfig)]
    seen: set[int] = set()
    while todo:
        config = todo.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        todo += [part for part in parts if isinstance(part, PretrainedConfig)]


def _strangers(model: nn.Module) -> list[str]:
    """Modules that attend by themselves: attention classes without attention inside that never ask the interface."""
    found = {name: module for name, module in model.named_modules() if _attends(type(module))}
    inner = {outer for outer in found for name in found if name != outer and name.startswith(f"{outer}." if outer else "")}
    return [
        f"{name} ({type(module).__name__})"
        for name, module in found.items()
        if name not in inner and not _uses_interface(type(module))
    ]


def _attends(kind: type[Any]) -> bool:
    return issubclass(kind, nn.Module) and re.search(r"Attention(?!Output|Pool)", kind.__name__) is not None


def _uses_interface(kind: type[Any]) -> bool:
    functions = [value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, FunctionType)]
    return any("ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(function).__code__.co_names for function in functions)
