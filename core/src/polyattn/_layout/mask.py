"""``MaskLayout``: which query may attend to which key, described once and validated at construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout import operations, segments
from polyattn._layout.base import LayoutBase
from polyattn._layout.blocks import MAX_WINDOW
from polyattn._layout.checks import Copied, as_index, check_bool, check_int, check_mod, check_window
from polyattn._layout.lowering import Known, Lowered, read_host
from polyattn._layout.structured import COMBINED, MaskMod, StructuredMask
from polyattn._layout.visibility import pinned, selected
from polyattn.messages import shown


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskLayout(LayoutBase):
    """Which of ``q_len`` queries may attend to which of ``kv_len`` keys.

    A value: nothing changes after construction, and tensors are kept, not copied, so do not change them either.
    Two layouts are equal only if they are one object. Usually made by one of the constructors: :meth:`full`,
    :meth:`causal`, :meth:`padded`, :meth:`packed`, :meth:`prefix_lm`, :meth:`chunked`, :meth:`dense`,
    :meth:`from_drop_mask`, :meth:`from_mod`.

    Attributes:
        q_len: number of queries Q; may be 0.
        kv_len: number of keys K; may be 0.
        batch: B; 1 broadcasts over any batch. Read off the tensors when it is not given.
        heads: H; 1 is the same for all heads. Read off a dense mask when it is not given.
        visibility: a ``Bool[B|1, H|1, Q, K]`` tensor (True = may attend), a ``mask_mod(b, h, q_idx, kv_idx) -> Bool``
            with FlexAttention's signature, or a :class:`StructuredMask`; by default all is seen.
        active_queries: ``Bool[B|1, Q]``; a query that is not active sees nothing. ``None``: all are.
        q_positions: ``Int[B|1, Q]``, the positions of the queries of a dense mask or ``mask_mod``, by which a window
            measures distances; a StructuredMask has its own. ``None``: the queries are the last positions.
        kv_positions: ``Int[B|1, K]``, of the same dtype; ``0 .. K - 1`` where only ``q_positions`` are given.

    Args:
        validate: whether values that lie on a device are copied to the host once, to check them and to find the
            structure in them. With False only values that are on the host anyway are checked.

    Raises:
        LayoutError: arguments have wrong types, dtypes, ranks or sizes, lie on different devices, or contradict
            each other.
    """

    @classmethod
    def full(cls, q_len: int, kv_len: int | None = None, *, active_queries: Tensor | None = None) -> MaskLayout:
        """Every query sees every key. ``kv_len`` defaults to ``q_len``."""
        return cls(q_len, _or(kv_len, q_len), visibility=StructuredMask(), active_queries=active_queries)

    @classmethod
    def causal(
        cls,
        q_len: int,
        kv_len: int | None = None,
        *,
        window: int | None = None,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """A query sees the keys up to its own position; the queries are the last ``q_len`` of ``kv_len`` positions.

        Args:
            q_len: number of queries.
            kv_len: number of keys; defaults to ``q_len``.
            window: how many positions a query sees, its own included: ``0 <= q - k < window``.
            active_queries: ``Bool[B|1, Q]``.
        """
        mask = StructuredMask(causal=True, window=window)
        return cls(q_len, _or(kv_len, q_len), visibility=mask, active_queries=active_queries)

    @classmethod
    def padded(
        cls,
        kv_valid: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        kv_len: int | None = None,
        side: str = "right",
        q_len: int | None = None,
        causal: bool = True,
        window: int | None = None,
        active_queries: Tensor | None = None,
        validate: bool = True,
    ) -> MaskLayout:
        """Only valid keys are seen: left padding, right padding, or holes anywhere.

        Queries at padded places are computed like any other; say with ``active_queries`` that they are not needed.

        Args:
            kv_valid: ``Bool[B, K]``, True where a key exists. Either this or ``lengths`` with ``kv_len``.
            lengths: number of valid keys of each batch row, ints or ``Int[B]``.
            kv_len: K; needed with ``lengths``.
            side: with ``lengths``: where the padding is, ``"right"`` or ``"left"``.
            q_len: number of queries, the last positions of the row; defaults to K.
            causal: whether a query sees no later key.
            window: how many positions a query sees; ``abs(q - k) < window``.
            active_queries: ``Bool[B|1, Q]``.
            validate: see :class:`MaskLayout`.
        """
        if (kv_valid is None) == (lengths is None):
            given = "neither" if kv_valid is None else "both"
            raise LayoutError(f"padded() must get kv_valid or lengths, got {given}")
        if kv_valid is not None and not isinstance(kv_valid, Tensor):
            raise LayoutError(
                f"kv_valid must be a tensor Bool[B|1, K], got {type(kv_valid).__name__}; give the numbers of valid "
                "keys as padded(lengths=..., kv_len=...)"
            )
        if lengths is None and side != "right":
            raise LayoutError(
                f"side must go with lengths, got side={shown(side)} with kv_valid, which shows the padding"
            )
        copies: list[Copied] = []
        if lengths is not None:
            copies = [segments.valid_keys(lengths, kv_len, side, validate=validate)]
            kv_valid = copies[0].tensor
        mask = StructuredMask(causal=causal, window=window, kv_valid=kv_valid)
        assert mask.kv_valid is not None
        found = mask.kv_valid.shape[1]
        if kv_len is not None and kv_len != found:
            raise LayoutError(f"kv_valid must be [B, kv_len], got {found} keys and kv_len={kv_len}")
        return cls._structured(_or(q_len, found), found, mask, active_queries, copies, validate)

    @classmethod
    def packed(
        cls,
        lengths: segments.Ints | None = None,
        *,
        cu_seqlens: segments.Ints | None = None,
        document_ids: segments.Ints | None = None,
        position_ids: segments.Ints | None = None,
        kv_len: int | None = None,
        causal: bool = True,
        window: int | None = None,
        active_queries: Tensor | None = None,
        validate: bool = True,
    ) -> MaskLayout:
        """Documents packed into rows; a query sees keys of its own document only. Exactly one of the first four.

        Batch rows never share a document, whatever the numbers say. Where the tokens of a document do not lie together,
        positions are the places of the tokens in their documents.

        Args:
            lengths: of the documents: ints of one row, one list per batch row, or an integer tensor
                ``[N]`` or ``[B, N]``.
            cu_seqlens: their offsets ``0, l1, l1 + l2, ...``, in the same forms.
            document_ids: the document of each token, ``[K]`` or ``[B, K]``, >= 0.
            position_ids: positions that restart at 0 with each document and step by 1, ``[K]`` or ``[B, K]``.
            kv_len: number of tokens of a row. Known from the values; checked against them where both are there, and
                needed with ``validate=False`` for lengths or offsets that lie on a device.
            causal: whether a query sees no later key.
            window: how many positions of its document a query sees; ``abs(q - k) < window``.
            active_queries: ``Bool[B|1, K]``.
            validate: see :class:`MaskLayout`.
        """
        ways: dict[str, tuple[segments.Ints | None, Callable[..., Copied]]] = {
            "lengths": (lengths, segments.from_lengths),
            "cu_seqlens": (cu_seqlens, segments.from_cu_seqlens),
            "document_ids": (document_ids, segments.from_document_ids),
            "position_ids": (position_ids, segments.from_position_ids),
        }
        given = [name for name, (value, _) in ways.items() if value is not None]
        if len(given) != 1:
            raise LayoutError(
                f"packed() must get exactly one of {', '.join(ways)}, got {' and '.join(given) or 'none'}"
            )
        if kv_len is not None:
            check_int("kv_len", kv_len)
        value, read = ways[given[0]]
        copied = read(value, kv_len, validate=validate)
        ids, counted = copied.tensor, None
        if document_ids is not None:
            counted = segments.places(copied, unread=causal is not False or window is not None)
        places = None if counted is None else counted.tensor
        mask = StructuredMask(
            causal=causal,
            window=window,
            q_segments=ids,
            kv_segments=ids,
            q_positions=places,
            kv_positions=places,
        )
        copies = [copied] if counted is None else [copied, counted]
        return cls._structured(ids.shape[1], ids.shape[1], mask, active_queries, copies, validate)

    @classmethod
    def prefix_lm(
        cls,
        prefix_lengths: int | Sequence[int] | Tensor,
        q_len: int,
        kv_len: int | None = None,
        *,
        active_queries: Tensor | None = None,
        validate: bool = True,
    ) -> MaskLayout:
        """Causal, but every query sees all keys at positions below the prefix of its batch row.

        Args:
            prefix_lengths: one int for all rows, one per batch row, or ``Int[B]``.
            q_len: number of queries.
            kv_len: number of keys; defaults to ``q_len``.
            active_queries: ``Bool[B|1, Q]``.
            validate: see :class:`MaskLayout`.
        """
        check_int("q_len", q_len)
        keys = _or(kv_len, q_len)
        check_int("kv_len", keys)
        rows = [prefix_lengths] if isinstance(prefix_lengths, int) else prefix_lengths
        prefixes = segments.lengths_within("prefix_lengths", rows, keys, validate=validate)
        mask = StructuredMask(causal=True, prefix_lengths=prefixes.tensor)
        return cls._structured(q_len, keys, mask, active_queries, [prefixes], validate)

    @classmethod
    def chunked(
        cls,
        chunk_size: int,
        q_len: int,
        kv_len: int | None = None,
        *,
        causal: bool = True,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """A query sees the keys of its own chunk of ``chunk_size`` positions, up to its own position if ``causal``."""
        mask = StructuredMask(causal=causal, chunk_size=chunk_size)
        return cls(q_len, _or(kv_len, q_len), visibility=mask, active_queries=active_queries)

    @classmethod
    def dense(
        cls,
        mask: Tensor,
        *,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """Visibility element by element: ``mask`` is ``Bool[B|1, H|1, Q, K]`` or ``[Q, K]``, True = may attend.

        A window put on top later measures distances by ``q_positions`` ``Int[B|1, Q]`` and ``kv_positions``
        ``Int[B|1, K]``; see :class:`MaskLayout`.
        """
        check_bool("mask", mask, "[B|1, H|1, Q, K] or [Q, K]", (2, 4))
        four = mask if mask.dim() == 4 else mask[None, None]
        return cls(
            four.shape[2],
            four.shape[3],
            visibility=four,
            active_queries=active_queries,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )

    @classmethod
    def from_drop_mask(cls, mask: Tensor, **rest: Tensor | None) -> MaskLayout:
        """:meth:`dense` of the inverse: True = may *not* attend, as ``torch.nn.MultiheadAttention`` writes masks.

        Args:
            mask: ``Bool[B|1, H|1, Q, K]`` or ``[Q, K]``.
            rest: the other arguments of :meth:`dense`.
        """
        check_bool("mask", mask, "[B|1, H|1, Q, K] or [Q, K]", (2, 4), true="may not attend")
        return cls.dense(~mask, **rest)

    @classmethod
    def from_mod(
        cls,
        mask_mod: MaskMod,
        *,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """Visibility by a function with FlexAttention's signature, ``mask_mod(b, h, q_idx, kv_idx) -> Bool``.

        It is called under ``torch.vmap`` with one element of each index, when a mask is computed from it; what it
        captures must be on the device of the attention. With ``batch=1`` or ``heads=1`` it is called with index 0 and
        the result serves every batch row or head. ``q_positions`` and ``kv_positions`` are those of :meth:`dense`.
        """
        check_mod(mask_mod)
        tensors = (active_queries, q_positions, kv_positions)
        rows = [x.shape[0] for x in tensors if isinstance(x, Tensor) and x.dim() == 2]
        wide = cls(q_len, kv_len, batch, heads, visibility=mask_mod).expand(max(rows) if rows and batch == 1 else batch)
        return dataclasses.replace(
            wide, active_queries=active_queries, q_positions=q_positions, kv_positions=kv_positions
        )

    @classmethod
    def _structured(
        cls,
        q_len: int,
        kv_len: int,
        mask: StructuredMask,
        active: Tensor | None,
        copies: Sequence[Copied],
        validate: bool,
    ) -> MaskLayout:
        """A layout of which the ``copies`` have been read, so that a device is read once."""
        host = read_host(mask, active, copies, sync=validate)
        return cls(q_len, kv_len, visibility=mask, active_queries=active, validate=validate, _known=Known(host))

    def expand(self, batch: int) -> MaskLayout:
        """The layout for ``batch`` batch rows: this one if it has as many, or what a layout of batch 1 broadcasts to.

        Raises:
            LayoutError: the layout has another batch than 1 and ``batch``, or that is no number of rows.
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
        return self._with(batch=batch, visibility=visibility, _known=self._facts()._replace(lowered=None))

    def with_window(
        self, window: int | None, *, q_positions: Tensor | None = None, kv_positions: Tensor | None = None
    ) -> MaskLayout:
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
        mask = self.visibility
        if q_positions is not None and not operations.is_placed(self):
            band = StructuredMask(window=window, q_positions=q_positions, kv_positions=kv_positions)
            return self & MaskLayout(self.q_len, self.kv_len, visibility=band)
        if isinstance(mask, StructuredMask) and mask.given() <= COMBINED:
            if mask.window is not None and mask.window <= window:
                return self
            host = None if self._host is None else self._host._replace(mask=self._host.mask.replace(window=window))
            lowered = None
            if torch.compiler.is_compiling() and (mask.positional or mask.q_positions is None):
                # Nothing is read: the blocks, found by the same positions, stay as they are, without trimmed ends.
                lowered = Lowered(self._lowered.blocks if window <= MAX_WINDOW else None)
            return self._with(visibility=mask.replace(window=window), _known=Known(host, lowered))
        q, k = operations.places(self) or (None, None)
        band = StructuredMask(window=window, q_positions=q, kv_positions=k)
        return self & MaskLayout(self.q_len, self.kv_len, visibility=band, validate=False)

    def __and__(self, other: MaskLayout) -> MaskLayout:
        """What both layouts let be seen; batches and heads broadcast, and a query is active if it is in both.

        Two structures stay one where the form allows it; otherwise the result is dense if one of them is, else a
        ``mask_mod``.

        Raises:
            LayoutError: lengths, batches, heads or devices differ.
        """
        if not isinstance(other, MaskLayout):
            return NotImplemented
        fields, known = operations.intersection(self, self._facts(), other, other._facts())
        return self._with(**fields, _known=known)

    def select_queries(self, index: slice | Sequence[int] | Tensor, *, validate: bool = True) -> MaskLayout:
        """The layout of some of the queries, which keep their positions and documents.

        Args:
            index: a slice, ints, or an integer tensor ``[N]``, in any order; each in ``0 .. q_len - 1``.
            validate: see :class:`MaskLayout`; here for an index that lies on a device.
        """
        fields, known = operations.selection(self, self._facts(), "queries", index, validate=validate)
        return self._with(**fields, _known=known)

    def select_keys(self, index: slice | Sequence[int] | Tensor, *, validate: bool = True) -> MaskLayout:
        """The layout of some of the keys, which keep their positions and documents; see :meth:`select_queries`."""
        fields, known = operations.selection(self, self._facts(), "keys", index, validate=validate)
        return self._with(**fields, _known=known)

    def select_heads(self, index: slice) -> MaskLayout:
        """The layout of some of the heads. One that is the same for all heads (``heads == 1``) stays as it is."""
        if not isinstance(index, slice):
            raise LayoutError(f"index must be a slice of heads, got {shown(index)}")
        if self.heads == 1 or isinstance(self.visibility, StructuredMask):
            return self
        part, _, count = as_index(index, self.heads, validate=True)
        visibility = selected(self.visibility, "heads", part)
        return self._with(heads=count, visibility=visibility, _known=Known())


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
