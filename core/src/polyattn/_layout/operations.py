"""Parts, intersections and narrowed forms of layouts, with what the host knows of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.base import LayoutBase
from polyattn._layout.checks import Index, as_index, check_int, check_window
from polyattn._layout.indexing import positions, take
from polyattn._layout.known import Known
from polyattn._layout.picture import Drawable
from polyattn._layout.structured import COMBINED, StructuredMask, intersect
from polyattn._layout.visibility import BothMod, pinned, selected
from polyattn.messages import shown

if TYPE_CHECKING:
    from typing_extensions import Self

Some = slice | Sequence[int] | Tensor


class Combinable(Drawable):
    """A layout with the operations that make other layouts of it."""

    def expand(self, batch: int) -> Self:
        """The layout for ``batch`` batch rows: this one if it has as many, or what a layout of batch 1 broadcasts to.

        Raises:
            LayoutError: the layout has another batch than 1 and ``batch``, or that is not a valid number of rows.
        """
        check_int("batch", batch)
        if batch == self.batch:
            return self
        if self.batch != 1:
            raise LayoutError(
                f"batch must be {self.batch}, the rows that the layout describes, got {shown(batch)}; only a layout of "
                "batch 1 serves any number of rows"
            )
        visibility = pinned(self.visibility, 1, self.heads)
        return self._with(batch=batch, visibility=visibility, known=self._known.expand(batch))

    def with_window(
        self, window: int | None, *, q_positions: Tensor | None = None, kv_positions: Tensor | None = None
    ) -> Self:
        """The layout narrowed to ``abs(q - k) < window``; the smaller of two windows holds. ``None``: unchanged.

        Args:
            window: how many positions a query sees in each direction, its own included.
            q_positions: ``Int[B|1, Q]``, by which distances are measured where the layout does not say itself where its
                queries stand: a dense mask or ``mask_mod`` without positions, or a structure that compares none (full,
                padding or documents both ways). By default the queries are the last positions.
            kv_positions: ``Int[B|1, K]``, likewise.
        """
        check_window(window)
        if window is None:
            return self
        mask, validate = self.visibility, True
        if q_positions is None or is_placed(self):
            if isinstance(mask, StructuredMask) and mask.given() <= COMBINED:
                if mask.window is not None and mask.window <= window:
                    return self
                narrowed = mask.replace(window=window)
                if narrowed.window is None:  # wider than every distance
                    return self
                known = self._known.narrow(window, self.q_len, self.kv_len, self.batch)
                return self._with(visibility=narrowed, known=known)
            (q_positions, kv_positions), validate = places(self) or (None, None), False
        band = StructuredMask(window=window, q_positions=q_positions, kv_positions=kv_positions)
        return self & type(self)(self.q_len, self.kv_len, visibility=band, validate=validate)

    def __and__(self, other: LayoutBase) -> Self:
        """What both layouts let be seen; batches and heads broadcast, and a query is active if it is in both.

        Two structures stay one where the form allows it; otherwise the result is dense if one of them is, else a
        ``mask_mod``.

        Raises:
            LayoutError: lengths, batches, heads or devices differ.
        """
        if not isinstance(other, LayoutBase):
            return NotImplemented
        _check_alike(self, other)
        fields: dict[str, Any] = {
            "batch": other.batch if self.batch == 1 else self.batch,
            "heads": other.heads if self.heads == 1 else self.heads,
            "active_queries": _in_both(self.active_queries, other.active_queries),
            "q_positions": None,
            "kv_positions": None,
        }
        left, right, device = self.visibility, other.visibility, self.device or other.device
        if isinstance(left, StructuredMask) and isinstance(right, StructuredMask):
            mask, known = _structured(left, right, self._known, other._known)
            if mask is not None:
                return self._with(**fields, visibility=mask, known=known)
        fields["q_positions"], fields["kv_positions"] = places(self) or places(other) or (None, None)
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            fields["visibility"] = self.to_dense(device) & other.to_dense(device)
        else:
            left, right = pinned(left, self.batch, self.heads), pinned(right, other.batch, other.heads)
            fields["visibility"] = BothMod(left, right, self.q_len, self.kv_len)
        return self._with(**fields, known=Known())

    def select_queries(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the queries, which keep their positions and documents.

        Args:
            index: a slice, ints, or an integer tensor ``[N]``, in any order; each in ``0 .. q_len - 1``.
            validate: see :class:`MaskLayout`; here for an index that lies on a device.
        """
        part, host_part, count = as_index(index, self.q_len, validate=validate)
        return self._select("queries", part, host_part, q_len=count, active_queries=_taken(self.active_queries, part))

    def select_keys(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the keys, which keep their positions and documents; see :meth:`select_queries`."""
        part, host_part, count = as_index(index, self.kv_len, validate=validate)
        return self._select("keys", part, host_part, kv_len=count)

    def select_heads(self, index: slice) -> Self:
        """The layout of some of the heads. One that is the same for all heads (``heads == 1``) stays as it is."""
        if not isinstance(index, slice):
            raise LayoutError(f"index must be a slice of heads, got {shown(index)}")
        if self.heads == 1 or isinstance(self.visibility, StructuredMask):
            return self
        part, _, count = as_index(index, self.heads, validate=True)
        return self._with(heads=count, visibility=selected(self.visibility, "heads", part), known=Known())

    def _select(self, axis: str, part: Index, host_part: Index | None, **fields: Any) -> Self:
        """The part at an index along ``axis``, ``queries`` or ``keys``; it keeps its positions."""
        queries = axis == "queries"
        device = self.device or (part.device if isinstance(part, Tensor) else torch.device("cpu"))
        mask, known = self.visibility, self._known
        if isinstance(mask, StructuredMask):
            fields["visibility"] = _part(self, mask, axis, part, device)
            if known.mask is None or host_part is None or torch.compiler.is_compiling():
                return self._with(**fields, known=Known())
            host_mask = _part(self, known.mask, axis, host_part, torch.device("cpu"))
            active = _taken(known.active, host_part) if queries else known.active
            return self._with(**fields, known=Known(host_mask, active))
        q, k = positions((self.q_positions, self.kv_positions), self.q_len, self.kv_len, device)
        fields["q_positions"] = take(q, 1, part) if queries else q
        fields["kv_positions"] = k if queries else take(k, 1, part)
        return self._with(**fields, visibility=selected(mask, axis, part), known=Known())


def _taken(active: Tensor | None, index: Index) -> Tensor | None:
    return None if active is None else take(active, 1, index)


def _part(layout: LayoutBase, mask: StructuredMask, axis: str, index: Index, device: torch.device) -> StructuredMask:
    """The part of a structure, with positions, at ``index`` of what runs over ``axis``."""
    q, k = positions((mask.q_positions, mask.kv_positions), layout.q_len, layout.kv_len, device)
    placed = mask.replace(q_positions=q, kv_positions=k)
    prefix = "q_" if axis == "queries" else "kv_"
    parts = {name: take(value, 1, index) for name, value in placed.tensors().items() if name.startswith(prefix)}
    return placed.replace(**parts)


def _check_alike(a: LayoutBase, b: LayoutBase) -> None:
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


def _in_both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x & y


def places(layout: LayoutBase) -> tuple[Tensor, Tensor] | None:
    """The positions of queries and keys where they are written out."""
    mask = layout.visibility
    holder = mask if isinstance(mask, StructuredMask) else layout
    if holder.q_positions is None:
        return None
    return positions((holder.q_positions, holder.kv_positions), layout.q_len, layout.kv_len, layout.device)


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
    a: StructuredMask, b: StructuredMask, a_known: Known, b_known: Known
) -> tuple[StructuredMask | None, Known]:
    """The intersection as a structure and its copy on the host, which decides where there is one."""
    if a_known.mask is None or b_known.mask is None or torch.compiler.is_compiling():
        return intersect(a, b, operator.is_), Known()
    mask = intersect(a_known.mask, b_known.mask, _equal)
    if mask is None:
        return None, Known()
    return intersect(a, b, lambda *_: True), Known(mask, _in_both(a_known.active, b_known.active))


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype is y.dtype and bool((x == y).all())
