"""Options of a backend: a frozen dataclass of the backend's own, filled from a config and checked by name and type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from polyattn._errors import ConfigError
from polyattn.messages import listed, shortened, shown


def configured_options(owner: str, kind: type[Any] | None, given: Any) -> Any:
    """``given`` (an instance, a mapping or ``None``) as an instance of the ``Options`` dataclass ``kind`` of ``owner``.

    Raises:
        ConfigError: the backend has no options, a name is unknown, or a value has the wrong type.
    """
    if kind is None:
        if not given:
            return None
        got = listed(given) if isinstance(given, Mapping) else shown(given)
        raise ConfigError(f"backend '{owner}' has no options, got {got}; remove backend_options")
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"options of backend '{owner}' must be a mapping, got {type(given).__name__}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    problems = [f"unknown option {shown(name)}" for name in given if name not in fields]
    problems += [
        f"option {shown(name)} must be {_type_name(fields[name])}, got {shown(value)}"
        for name, value in given.items()
        if name in fields and not _matches(value, fields[name])
    ]
    if problems:
        known = ", ".join(f"{name}: {_type_name(hint)}" for name, hint in fields.items())
        raise ConfigError(f"options of backend '{owner}': {shortened('; '.join(problems))}; the options are {known}")
    return kind(**given)


def _matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    kind = origin or hint
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {listed(typing.get_args(hint))}"
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")
