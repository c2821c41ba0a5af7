"""What a check is, and the list of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyattn_conformance.trial import Trial


@dataclasses.dataclass(frozen=True)
class Check:
    """One statement that must hold for a backend.

    Attributes:
        id: ``name`` or ``name[parameter]``; what ``expected_failures`` and ``--only`` name.
        about: the statement.
        run: raises when it does not hold.
        without_kernel: whether it also says something where the backend cannot run.
    """

    id: str
    about: str
    run: Callable[[Trial], None]
    without_kernel: bool = False


_CHECKS: dict[str, list[Check]] = {}


def checks_of(module: str) -> list[Check]:
    """The checks that a module registered, in the order of their definition."""
    return _CHECKS[module]


def check(
    over: Mapping[str, Any] | Iterable[Any] | None = None, *, without_kernel: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function ``(trial)`` or, with ``over``, ``(trial, parameter)`` once for each parameter.

    Args:
        over: parameters by name, or parameters that are their own names.
        without_kernel: see :class:`Check`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name, registered = function.__name__, _CHECKS.setdefault(function.__module__, [])
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        if over is None:
            registered.append(Check(name, about, function, without_kernel))
            return function
        named = over if isinstance(over, Mapping) else {str(value): value for value in over}
        for label, value in named.items():
            run = functools.partial(_call, function, value)
            registered.append(Check(f"{name}[{label}]", about, run, without_kernel))
        return function

    return register


def _call(function: Callable[..., None], parameter: Any, trial: Trial) -> None:
    function(trial, parameter)
