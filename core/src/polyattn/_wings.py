"""Names that live in another distribution of the project, loaded from there when they are first used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def installed(module: str, what: str) -> Any:
    """The module ``module``, of core or of another distribution.

    Args:
        module: dotted name.
        what: the name that was asked for, for the message.

    Raises:
        ModuleNotFoundError: the distribution is not installed; the message gives the pip command.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if package == "polyattn" or error.name != package:
            raise
        dist = package.replace("_", "-")
        raise ModuleNotFoundError(
            f"{what} is part of the distribution {dist}, which is not installed; `pip install {dist}` brings it",
            name=package,
        ) from error


def is_installed(module: str) -> bool:
    """Whether the distribution that has ``module`` is there; nothing is imported."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None
