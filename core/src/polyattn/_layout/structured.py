"""Masks described by structure, and their one formula.

With q and k standing for the *positions* of a query and a key::

    visible = kv_valid & same segment & same chunk & |q - k| < window & (not causal or k <= q or k < prefix)

The formula is written once (:meth:`StructuredMask.visible`) and works on whatever shape its arguments broadcast to: a
block of rows of a dense mask, or one element inside a FlexAttention ``mask_mod``. Everything else that reads a mask (a
lowering, an intersection, a backend) knows some of the fields: it compares :meth:`StructuredMask.given` with those, and
falls back to the formula, or refuses, where another one is set. So a new field is right everywhere, if slow.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Index, check_bool, check_flag, check_int, check_ints, check_positions, check_window

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class StructuredMask:
    """A mask given by its structure instead of its elements. Fields left out do not restrict.

    Without positions the queries are the *last* ``q_len`` of the ``kv_len`` positions. Values of tensors are not
    needed on the host; tensors are kept, not copied, and must not be changed afterwards.

    The name of a tensor field begins with ``q_`` or ``kv_`` and says what its second dimension runs over; the exception
    is ``prefix_lengths``.

    Attributes:
        causal: a query sees no key of a later position, except below its prefix.
        window: a query sees keys at a distance below this, ``|q - k| < window``. Larger than the largest number
            of the positions' dtype (int32 where positions are not given) means no window and is stored as ``None``.
        kv_valid: ``Bool[B|1, K]``, True where a key exists.
        q_positions: ``Int[B|1, Q]``, int32 or int64, any values in any order.
        kv_positions: ``Int[B|1, K]``, of the same dtype; ``0 .. K - 1`` where only ``q_positions`` are given.
        q_segments: ``Int[B|1, Q]``, the document of each query; compared for equality only.
        kv_segments: ``Int[B|1, K]``.
        prefix_lengths: ``Int[B|1]``, one per batch row, or ``Int[B|1, N]``, one per segment ``0 .. N - 1``: every
            query (of that segment) sees the keys at positions below it. Needs ``causal``.
        chunk_size: a query sees keys of its own chunk only, ``position // chunk_size`` rounded down.

    Raises:
        LayoutError: a field has a wrong type, dtype or rank, or contradicts another one.
    """

    causal: bool = False
    window: int | None = None
    kv_valid: Tensor | None = None
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    q_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    prefix_lengths: Tensor | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        check_window(self.window)
        if self.chunk_size is not None:
            check_int("chunk_size", self.chunk_size, 1, most=None)
        if self.kv_valid is not None:
            check_bool("kv_valid", self.kv_valid, "[B|1, K]", (2,))
        for name, shape in (("q_positions", "Q"), ("kv_positions", "K"), ("q_segments", "Q"), ("kv_segments", "K")):
            value = getattr(self, name)
            if value is not None:
                check_ints(name, value, f"[B|1, {shape}]", (2,))
        check_positions(self.q_positions, self.kv_positions)
        if (self.q_segments is None) != (self.kv_segments is None):
            given = "kv_segments" if self.q_segments is None else "q_segments"
            raise LayoutError(f"q_segments and kv_segments must be given together, got {given} alone")
        if self.prefix_lengths is not None:
            check_ints("prefix_lengths", self.prefix_lengths, "[B|1] or [B|1, segments]", (1, 2))
            if not self.causal:
                raise LayoutError("prefix_lengths must come with causal=True, got causal=False, where all is visible")
            if self.prefix_lengths.dim() == 2 and self.q_segments is None:
                raise LayoutError(
                    "prefix_lengths per segment must come with q_segments and kv_segments, got neither; "
                    "one prefix per batch row has shape [B|1]"
                )
        dtype = torch.int32 if self.q_positions is None else self.q_positions.dtype
        if self.window is not None and self.window > torch.iinfo(dtype).max:
            object.__setattr__(self, "window", None)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are given, by name."""
        names = self.__dataclass_fields__
        return {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}

    def given(self) -> frozenset[str]:
        """The names of the fields that are set (to anything but ``None`` and False), unknown to a reader or not."""
        names = self.__dataclass_fields__
        return frozenset([name for name in names if (value := getattr(self, name)) is not None and value is not False])

    def replace(self, **changes: Any) -> StructuredMask:
        """The same mask with other values of some fields."""
        return dataclasses.replace(self, **changes)

    @property
    def positional(self) -> bool:
        """Whether any condition compares positions."""
        return not self.given() <= _WITHOUT_DISTANCE

    def visible(
        self,
        q: Tensor,
        k: Tensor,
        *,
        valid: Tensor | None,
        segments: tuple[Tensor | None, Tensor | None],
        prefix: Tensor | None,
    ) -> Tensor | None:
        """The formula on broadcastable arguments.

        Args:
            q: positions of queries.
            k: positions of keys.
            valid: which keys exist.
            segments: of queries and of keys.
            prefix: of each query.

        Returns:
            Bool of the shape that the arguments broadcast to; ``None``: nothing restricts.
        """
        tests = []
        if valid is not None:
            tests.append(valid)
        q_segment, k_segment = segments
        if q_segment is not None and k_segment is not None:
            tests.append(q_segment == k_segment)
        if self.chunk_size is not None:
            tests.append(_chunk(q, self.chunk_size) == _chunk(k, self.chunk_size))
        if self.window is not None:
            given = self.q_positions
            distance = (q - k).abs() if given is None else _saturating_distance(q, k, given.dtype)
            tests.append(distance < self.window)
        if self.causal:
            tests.append(k <= q if prefix is None else (k <= q) | (k < prefix))
        return functools.reduce(operator.and_, tests) if tests else None


_WITHOUT_DISTANCE = frozenset(("kv_valid", "q_positions", "kv_positions", "q_segments", "kv_segments"))
#: The fields that :func:`intersect` can combine, and beside which a window only narrows.
COMBINED = _WITHOUT_DISTANCE | {"causal", "window", "prefix_lengths", "chunk_size"}


def default_positions(q_len: int, kv_len: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys where none are given: the queries are the last ones (int32, ``[1, .]``)."""
    q = torch.arange(q_len, dtype=torch.int32, device=device) + (kv_len - q_len)
    k = torch.arange(kv_len, dtype=torch.int32, device=device)
    return q[None], k[None]


def visible_rows(
    mask: StructuredMask, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None
) -> Tensor:
    """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, stop - start, K]``."""
    q, k = positions(mask, q_len, kv_len, device)

    def row(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, start:stop, None]

    def column(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, None, :]

    prefix = _query_prefix(mask)
    seen = mask.visible(
        q[:, start:stop, None],
        k[:, None, :],
        valid=column(mask.kv_valid),
        segments=(row(mask.q_segments), column(mask.kv_segments)),
        prefix=None if prefix is None else row(prefix.expand(-1, q_len)),
    )
    return torch.ones(1, 1, 1, dtype=torch.bool, device=device) if seen is None else seen


def structured_mod(mask: StructuredMask, q_len: int, kv_len: int) -> MaskMod:
    """The formula as a FlexAttention ``mask_mod``; reads nothing on the host."""
    prefix = _query_prefix(mask)
    offset = kv_len - q_len

    def mod(b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = mask.visible(
            q_idx + offset if mask.q_positions is None else pick(mask.q_positions, b, q_idx),
            kv_idx if mask.kv_positions is None else pick(mask.kv_positions, b, kv_idx),
            valid=None if mask.kv_valid is None else pick(mask.kv_valid, b, kv_idx),
            segments=(
                None if mask.q_segments is None else pick(mask.q_segments, b, q_idx),
                None if mask.kv_segments is None else pick(mask.kv_segments, b, kv_idx),
            ),
            prefix=None if prefix is None else pick(prefix, b, q_idx),
        )
        return torch.ones_like(q_idx, dtype=torch.bool) if seen is None else seen

    return mod


def pick(value: Tensor, *index: Tensor) -> Tensor:
    """``value[index]``, where a dimension of size 1 broadcasts: what a ``mask_mod`` does to a captured tensor."""
    return value[tuple(i * 0 if size == 1 else i for size, i in zip(value.shape, index, strict=True))]


def _chunk(position: Tensor, size: int) -> Tensor:
    if size > torch.iinfo(position.dtype).max:  # not a number of the dtype; all of one sign is one chunk
        return -(position < 0).to(position.dtype)
    return torch.div(position, size, rounding_mode="floor")


def _saturating_distance(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """``|q - k|``, at most the largest number of ``dtype``: positions at both ends of the range do not wrap."""
    limit = torch.iinfo(dtype).max
    high, low = torch.maximum(q, k), torch.minimum(q, k)
    return high - torch.maximum(low, high.clamp(min=-1) - limit)


class Placed(Protocol):
    """What may give positions: a mask by structure, or a layout of another kind."""

    @property
    def q_positions(self) -> Tensor | None:
        """``Int[B|1, Q]``."""

    @property
    def kv_positions(self) -> Tensor | None:
        """``Int[B|1, K]``."""


def positions(mask: Placed, q_len: int, kv_len: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys, ``Int[B|1, .]``; those that are not given are made on ``device``."""
    q, k = default_positions(q_len, kv_len, device)
    if mask.q_positions is None:
        return q, k
    return mask.q_positions, k.to(mask.q_positions.dtype) if mask.kv_positions is None else mask.kv_positions


def _query_prefix(mask: StructuredMask) -> Tensor | None:
    """The prefix of each query, ``[B|1, Q|1]``."""
    prefix = mask.prefix_lengths
    if prefix is None or mask.q_segments is None or prefix.dim() == 1:
        return None if prefix is None else prefix[:, None]
    rows = torch.broadcast_shapes(prefix.shape[:1], mask.q_segments.shape[:1])[0]
    return prefix.expand(rows, -1).gather(1, mask.q_segments.long().expand(rows, -1))


def select(mask: StructuredMask, axis: str, index: Index) -> StructuredMask:
    """The mask with the part at ``index`` of what runs over ``axis``, ``queries`` or ``keys``."""
    prefix = "q_" if axis == "queries" else "kv_"
    return mask.replace(**{n: take(v, 1, index) for n, v in mask.tensors().items() if n.startswith(prefix)})


def take(value: Tensor, dim: int, index: Index) -> Tensor:
    """The part of ``value`` at ``index`` along ``dim``; a slice gives a view."""
    if isinstance(index, slice):
        return value[(slice(None),) * dim + (index,)]
    return value.index_select(dim, index.to(value.device))


def intersect(a: StructuredMask, b: StructuredMask, same: Callable[[Tensor, Tensor], bool]) -> StructuredMask | None:
    """The mask of what both see, or ``None`` where that has no structured form.

    Args:
        a: one mask.
        b: another one of the same lengths.
        same: whether two tensors are known to hold equal values.
    """
    if not a.given() | b.given() <= COMBINED:
        return None
    chunks = [size for size in (a.chunk_size, b.chunk_size) if size is not None]
    if chunks and max(chunks) % min(chunks):
        return None
    segmented = [mask for mask in (a, b) if mask.q_segments is not None]
    if len(segmented) == 2 and not (_same(a, b, "q_segments", same) and _same(a, b, "kv_segments", same)):
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
    windows = [window for window in (a.window, b.window) if window is not None]
    valid = [mask.kv_valid for mask in (a, b) if mask.kv_valid is not None]
    return StructuredMask(
        causal=bool(causal),
        window=min(windows) if windows else None,
        kv_valid=functools.reduce(operator.and_, valid) if valid else None,
        q_positions=placed.q_positions,
        kv_positions=placed.kv_positions,
        q_segments=segmented[0].q_segments if segmented else None,
        kv_segments=segmented[0].kv_segments if segmented else None,
        prefix_lengths=functools.reduce(torch.minimum, prefixes) if causal and len(prefixes) == len(causal) else None,
        chunk_size=min(chunks) if chunks else None,
    )


def _same(a: StructuredMask, b: StructuredMask, name: str, same: Callable[[Tensor, Tensor], bool]) -> bool:
    x, y = getattr(a, name), getattr(b, name)
    return x is y or (x is not None and y is not None and same(x, y))
