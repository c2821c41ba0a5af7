"""``MaskLayout``: which query may attend to which key, described once and validated at construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout import segments
from polyattn._layout.base import telling
from polyattn._layout.checks import Read, both, check_bool, check_int
from polyattn._layout.known import read_host
from polyattn._layout.listing import Listing
from polyattn._layout.structure import MaskMod
from polyattn._layout.structured import StructuredMask
from polyattn._layout.windows import Window
from polyattn.documents import ranks
from polyattn.messages import shown


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskLayout(Listing):
    """Which of ``q_len`` queries may attend to which of ``kv_len`` keys.

    A value: nothing changes after construction, and tensors are kept, not copied, so do not change them either.
    Two layouts are equal only if they are one object. Usually made by one of the constructors: :meth:`full`,
    :meth:`causal`, :meth:`padded`, :meth:`packed`, :meth:`prefix_lm`, :meth:`chunked`, :meth:`dense`,
    :meth:`from_drop_mask`, :meth:`from_mod`, :meth:`tree`, :meth:`shared_prefix`, :meth:`block_causal`, :meth:`cached`,
    :meth:`selected`.

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
        return cls(q_len, q_len if kv_len is None else kv_len, active_queries=active_queries)

    @classmethod
    def causal(
        cls,
        q_len: int,
        kv_len: int | None = None,
        *,
        window: Window = None,
        sink_tokens: int = 0,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """A query sees the keys up to its own position; the queries are the last ``q_len`` of ``kv_len`` positions.

        Args:
            q_len: number of queries.
            kv_len: number of keys; defaults to ``q_len``.
            window: how many positions a query sees, its own included: ``0 <= q - k < window``; or ``(left, right)``,
                of which the left counts: ``0 <= q - k <= left``.
            sink_tokens: number of first keys that no window hides from a later query.
            active_queries: ``Bool[B|1, Q]``.
        """
        mask = StructuredMask(causal=True, window=window, sink_lengths=_sinks(sink_tokens))
        keys = q_len if kv_len is None else kv_len
        return cls(q_len, keys, visibility=mask, active_queries=active_queries)

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
        window: Window = None,
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
            window: how many positions a query sees, ``abs(q - k) < window``, or ``(left, right)``: as many before and
                after its own.
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
        copies: list[Read] = []
        if lengths is not None:
            copies = [segments.valid_keys(lengths, kv_len, side, validate=validate)]
            kv_valid = copies[0][0]
        mask = StructuredMask(causal=causal, window=window, kv_valid=kv_valid)
        assert mask.kv_valid is not None
        found = mask.kv_valid.shape[1]
        if kv_len is not None and kv_len != found:
            raise LayoutError(f"kv_valid must be [B, kv_len], got {found} keys and kv_len={kv_len}")
        known = read_host(mask, active_queries, copies, sync=validate)
        queries = found if q_len is None else q_len
        return cls(queries, found, visibility=mask, active_queries=active_queries, validate=validate, _handed=known)

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
        window: Window = None,
        sink_tokens: int = 0,
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
            window: how many positions of its document a query sees, ``abs(q - k) < window``, or ``(left, right)``: as
                many before and after its own.
            sink_tokens: number of first tokens of each document that no window hides.
            active_queries: ``Bool[B|1, K]``.
            validate: see :class:`MaskLayout`.
        """
        ways: dict[str, tuple[segments.Ints | None, Callable[..., Read]]] = {
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
        documents, counted = read(value, kv_len, validate=validate), None
        sink = _sinks(sink_tokens)
        if sink is not None:
            counted = both(ranks, documents)
            sink = sink.to(documents[0].device)
        elif document_ids is not None:
            counted = segments.places(documents, unread=causal is not False or window is not None)
        ids, places = documents[0], None if counted is None else counted[0]
        mask = StructuredMask(
            causal=causal,
            window=window,
            q_segments=ids,
            kv_segments=ids,
            q_positions=places,
            kv_positions=places,
            sink_lengths=sink,
        )
        copies = [documents] if counted is None else [documents, counted]
        known, length = read_host(mask, active_queries, copies, sync=validate), ids.shape[1]
        return cls(length, length, visibility=mask, active_queries=active_queries, validate=validate, _handed=known)

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
        keys = q_len if kv_len is None else kv_len
        check_int("kv_len", keys)
        rows = [prefix_lengths] if isinstance(prefix_lengths, int) else prefix_lengths
        prefixes = segments.lengths_within("prefix_lengths", rows, keys, validate=validate)
        mask = StructuredMask(causal=True, prefix_lengths=prefixes[0])
        known = read_host(mask, active_queries, [prefixes], sync=validate)
        return cls(q_len, keys, visibility=mask, active_queries=active_queries, validate=validate, _handed=known)

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
        keys = q_len if kv_len is None else kv_len
        return cls(q_len, keys, visibility=mask, active_queries=active_queries)

    @classmethod
    def block_causal(
        cls,
        block_size: int,
        q_len: int,
        kv_len: int | None = None,
        *,
        active_queries: Tensor | None = None,
    ) -> MaskLayout:
        """A query sees its own block of ``block_size`` tokens, both ways, and all blocks before it.

        The position of token ``i`` is its block, ``i // block_size``, so that a window counts blocks. The queries are
        the last ``q_len`` of ``kv_len`` tokens.
        """
        keys = q_len if kv_len is None else kv_len
        for name, value, least in (("block_size", block_size, 1), ("q_len", q_len, 0), ("kv_len", keys, 0)):
            check_int(name, value, least)
        blocks = torch.div(torch.arange(keys, device="cpu")[None], block_size, rounding_mode="floor")
        queries = torch.arange(keys - q_len, keys, device="cpu")[None]
        at = blocks if q_len == keys else torch.div(queries, block_size, rounding_mode="floor")
        mask = StructuredMask(causal=True, q_positions=at, kv_positions=blocks)
        made = cls(q_len, keys, visibility=mask, active_queries=active_queries)
        return telling(made, (cls.causal(q_len, keys), slice(None)))

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
        if not callable(mask_mod):
            got = type(mask_mod).__name__
            raise LayoutError(f"mask_mod must be a function (b, h, q_idx, kv_idx) -> Bool, got {got}")
        tensors = (active_queries, q_positions, kv_positions)
        rows = [x.shape[0] for x in tensors if isinstance(x, Tensor) and x.dim() == 2]
        wide = cls(q_len, kv_len, batch, heads, visibility=mask_mod).expand(max(rows) if rows and batch == 1 else batch)
        return dataclasses.replace(
            wide, active_queries=active_queries, q_positions=q_positions, kv_positions=kv_positions
        )


def _sinks(count: int) -> Tensor | None:
    check_int("sink_tokens", count)
    return torch.tensor([count], dtype=torch.int64, device="cpu") if count else None
