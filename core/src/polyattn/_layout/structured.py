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
from polyattn._layout.formula import chunk_of, per_query, saturating_distance
from polyattn._layout.indexing import pick, positions
from polyattn._layout.structure import MaskMod, Structure
from polyattn._layout.token_positions import places_in_documents
from polyattn._layout.windows import Sides, Window, as_window, narrower, window_sides
from polyattn.documents import ranks

if TYPE_CHECKING:
    from typing_extensions import Self


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
        for name in _LENGTHS:
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

    def axes(self, name: str) -> str:
        """See :class:`Structure`; prefixes and sinks are per batch row, and may be per segment."""
        return "BN" if name in _LENGTHS else super().axes(name)

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
            tests.append(chunk_of(q, self.chunk_size) == chunk_of(k, self.chunk_size))
        if self.window is not None:
            given = self.q_positions
            distance = (q - k).abs() if given is None else saturating_distance(q, k, given.dtype)
            near = distance < self.window if isinstance(self.window, int) else self._within_sides(q < k, distance)
            tests.append(near if sink is None else near | (k < sink))
        if self.causal:
            tests.append(k <= q if prefix is None else (k <= q) | (k < prefix))
        return functools.reduce(operator.and_, tests) if tests else None

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, 1, stop - start, K]``."""
        q, k = positions((self.q_positions, self.kv_positions), q_len, kv_len, device)

        def row(value: Tensor) -> Tensor:
            return value.expand(-1, q_len)[:, start:stop, None]

        def column(value: Tensor) -> Tensor:
            return value[:, None, :]

        seen = _seen(self, self._query_lengths(), row(q), column(k), row, column)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if seen is None else seen[:, None]

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The formula as a FlexAttention ``mask_mod``; reads nothing on the host."""
        lengths = self._query_lengths()
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

    def words(self) -> dict[str, str]:
        """The features that a backend needs for it, each with what was asked for."""
        given = self.given()
        found: dict[str, str] = {} if "causal" in given else {"full": "mask without causality"}
        # A field without a word is a word itself, which backends do not declare, so that they refuse it.
        for name in sorted(given):
            value, word = getattr(self, name), WORDS.get(name, name)
            text = name if isinstance(value, (Tensor, bool)) else f"{name} {value}"
            found[word] = f"{found[word]} and {text}" if word in found else text
        if isinstance(self.window, tuple):
            found["two_sided_window"] = f"window {self.window}"
        return found

    def rules(self) -> list[str]:
        """The rules in words for people."""
        per_segment = self.prefix_lengths is not None and self.prefix_lengths.dim() == 2
        rules = {
            "causal": "causal",
            "prefix_lengths": "after a prefix" + (" of each segment" if per_segment else ""),
            "window": f"window {self.window}",
            "sink_lengths": "sink tokens",
            "chunk_size": f"chunks of {self.chunk_size}",
            "q_segments": "packed documents" if self.kv_segment_ends is None else "a tree",
            "kv_valid": "padded keys",
            "q_positions": "explicit positions",
        }
        given = self.given() - {"kv_segments", "kv_segment_ends", "kv_positions"}  # which do not come alone
        words = [text for name, text in rules.items() if name in given]
        return [*(() if self.causal else ("both directions",)), *words, *sorted(given - rules.keys())]

    def narrowed(self, sides: Sides) -> Self | None:
        """The mask under a window too."""
        if not self.given() <= COMBINED:
            return None
        narrowed = self.replace(window=narrower(self.reach, sides))
        return self if narrowed.window == self.window else narrowed

    def in_positions(self, q_len: int, kv_len: int, device: torch.device | None) -> Self:
        """The same with the positions of queries and keys as tensors."""
        q, k = positions(self.places(), q_len, kv_len, device)
        return self.replace(q_positions=q, kv_positions=k)

    @property
    def placed(self) -> bool:
        """Whether it says itself where its queries and keys stand."""
        return self.q_positions is not None or self.positional

    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions of queries and keys where they are given."""
        return self.q_positions, self.kv_positions

    def token_positions(self, q_len: int, kv_len: int) -> Tensor:
        """``Int[B|1, Q]``; see :meth:`MaskLayout.token_positions`."""
        q, k = self.q_segments, self.kv_segments
        if q is not None and k is not None and self.kv_segment_ends is None:
            if self.q_positions is None and q is k:
                return ranks(q)
            return places_in_documents(q, k, positions(self.places(), q_len, kv_len, q.device))
        device = next((value.device for value in self.tensors().values()), None)
        at, _ = positions(self.places(), q_len, kv_len, device)
        if self.q_positions is not None or self.kv_valid is None:
            return at
        first = self.kv_valid.to(torch.int32).argmax(1, keepdim=True)
        return (at - first.to(at.dtype)).clamp(min=0)

    def _query_lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """The prefix and the sink of each query, ``[B|1, Q|1]``."""
        return per_query(self.prefix_lengths, self.q_segments), per_query(self.sink_lengths, self.q_segments)

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
_LENGTHS = ("prefix_lengths", "sink_lengths")
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
