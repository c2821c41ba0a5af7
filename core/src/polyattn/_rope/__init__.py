"""Rotary position embeddings: a strict spec, a frequency rule per variant, FP32 tables and their application."""

from polyattn._rope.axes import RopeAxes
from polyattn._rope.embedding import RotaryEmbedding, RotaryTables
from polyattn._rope.rotate import apply_rotary, rotate_heads
from polyattn._rope.spec import RopeSpec
from polyattn._rope.variant import RopeFrequencies, RopeVariant

__all__ = [
    "RopeAxes",
    "RopeFrequencies",
    "RopeSpec",
    "RopeVariant",
    "RotaryEmbedding",
    "RotaryTables",
    "apply_rotary",
    "rotate_heads",
]
