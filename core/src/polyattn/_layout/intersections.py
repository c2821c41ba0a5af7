"""Intersections that stay structures."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn._layout.known import Known
from polyattn._layout.structure import Structure
from polyattn._layout.structured import COMBINED, StructuredMask
from polyattn._layout.union import MAX_PARTS, Part, UnionMask, parts_of
from polyattn._layout.windows import narrower


def structured_and(a: Structure, b: Structure, a_known: Known, b_known: Known) -> tuple[Structure | None, Known]:
    """The intersection as a structure and its copy on the host, which decides where there is one."""
    if a_known.mask is None or b_known.mask is None or torch.compiler.is_compiling():
        return _intersect(a, b, operator.is_), Known()
    mask = _intersect(a_known.mask, b_known.mask, _equal)
    if mask is None:
        return None, Known()
    return _intersect(a, b, lambda *_: True), Known(mask, in_both(a_known.active, b_known.active))


def _intersect(a: Structure, b: Structure, same: Callable[[Tensor, Tensor], bool]) -> Structure | None:
    """The intersection of each part of one with each part of the other; ``None`` where one has no structured form."""
    if isinstance(a, StructuredMask) and isinstance(b, StructuredMask):
        return intersect(a, b, same)
    ours, theirs = parts_of(a, None), parts_of(b, None)
    if not ours or not theirs:
        return None
    parts: list[Part] = []
    for left in ours:
        for right in theirs:
            mask = intersect(left.mask, right.mask, same)
            if mask is None or len(parts) == MAX_PARTS:
                return None
            parts.append(Part(mask, in_both(left.active, right.active)))
    return UnionMask(tuple(parts))


def intersect(a: StructuredMask, b: StructuredMask, same: Callable[[Tensor, Tensor], bool]) -> StructuredMask | None:
    """The mask of what both see, or ``None`` where that has no structured form.

    Args:
        a: one mask.
        b: another one of the same lengths.
        same: whether two tensors are known to hold equal values.
    """
    if not a.given() | b.given() <= COMBINED:
        return None
    # A sink acts beside its own window; two windows of which one has a sink have no common form.
    sinks = [mask for mask in (a, b) if mask.sink_lengths is not None and mask.window is not None]
    windows = [mask for mask in (a, b) if mask.window is not None]
    if sinks and len(windows) == 2 and not _same(a, b, "sink_lengths", same):
        return None
    chunks = [size for size in (a.chunk_size, b.chunk_size) if size is not None]
    if chunks and max(chunks) % min(chunks):
        return None
    segmented = [mask for mask in (a, b) if mask.q_segments is not None]
    names = ("q_segments", "kv_segments", "kv_segment_ends")
    if len(segmented) == 2 and not all(_same(a, b, name, same) for name in names):
        return None
    agree = _same(a, b, "q_positions", same) and _same(a, b, "kv_positions", same)
    if not agree and a.positional and b.positional:
        return None
    # The positions of the one that compares them; failing that, whichever are written out.
    placed = a if a.positional or (b.q_positions is None and not b.positional) else b
    causal = [mask.prefix_lengths for mask in (a, b) if mask.causal]
    prefixes = [prefix for prefix in causal if prefix is not None]
    if len(prefixes) == 2 and prefixes[0].shape[1:] != prefixes[1].shape[1:]:
        return None
    valid = [mask.kv_valid for mask in (a, b) if mask.kv_valid is not None]
    return StructuredMask(
        causal=bool(causal),
        window=narrower(a.reach, b.reach),
        kv_valid=functools.reduce(operator.and_, valid) if valid else None,
        q_positions=placed.q_positions,
        kv_positions=placed.kv_positions,
        q_segments=segmented[0].q_segments if segmented else None,
        kv_segments=segmented[0].kv_segments if segmented else None,
        kv_segment_ends=segmented[0].kv_segment_ends if segmented else None,
        prefix_lengths=functools.reduce(torch.minimum, prefixes) if causal and len(prefixes) == len(causal) else None,
        chunk_size=min(chunks) if chunks else None,
        sink_lengths=sinks[0].sink_lengths if sinks else None,
    )


def _same(a: StructuredMask, b: StructuredMask, name: str, same: Callable[[Tensor, Tensor], bool]) -> bool:
    x, y = getattr(a, name), getattr(b, name)
    return x is y or (x is not None and y is not None and same(x, y))


def in_both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x & y


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype is y.dtype and bool((x == y).all())
