"""The conformance kit, which the distribution polyattn-conformance brings; see :mod:`polyattn_conformance`."""

from __future__ import annotations

from typing import Any

from polyattn._wings import installed, is_installed


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # of the import system: the kit's ``__path__`` is not this module's
        raise AttributeError(f"module 'polyattn.testing' has no attribute '{name}'")
    return getattr(installed("polyattn_conformance", "polyattn.testing"), name)


def __dir__() -> list[str]:
    return [*__getattr__("__all__")] if is_installed("polyattn_conformance") else []
