"""Masks described by structure, and their one formula.

With q and k standing for the *positions* of a query and a key::

    visible = kv_valid & same segment & same chunk & (|q - k| < window or k < sink)
              & (not causal or k <= q or k < prefix)

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import check_bool, check_flag, check_int, check_ints, check_positions
from polyattn._layout.indexing import pick, positions
from polyattn._layout.windows import Window, as_window, window_sides

if TYPE_CHECKING:
    from typing_extensions import Self

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Structure:
    """A visibility whose class knows its rule: one class with its formula and its parts for each kind.

    Who reads one asks for the classes that it knows; the formula serves everybody else.
    """

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; the last part of a name begins with ``q_`` or ``kv_`` as in :class:`StructuredMask`."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """The same structure with other values of some fields."""
        raise NotImplementedError

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, stop - start, K]``."""
        raise NotImplementedError

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The rule as a FlexAttention ``mask_mod``; reads nothing on the host."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class StructuredMask(Structure):
    """A mask given by its structure instead of its elements. Fields left out do not restrict.

    Without positions the queries are the *last* ``q_len`` of the ``kv_len`` positions. Values of tensors are not
    needed on the host; tensors are kept, not copied, and must not be changed afterwards.

    The name of a tensor field begins with ``q_`` or ``kv_`` and says what its second dimension runs over; the exception
    are ``prefix_lengths`` and ``sink_lengths``.

    Attributes:
        causal: a query sees no key of a later position, except below its prefix.
        window: a query sees keys at a distance below this, ``|q - k| < window``; or ``(left, right)``: keys at most
            ``left`` positions before and ``right`` after its own, ``None`` or -1 where a side is not bounded. What
            bounds nothing is stored as ``None``: a number above the largest of the positions' dtype (int32 where
            positions are not given). Two sides that an int can say are stored as that int.
        kv_valid: ``Bool[B|1, K]``, True where a key exists.
        q_positions: ``Int[B|1, Q]``, int32 or int64, any values in any order.
        kv_positions: ``Int[B|1, K]``, of the same dtype; ``0 .. K - 1`` where only ``q_positions`` are given.
        q_segments: ``Int[B|1, Q]``, the document of each query; compared for equality only, where ``kv_segment_ends``
            are not given.
        kv_segments: ``Int[B|1, K]``.
        kv_segment_ends: ``Int[B|1, K]``: a key is seen by queries of the segments from ``kv_segments`` to before
            ``kv_segment_ends`` instead of its own alone. With the nodes of a tree numbered in preorder: by its node and
            all below it.
        prefix_lengths: ``Int[B|1]``, one per batch row, or ``Int[B|1, N]``, one per segment ``0 .. N - 1``: every
            query (of that segment) sees the keys at positions below it. Needs ``causal``.
        sink_lengths: of the same shapes: a window hides no key at a position below it.
        chunk_size: a query sees keys of its own chunk only, ``position // chunk_size`` rounded down.

    Raises:
        LayoutError: a field has a wrong type, dtype or rank, or contradicts another one.
    """

    causal: bool = False
    window: Window = None
    kv_valid: Tensor | None = None
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    q_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    prefix_lengths: Tensor | None = None
    chunk_size: int | None = None
    kv_segment_ends: Tensor | None = None
    sink_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        sides = window_sides(self.window)
        if self.chunk_size is not None:
            check_int("chunk_size", self.chunk_size, 1, most=None)
        if self.kv_valid is not None:
            check_bool("kv_valid", self.kv_valid, "[B|1, K]", (2,))
        for name, shape in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None and not (name == "kv_segments" and value is self.q_segments):
                check_ints(name, value, f"[B|1, {shape}]", (2,))
        check_positions(self.q_positions, self.kv_positions)
        if (self.q_segments is None) != (self.kv_segments is None):
            given = "kv_segments" if self.q_segments is None else "q_segments"
            raise LayoutError(f"q_segments and kv_segments must be given together, got {given} alone")
        if self.kv_segment_ends is not None and self.kv_segments is None:
            raise LayoutError("kv_segment_ends must come with q_segments and kv_segments, got kv_segment_ends alone")
        for name in ("prefix_lengths", "sink_lengths"):
            lengths = getattr(self, name)
            if lengths is None:
                continue
            check_ints(name, lengths, "[B|1] or [B|1, segments]", (1, 2))
            if lengths.dim() == 2 and self.q_segments is None:
                raise LayoutError(
                    f"{name} per segment must come with q_segments and kv_segments, got neither; "
                    "one length per batch row has shape [B|1]"
                )
        if self.prefix_lengths is not None and not self.causal:
            raise LayoutError("prefix_lengths must come with causal=True, got causal=False, where all is visible")
        largest = torch.iinfo(torch.int32 if self.q_positions is None else self.q_positions.dtype).max
        one_sided = self.causal and self.prefix_lengths is None
        object.__setattr__(self, "window", as_window(sides, largest, one_sided=one_sided))

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far a query sees to earlier and to later positions; ``None`` where its window bounds nothing."""
        return window_sides(self.window)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are given, by name."""
        names = self.__dataclass_fields__
        return {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}

    def given(self) -> frozenset[str]:
        """The names of the fields that are set (to anything but ``None`` and False), unknown to a reader or not."""
        names = self.__dataclass_fields__
        return frozenset([name for name in names if (value := getattr(self, name)) is not None and value is not False])

    def replace(self, **changes: Any) -> Self:
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
        segments: tuple[Tensor | None, Tensor | None, Tensor | None],
        prefix: Tensor | None,
        sink: Tensor | None,
    ) -> Tensor | None:
        """The formula on broadcastable arguments.

        Args:
            q: positions of queries.
            k: positions of keys.
            valid: which keys exist.
            segments: of queries and of keys, and the ends of those of keys.
            prefix: of each query.
            sink: of each query.

        Returns:
            Bool of the shape that the arguments broadcast to; ``None``: nothing restricts.
        """
        tests = []
        if valid is not None:
            tests.append(valid)
        q_segment, k_segment, k_end = segments
        if q_segment is not None and k_segment is not None:
            same = q_segment == k_segment if k_end is None else (k_segment <= q_segment) & (q_segment < k_end)
            tests.append(same)
        if self.chunk_size is not None:
            tests.append(_chunk(q, self.chunk_size) == _chunk(k, self.chunk_size))
        if self.window is not None:
            given = self.q_positions
            distance = (q - k).abs() if given is None else _saturating_distance(q, k, given.dtype)
            near = distance < self.window if isinstance(self.window, int) else self._within_sides(q < k, distance)
            tests.append(near if sink is None else near | (k < sink))
        if self.causal:
            tests.append(k <= q if prefix is None else (k <= q) | (k < prefix))
        return functools.reduce(operator.and_, tests) if tests else None

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, stop - start, K]``."""
        q, k = positions((self.q_positions, self.kv_positions), q_len, kv_len, device)

        def row(value: Tensor) -> Tensor:
            return value.expand(-1, q_len)[:, start:stop, None]

        def column(value: Tensor) -> Tensor:
            return value[:, None, :]

        seen = _seen(self, _query_lengths(self), row(q), column(k), row, column)
        return torch.ones(1, 1, 1, dtype=torch.bool, device=device) if seen is None else seen

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The formula as a FlexAttention ``mask_mod``; reads nothing on the host."""
        lengths = _query_lengths(self)
        offset = kv_len - q_len

        def mod(b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            def row(value: Tensor) -> Tensor:
                return pick(value, b, q_idx)

            def column(value: Tensor) -> Tensor:
                return pick(value, b, kv_idx)

            q = q_idx + offset if self.q_positions is None else row(self.q_positions)
            k = kv_idx if self.kv_positions is None else column(self.kv_positions)
            seen = _seen(self, lengths, q, k, row, column)
            return torch.ones_like(q_idx, dtype=torch.bool) if seen is None else seen

        return mod

    def _within_sides(self, later: Tensor, distance: Tensor) -> Tensor:
        left, right = self.reach
        before = ~later if left is None else ~later & (distance <= left)
        return before | (later if right is None else later & (distance <= right))


#: The fields that compare no positions.
_WITHOUT_DISTANCE = frozenset(
    ("kv_valid", "q_positions", "kv_positions", "q_segments", "kv_segments", "kv_segment_ends")
)
#: The fields that an intersection combines, beside which a window only narrows, and which a table of blocks expresses.
COMBINED = _WITHOUT_DISTANCE | {"causal", "window", "prefix_lengths", "chunk_size", "sink_lengths"}
_PER_TOKEN = (
    ("q_positions", "Q"),
    ("kv_positions", "K"),
    ("q_segments", "Q"),
    ("kv_segments", "K"),
    ("kv_segment_ends", "K"),
)
#: The word for each field in the features that backends declare abilities in.
WORDS = {
    "causal": "causal",
    "window": "window",
    "kv_valid": "padded",
    "q_segments": "packed",
    "kv_segments": "packed",
    "prefix_lengths": "prefix_lm",
    "kv_segment_ends": "tree",
    "sink_lengths": "sink_tokens",
    "chunk_size": "chunked",
    "q_positions": "positions",
    "kv_positions": "positions",
}


def _seen(
    mask: StructuredMask,
    lengths: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    row: Callable[[Tensor], Tensor],
    column: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The formula at positions q and k; ``row`` and ``column`` give what belongs to these queries and keys."""
    prefix, sink = (None if value is None else row(value) for value in lengths)
    segments = (
        None if mask.q_segments is None else row(mask.q_segments),
        None if mask.kv_segments is None else column(mask.kv_segments),
        None if mask.kv_segment_ends is None else column(mask.kv_segment_ends),
    )
    valid = None if mask.kv_valid is None else column(mask.kv_valid)
    return mask.visible(q, k, valid=valid, segments=segments, prefix=prefix, sink=sink)


def _chunk(position: Tensor, size: int) -> Tensor:
    if size > torch.iinfo(position.dtype).max:  # not a number of the dtype; all of one sign is one chunk
        return -(position < 0).to(position.dtype)
    return torch.div(position, size, rounding_mode="floor")


def _saturating_distance(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """``|q - k|``, at most the largest number of ``dtype``: positions at both ends of the range do not wrap."""
    limit = torch.iinfo(dtype).max
    high, low = torch.maximum(q, k), torch.minimum(q, k)
    return high - torch.maximum(low, high.clamp(min=-1) - limit)


def _query_lengths(mask: StructuredMask) -> tuple[Tensor | None, Tensor | None]:
    """The prefix and the sink of each query, ``[B|1, Q|1]``."""
    prefix, sink = mask.prefix_lengths, mask.sink_lengths
    return _per_query(mask, prefix), _per_query(mask, sink)


def _per_query(mask: StructuredMask, lengths: Tensor | None) -> Tensor | None:
    if lengths is None or mask.q_segments is None or lengths.dim() == 1:
        return None if lengths is None else lengths[:, None]
    rows = torch.broadcast_shapes(lengths.shape[:1], mask.q_segments.shape[:1])[0]
    return lengths.expand(rows, -1).gather(1, mask.q_segments.long().expand(rows, -1))
