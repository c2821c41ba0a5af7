"""The conformance kit, which the distribution polyattn-conformance brings; see :mod:`polyattn_conformance`."""

from __future__ import annotations

from typing import Any

from polyattn._wings import installed


def __getattr__(name: str) -> Any:
    return getattr(installed("polyattn_conformance", "polyattn.testing"), name)
