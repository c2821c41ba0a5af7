"""The ``flex_attention`` backend: torch's FlexAttention kernels under block masks built from structure."""

from __future__ import annotations

from polyattn_flex._backend import FlexBackend
from polyattn_flex._options import FlexOptions

__all__ = ["FlexBackend", "FlexOptions"]
