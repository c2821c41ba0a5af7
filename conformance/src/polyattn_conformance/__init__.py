"""The conformance kit: what a backend or a RoPE variant must do, as tests that anyone can run on their own.

``BackendConformance`` and ``RopeConformance`` are pytest classes to subclass; ``check_backend`` runs the same checks
without pytest, as does ``polyattn check NAME``. ``reference_attention`` is the FP64 reference that decides.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyattn_conformance.backend_suite import BackendConformance
    from polyattn_conformance.reference import reference_attention
    from polyattn_conformance.rope_suite import RopeConformance
    from polyattn_conformance.runner import Outcome, check_backend

# Lazily: the classes need pytest, the rest does not.
_MODULES = {
    "BackendConformance": "backend_suite",
    "RopeConformance": "rope_suite",
    "reference_attention": "reference",
    "Outcome": "runner",
    "check_backend": "runner",
}

__all__ = ["BackendConformance", "Outcome", "RopeConformance", "check_backend", "reference_attention"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'polyattn.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"polyattn_conformance.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
