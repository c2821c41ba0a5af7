"""Parts, intersections and narrowed forms of layouts, with what the host knows of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.base import LayoutBase, telling
from polyattn._layout.cached import CachedMask
from polyattn._layout.checks import Index, as_index, check_int
from polyattn._layout.indexing import positions, take
from polyattn._layout.intersections import in_both, structured_and
from polyattn._layout.known import Known
from polyattn._layout.picture import Drawable
from polyattn._layout.structured import COMBINED, Structure, StructuredMask
from polyattn._layout.union import MAX_PARTS, UnionMask, parts_of
from polyattn._layout.visibility import JoinedMod, pinned, selected
from polyattn._layout.windows import Sides, Window, narrower, window_sides
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
        if isinstance(mask, CachedMask):
            cached = self._known.mask
            known = Known(cached.narrowed(sides), self._known.active) if isinstance(cached, CachedMask) else Known()
            return self._with(visibility=mask.narrowed(sides), known=known)
        if q_positions is None or is_placed(self):
            if isinstance(mask, StructuredMask) and mask.given() <= COMBINED:
                narrowed = _narrowed(mask, sides)
                if narrowed.window == mask.window:
                    return self
                return self._with(visibility=narrowed, known=self._known.narrow(narrowed))
            if isinstance(mask, UnionMask) and mask.given() <= COMBINED:
                host, narrow = self._known.mask, functools.partial(_narrowed, sides=sides)
                known = Known(host.map(narrow), self._known.active) if isinstance(host, UnionMask) else Known()
                return self._with(visibility=mask.map(narrow), known=known)
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
        if isinstance(self.visibility, CachedMask) or isinstance(other.visibility, CachedMask):
            return self._in_positions() & other._in_positions()
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
        if isinstance(self.visibility, CachedMask) or isinstance(other.visibility, CachedMask):
            return self._in_positions() | other._in_positions()
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
        fields = {"q_len": count, "active_queries": _taken(self.active_queries, part)}
        return telling(self._select("queries", part, host_part, **fields), (self, part))

    def select_keys(self, index: Some, *, validate: bool = True) -> Self:
        """The layout of some of the keys, which keep their positions and documents; see :meth:`select_queries`."""
        part, host_part, count = as_index(index, self.kv_len, validate=validate)
        return telling(self._select("keys", part, host_part, kv_len=count), (self, slice(None)))

    def select_heads(self, index: slice) -> Self:
        """The layout of some of the heads. One that is the same for all heads (``heads == 1``) stays as it is."""
        if not isinstance(index, slice):
            raise LayoutError(f"index must be a slice of heads, got {shown(index)}")
        if self.heads == 1 or isinstance(self.visibility, Structure):
            return self
        part, _, count = as_index(index, self.heads, validate=True)
        return self._with(heads=count, visibility=selected(self.visibility, "heads", part), known=Known())

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
        mask, known = self.visibility, self._known
        if isinstance(mask, Structure):
            fields["visibility"] = mask.replace(**{k: _batch_rows(x, part) for k, x in mask.tensors().items()})
            if known.mask is None or host_part is None or torch.compiler.is_compiling():
                return telling(self._with(**fields, known=Known()), *tokens)
            host = known.mask.replace(**{k: _batch_rows(x, host_part) for k, x in known.mask.tensors().items()})
            active = None if known.active is None else _batch_rows(known.active, host_part)
            return telling(self._with(**fields, known=Known(host, active)), *tokens)
        fields["visibility"] = (
            mask if isinstance(mask, Tensor) and mask.shape[0] == 1 else selected(mask, "batch", part)
        )
        return telling(self._with(**fields, known=Known()), *tokens)

    def _select(self, axis: str, part: Index, host_part: Index | None, **fields: Any) -> Self:
        """The part at an index along ``axis``, ``queries`` or ``keys``; it keeps its positions."""
        queries = axis == "queries"
        device = self.device or (part.device if isinstance(part, Tensor) else torch.device("cpu"))
        self = self._in_positions()  # noqa: PLW0642 - what follows is about the layout that has positions
        mask, known = self.visibility, self._known
        if isinstance(mask, Structure):
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


def _batch_rows(value: Tensor, index: Index) -> Tensor:
    return value if value.shape[0] == 1 else take(value, 0, index)


def _part(layout: LayoutBase, mask: Structure, axis: str, index: Index, device: torch.device) -> Structure:
    """The part of a structure, with positions, at ``index`` of what runs over ``axis``."""
    if isinstance(mask, UnionMask):
        row = functools.partial(_taken, index=index) if axis == "queries" else None
        return mask.map(lambda part: cast("StructuredMask", _part(layout, part, axis, index, device)), row)
    assert isinstance(mask, StructuredMask)
    q, k = positions((mask.q_positions, mask.kv_positions), layout.q_len, layout.kv_len, device)
    placed = mask.replace(q_positions=q, kv_positions=k)
    prefix = "q_" if axis == "queries" else "kv_"
    taken = {name: take(value, 1, index) for name, value in placed.tensors().items() if name.startswith(prefix)}
    return placed.replace(**taken)


def _tellers(*layouts: LayoutBase) -> list[tuple[LayoutBase, Index]]:
    """Those of layouts of the same queries that place these otherwise than the positions which both are left with."""
    told = [of for of in layouts if of._tokens]  # noqa: SLF001 - of this class
    if not told and all(places(of) is None for of in layouts):
        by_row = {"kv_valid", "q_segments"}
        told = [of for of in layouts if isinstance(of.visibility, (StructuredMask, UnionMask))]
        told = [of for of in told if cast("StructuredMask", of.visibility).given() & by_row]
    return [(of, slice(None)) for of in told]


def _narrowed(mask: StructuredMask, sides: Sides) -> StructuredMask:
    return mask.replace(window=narrower(mask.reach, sides))


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
    mask = layout.visibility
    holders = [part.mask for part in mask.parts] if isinstance(mask, UnionMask) else [mask]
    found = [(of.q_positions, of.kv_positions) if isinstance(of, StructuredMask) else None for of in holders]
    q, k = found[0] or (layout.q_positions, layout.kv_positions)
    if q is None or any(other is not None and (other[0] is not q or other[1] is not k) for other in found):
        return None
    return positions((q, k), layout.q_len, layout.kv_len, layout.device)


def is_placed(layout: LayoutBase) -> bool:
    """Whether the layout says itself where its queries and keys stand."""
    mask = layout.visibility
    if isinstance(mask, CachedMask):
        return True
    if isinstance(mask, UnionMask):
        return all(part.mask.q_positions is not None or part.mask.positional for part in mask.parts)
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
