"""Mask layouts: who may see whom, described once and honoured by every backend."""

from __future__ import annotations

from polyattn._layout.mask import MaskLayout
from polyattn._layout.structured import StructuredMask

__all__ = ["MaskLayout", "StructuredMask"]
