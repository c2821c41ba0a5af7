"""Rotary position embeddings: a strict spec, a frequency rule per variant, FP32 tables and their application."""

from polyattn.rope.axes import RopeAxes
from polyattn.rope.embedding import RotaryEmbedding, RotaryTables
from polyattn.rope.rotate import apply_rotary, rotate_channels, rotate_heads
from polyattn.rope.spec import CANONICAL_ONLY, UNBOUNDED, RopeSpec
from polyattn.rope.variant import (
    RopeFrequencies,
    RopeVariant,
    above,
    at_least,
    check_spec,
    host_frequencies,
    inverse_powers,
    lanes,
    number,
    one_of,
    optional,
    original,
    within,
)

__all__ = [
    "CANONICAL_ONLY",
    "UNBOUNDED",
    "RopeAxes",
    "RopeFrequencies",
    "RopeSpec",
    "RopeVariant",
    "RotaryEmbedding",
    "RotaryTables",
    "above",
    "apply_rotary",
    "at_least",
    "check_spec",
    "host_frequencies",
    "inverse_powers",
    "lanes",
    "number",
    "one_of",
    "optional",
    "original",
    "rotate_channels",
    "rotate_heads",
    "within",
]
