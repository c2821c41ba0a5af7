"""Parts, intersections and narrowed forms of layouts, with what the host knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.base import LayoutBase, telling
from polyattn._layout.checks import Index, as_index, check_int
from polyattn._layout.indexing import positions, take
from polyattn._layout.intersections import in_both, structured_and
from polyattn._layout.known import Known
from polyattn._layout.picture import Drawable
from polyattn._layout.structure import Structure
from polyattn._layout.structured import StructuredMask
from polyattn._layout.union import MAX_PARTS, UnionMask, parts_of
from polyattn._layout.visibility import JoinedMod, pinned, selected
from polyattn._layout.windows import Window, window_sides
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
        self, window: Window, *, q_positions: Tensor | None = None, kv_positions: Tensor | None = None
    ) -> Self:
        """The layout narrowed to ``abs(q - k) < window``; the smaller of two windows holds. ``None``: unchanged.

        Sink tokens stay visible. Each part of a union is narrowed.

        Args:
            window: how many positions a query sees in each direction, its own included; or ``(left, right)``: keys at
                most ``left`` positions before and ``right`` after its own, ``None`` or -1 where a side has no bound.
            q_positions: ``Int[B|1, Q]``, by which distances are measured where the layout does not say itself where its
                queries stand: a dense mask or ``mask_mod`` without positions, or a structure that compares none (full,
                padding or documents both ways). By default the queries are the last positions.
            kv_positions: ``Int[B|1, K]``, likewise.
        """
        sides = window_sides(window)
        if sides == (None, None):
            return self
        mask, validate = self.visibility, True
        if q_positions is None or is_placed(self):
            narrowed = mask.narrowed(sides) if isinstance(mask, Structure) else None
            if narrowed is not None:
                return self if narrowed is mask else self._with(visibility=narrowed, known=self._known.narrow(sides))
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
        self, other = self._joinable(), other._joinable()  # noqa: PLW0642 - the same layouts
        fields = _joined_fields(self, other, "&")
        fields["active_queries"] = in_both(self.active_queries, other.active_queries)
        left, right, device = self.visibility, other.visibility, self.device or other.device
        if isinstance(left, Structure) and isinstance(right, Structure):
            mask, known = structured_and(left, right, self._known, other._known)
            if mask is not None:
                return self._with(**fields, visibility=mask, known=known)
        fields["q_positions"], fields["kv_positions"] = places(self) or places(other) or (None, None)
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            fields["visibility"] = self.to_dense(device) & other.to_dense(device)
        else:
            left, right = pinned(left, self.batch, self.heads), pinned(right, other.batch, other.heads)
            fields["visibility"] = JoinedMod(left, right, self.q_len, self.kv_len)
        return telling(self._with(**fields, known=Known()), *_tellers(self, other))

    def __or__(self, other: LayoutBase) -> Self:
        """What one of two layouts lets be seen; batches and heads broadcast.

        A query that is inactive in one sees what the other shows. Structures stay structures.
        A dense mask or ``mask_mod`` makes the result one.

        Raises:
            LayoutError: lengths, batches, heads or devices differ.
        """
        if not isinstance(other, LayoutBase):
            return NotImplemented
        self, other = self._joinable(), other._joinable()  # noqa: PLW0642 - the same layouts
        fields = _joined_fields(self, other, "|")
        fields["active_queries"] = None
        left, right = parts_of(self.visibility, self.active_queries), parts_of(other.visibility, other.active_queries)
        if left and right and len(left) + len(right) <= MAX_PARTS:
            known = Known()
            if self._known.mask is not None and other._known.mask is not None:
                host = [parts_of(of.mask, of.active) for of in (self._known, other._known)]
                known = Known(UnionMask(host[0] + host[1]))
            united = self._with(**fields, visibility=UnionMask(left + right), known=known)
            return telling(united, *(_tellers(self, other) if self._tokens or other._tokens else ()))
        fields["q_positions"], fields["kv_positions"] = places(self) or places(other) or (None, None)
        described = [of.visibility for of in (self, other)]
        masked = any(of.active_queries is not None for of in (self, other))
        if masked or any(isinstance(mask, Tensor) for mask in described):
            device = self.device or other.device
            fields["visibility"] = self.to_dense(device) | other.to_dense(device)
        else:
            a, b = (pinned(of.visibility, of.batch, of.heads) for of in (self, other))
            fields["visibility"] = JoinedMod(a, b, self.q_len, self.kv_len, either=True)
        return telling(self._with(**fields, known=Known()), *_tellers(self, other))

    def select_queries(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the queries, which keep their positions and documents.

        Args:
            index: a slice, ints, or an integer tensor ``[N]``, in any order; each in ``0 .. q_len - 1``.
            validate: see :class:`MaskLayout`; here for an index that lies on a device.
        """
        part, host_part, count = as_index(index, self.q_len, validate=validate)
        active = self.active_queries
        fields = {"q_len": count, "active_queries": None if active is None else take(active, 1, part)}
        return telling(self._select("queries", part, host_part, **fields), (self, part))

    def select_keys(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the keys, which keep their positions and documents; see :meth:`select_queries`."""
        part, host_part, count = as_index(index, self.kv_len, validate=validate)
        return telling(self._select("keys", part, host_part, kv_len=count), (self, slice(None)))

    def select_heads(self, index: slice) -> Self:
        """The layout of some of the heads. One that is the same for all heads (``heads == 1``) stays as it is."""
        if not isinstance(index, slice):
            raise LayoutError(f"index must be a slice of heads, got {shown(index)}")
        if self.heads == 1:
            return self
        part, host_part, count = as_index(index, self.heads, validate=True)
        return self._with(heads=count, **self._part("heads", part, host_part))

    def select_batch(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the batch rows, see :meth:`select_queries`; one of batch 1, which serves all, stays."""
        if self.batch == 1:
            return self
        part, host_part, count = as_index(index, self.batch, validate=validate)
        tokens = [(cast("Self", of).select_batch(index, validate=validate), at) for of, at in self._tokens]
        fields: dict[str, Any] = {"batch": count}
        for name in ("active_queries", "q_positions", "kv_positions"):
            value = getattr(self, name)
            fields[name] = None if value is None else _batch_rows(value, part)
        return telling(self._with(**fields, **self._part("batch", part, host_part)), *tokens)

    def _select(self, axis: str, part: Index, host_part: Index | None, **fields: Any) -> Self:
        """The part at an index along ``axis``, ``queries`` or ``keys``; it keeps its positions."""
        found = self._part(axis, part, host_part)
        if not isinstance(found["visibility"], Structure):
            device = self.device or (part.device if isinstance(part, Tensor) else torch.device("cpu"))
            q, k = positions(_given(self), self.q_len, self.kv_len, device)
            fields["q_positions"] = take(q, 1, part) if axis == "queries" else q
            fields["kv_positions"] = k if axis == "queries" else take(k, 1, part)
        return self._with(**fields, **found)

    def _part(self, axis: str, part: Index, host_part: Index | None) -> dict[str, Any]:
        """The visibility at an index along ``axis``, and what the host knows of it."""
        mask, sizes = self.visibility, (self.q_len, self.kv_len)
        if isinstance(mask, Structure):
            letter = axis[0].upper()
            device = self.device or (part.device if isinstance(part, Tensor) else torch.device("cpu"))
            found = mask.part(letter, part, *sizes, device)
            if found is not None:
                return {"visibility": found, "known": self._known.part(letter, host_part, *sizes)}
            mask = self.to_dense()
        whole = axis == "batch" and isinstance(mask, Tensor) and mask.shape[0] == 1
        return {"visibility": mask if whole else selected(mask, axis, part), "known": Known()}


def _batch_rows(value: Tensor, index: Index) -> Tensor:
    return value if value.shape[0] == 1 else take(value, 0, index)


def _tellers(*layouts: LayoutBase) -> list[tuple[LayoutBase, Index]]:
    """Those of layouts of the same queries that place these otherwise than the positions which both are left with."""
    told = [of for of in layouts if of._tokens]  # noqa: SLF001 - of this class
    if not told and all(places(of) is None for of in layouts):
        by_row = ("kv_valid", "q_segments")
        told = [of for of in layouts if isinstance(of.visibility, Structure)]
        told = [of for of in told if any(name.endswith(by_row) for name in cast("Structure", of.visibility).tensors())]
    return [(of, slice(None)) for of in told]


def _joined_fields(a: LayoutBase, b: LayoutBase, sign: str) -> dict[str, Any]:
    _check_alike(a, b, sign)
    return {
        "batch": b.batch if a.batch == 1 else a.batch,
        "heads": b.heads if a.heads == 1 else a.heads,
        "q_positions": None,
        "kv_positions": None,
    }


def _check_alike(a: LayoutBase, b: LayoutBase, sign: str) -> None:
    problems = []
    for name in ("q_len", "kv_len", "batch", "heads"):
        x, y = getattr(a, name), getattr(b, name)
        broadcasts = name in {"batch", "heads"}
        if x != y and not (broadcasts and 1 in {x, y}):
            problems.append(f"{name} must be equal{' or 1' if broadcasts else ''}, got {x} and {y}")
    if a.device is not None and b.device is not None and a.device != b.device:
        problems.append(f"device must be the same, got {a.device} and {b.device}; move one with to()")
    if problems:
        raise LayoutError(f"layouts joined with {sign} must fit each other: " + "; ".join(problems))


def places(layout: LayoutBase) -> tuple[Tensor, Tensor] | None:
    """The positions of queries and keys where they are written out, and are the same in all parts."""
    given = _given(layout)
    return None if given[0] is None else positions(given, layout.q_len, layout.kv_len, layout.device)


def _given(layout: LayoutBase) -> tuple[Tensor | None, Tensor | None]:
    mask = layout.visibility
    return mask.places() if isinstance(mask, Structure) else (layout.q_positions, layout.kv_positions)


def is_placed(layout: LayoutBase) -> bool:
    """Whether the layout says itself where its queries and keys stand."""
    mask = layout.visibility
    return mask.placed if isinstance(mask, Structure) else layout.q_positions is not None


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
