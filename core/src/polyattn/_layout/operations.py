"""Parts and intersections of layouts: the fields of the result, and what the host knows of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.base import LayoutBase
from polyattn._layout.checks import Index, as_index
from polyattn._layout.lowering import Host, Known
from polyattn._layout.structured import (
    StructuredMask,
    intersect,
    positions,
    select,
    take,
)
from polyattn._layout.visibility import BothMod, pinned, selected

Result = tuple[dict[str, Any], Known]


def selection(
    layout: LayoutBase, known: Known, axis: str, index: slice | Sequence[int] | Tensor, *, validate: bool
) -> Result:
    """The part of a layout at ``index`` along ``axis``, ``queries`` or ``keys``; it keeps its positions."""
    queries, length = (axis == "queries"), "q_len" if axis == "queries" else "kv_len"
    part, host_part, count = as_index(index, getattr(layout, length), validate=validate)
    fields: dict[str, Any] = {length: count}
    if queries:
        fields["active_queries"] = _taken(layout.active_queries, part)
    device = layout.device or (part.device if isinstance(part, Tensor) else torch.device("cpu"))
    mask, host = layout.visibility, known.host
    if isinstance(mask, StructuredMask):
        fields["visibility"] = _part(layout, mask, axis, part, device)
        if host is None or host_part is None or torch.compiler.is_compiling():
            return fields, Known()
        host_mask = _part(layout, host.mask, axis, host_part, torch.device("cpu"))
        return fields, Known(Host(host_mask, _taken(host.active, host_part) if queries else host.active))
    q, k = positions(layout, layout.q_len, layout.kv_len, device)
    places = {"q_positions": take(q, 1, part) if queries else q, "kv_positions": k if queries else take(k, 1, part)}
    return {**fields, **places, "visibility": selected(mask, axis, part)}, Known()


def _taken(active: Tensor | None, index: Index) -> Tensor | None:
    return None if active is None else take(active, 1, index)


def _part(layout: LayoutBase, mask: StructuredMask, axis: str, index: Index, device: torch.device) -> StructuredMask:
    q, k = positions(mask, layout.q_len, layout.kv_len, device)
    return select(mask.replace(q_positions=q, kv_positions=k), axis, index)


def intersection(a: LayoutBase, a_known: Known, b: LayoutBase, b_known: Known) -> Result:
    """What two layouts both let be seen: a structure where the form allows it, else dense, else a ``mask_mod``."""
    _check_intersection(a, b)
    fields: dict[str, Any] = {
        "batch": b.batch if a.batch == 1 else a.batch,
        "heads": b.heads if a.heads == 1 else a.heads,
        "active_queries": _both(a.active_queries, b.active_queries),
        "q_positions": None,
        "kv_positions": None,
    }
    left, right, device = a.visibility, b.visibility, a.device or b.device
    if isinstance(left, StructuredMask) and isinstance(right, StructuredMask):
        mask, host = _structured(left, right, a_known.host, b_known.host)
        if mask is not None:
            return {**fields, "visibility": mask}, Known(host)
    placed = next((x for x in map(places, (a, b)) if x is not None), (None, None))
    fields["q_positions"], fields["kv_positions"] = placed
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return {**fields, "visibility": a.to_dense(device) & b.to_dense(device)}, Known()
    left, right = pinned(left, a.batch, a.heads), pinned(right, b.batch, b.heads)
    return {**fields, "visibility": BothMod(left, right, a.q_len, a.kv_len)}, Known()


def _check_intersection(a: LayoutBase, b: LayoutBase) -> None:
    problems = []
    for name in ("q_len", "kv_len", "batch", "heads"):
        x, y = getattr(a, name), getattr(b, name)
        broadcasts = name in {"batch", "heads"}
        if x != y and not (broadcasts and 1 in {x, y}):
            problems.append(f"{name} must be equal{' or 1' if broadcasts else ''}, got {x} and {y}")
    if a.device is not None and b.device is not None and a.device != b.device:
        problems.append(f"device must be the same, got {a.device} and {b.device}; move one with to()")
    if problems:
        raise LayoutError("layouts joined with & must fit each other: " + "; ".join(problems))


def _both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x & y


def places(layout: LayoutBase) -> tuple[Tensor, Tensor] | None:
    """The positions of queries and keys where they are written out."""
    mask = layout.visibility
    holder = mask if isinstance(mask, StructuredMask) else layout
    return None if holder.q_positions is None else positions(holder, layout.q_len, layout.kv_len, layout.device)


def is_placed(layout: LayoutBase) -> bool:
    """Whether the layout says itself where its queries and keys stand."""
    mask = layout.visibility
    return places(layout) is not None or (isinstance(mask, StructuredMask) and mask.positional)


def steps_by_one(layout: LayoutBase, at: Tensor) -> Tensor | None:
    """Whether distances of the indices and of the positions are equal for all who may see each other.

    Args:
        layout: of tokens that attend to themselves.
        at: ``Int[B|1, S]``, their positions.

    Returns:
        A Bool scalar; ``None`` where the layout is not a structure, or not one of these tokens with themselves.
    """
    mask = layout.visibility
    if not isinstance(mask, StructuredMask) or mask.q_segments is not mask.kv_segments:
        return None
    if not layout.q_len == layout.kv_len == at.shape[1]:
        return None
    if mask.kv_segments is None and mask.kv_valid is None:
        return (at.diff(dim=1) == 1).all()
    shift = at - torch.arange(at.shape[1], dtype=at.dtype, device=at.device)
    hidden = torch.zeros_like(at) if mask.kv_valid is None else (~mask.kv_valid).to(at.dtype)
    documents = torch.zeros_like(at) if mask.kv_segments is None else mask.kv_segments
    rows = max(len(shift), len(hidden), len(documents))
    order = hidden.expand(rows, -1).argsort(dim=1, stable=True)
    order = order.gather(1, documents.expand(rows, -1).gather(1, order).argsort(dim=1, stable=True))
    # Documents one after the other, the valid keys of each before the others.
    shift, hidden, documents = (x.expand(rows, -1).gather(1, order) for x in (shift, hidden, documents))
    return ((shift.diff(dim=1) == 0) | (documents.diff(dim=1) != 0) | (hidden[:, 1:] != 0)).all()


def _structured(
    a: StructuredMask, b: StructuredMask, a_host: Host | None, b_host: Host | None
) -> tuple[StructuredMask | None, Host | None]:
    """The intersection as a structure and its copy on the host, which decides where there is one."""
    if a_host is None or b_host is None or torch.compiler.is_compiling():
        return intersect(a, b, operator.is_), None
    mask = intersect(a_host.mask, b_host.mask, _equal)
    if mask is None:
        return None, None
    return intersect(a, b, lambda *_: True), Host(mask, _both(a_host.active, b_host.active))


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype is y.dtype and bool((x == y).all())
