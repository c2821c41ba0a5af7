"""The mask function that transformers calls, and the mask object that travels to the attention layers.

A model asks for one mask per kind of layer and hands it to every layer of that kind. The object therefore also keeps what
a backend prepared: once per forward and kind of layer, whatever the number of layers.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from polyattn import AttentionBackend, AttentionRequest, AttentionScope, LayoutError, MaskLayout, PreparedAttention
from polyattn._backend import prepare
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from polyattn_transformers import _documents
from polyattn_transformers._build import Span, layout_of
from polyattn_transformers._packing import PackedMask, check_length
from polyattn_transformers._pattern import MaskFunction, Pattern, read_pattern

#: What transformers' factories pass for its own implementations, and what a layout does not need.
_UNUSED = frozenset({"local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip", "dtype", "config", "use_vmap"})


class LayoutMask:
    """A mask as transformers carries it around: a ``MaskLayout``, and what backends prepared for it.

    A plain class, so that no wrapper takes it apart. It answers what generic code asks a four-dimensional mask for its
    shape, device and a contiguous copy, and refuses everything else by name.

    Args:
        layout: who sees whom.
        batch: batch rows of the forward; the layout may have one row for all.
        live: ``Bool[B|1, Q]``, the queries that are no padding, or ``None``: all, as far as is known.
        documents: ``Int[B|1, Q]``, the documents that the layout keeps apart, and who described them.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(
        self,
        layout: MaskLayout,
        *,
        batch: int,
        live: Tensor | None = None,
        documents: tuple[str, Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.batch = batch
        self.live = live
        self.documents = documents
        self.scope = AttentionScope(layout)
        self._narrowed: list[tuple[int | None, tuple[object, ...], MaskLayout]] = []
        self._moved: dict[torch.device, LayoutMask] = {}

    @property
    def shape(self) -> torch.Size:
        """``[B, 1, Q, K]``."""
        return torch.Size((self.batch, 1, self.layout.q_len, self.layout.kv_len))

    @property
    def device(self) -> torch.device | None:
        """Where the tensors of the layout lie; ``None`` if there are none."""
        return self.layout.device

    def dim(self) -> int:
        """4."""
        return self.ndim

    def contiguous(self) -> LayoutMask:
        """The mask itself; generation with a static cache asks for it."""
        return self

    def to(self, device: torch.device | str | None = None, *_: Any, **__: Any) -> LayoutMask:
        """The mask on ``device``, made once for all layers there."""
        if device is None or not isinstance(device, (str, torch.device)) or self.device in (None, torch.device(device)):
            return self
        target = torch.device(device)
        if target not in self._moved:
            self._moved[target] = LayoutMask(
                self.layout.to(target),
                batch=self.batch,
                live=None if self.live is None else self.live.to(target),
                documents=None if self.documents is None else (self.documents[0], self.documents[1].to(target)),
            )
        return self._moved[target]

    def prepare(
        self,
        backend: AttentionBackend,
        request: AttentionRequest,
        *,
        window: int | None,
        position_ids: Tensor | None,
        segments: dict[str, Any],
    ) -> PreparedAttention:
        """What ``backend`` prepared for the layer, at the first layer that asks.

        Args:
            backend: who attends.
            request: what the layer asks for.
            window: the layer's own window; holds where the mask has none.
            position_ids: ``Int[B|1, Q]``, evidence of documents where nothing else says where they lie.
            segments: the keyword arguments that say where documents lie; see :func:`explicit_documents`.
        """
        evidence = (position_ids, *segments.values())
        if torch.compiler.is_compiling():
            # Nothing may be kept across a traced region; equal preparations are merged by the compiler.
            return prepare(backend, self._narrow(request, window, position_ids, segments), request)
        for known_window, known_evidence, layout in self._narrowed:
            if known_window == window and all(a is b for a, b in zip(known_evidence, evidence, strict=True)):
                break
        else:
            layout = self._narrow(request, window, position_ids, segments)
            self._narrowed.append((window, evidence, layout))
        return self.scope.prepare(backend, request, layout=layout)

    def _narrow(
        self, request: AttentionRequest, window: int | None, position_ids: Tensor | None, segments: dict[str, Any]
    ) -> MaskLayout:
        """The layout with the layer's window and with documents that were described elsewhere than in the mask."""
        layout = with_own_window(self.layout, window)
        q_len, kv_len = layout.q_len, layout.kv_len
        explicit = explicit_documents(segments, request.batch, q_len, kv_len)
        inferred = None
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == q_len > 1:
            inferred = _documents.from_positions(position_ids, self.live, request.batch)
        if self.documents is not None:
            # The mask keeps documents apart already; what else is said about them must agree.
            own, ids = self.documents
            if explicit is not None:
                _documents.check_agree((own, explicit[0]), ids, explicit[1], self.live)
            if inferred is not None and own != "position_ids":
                _documents.check_agree((own, "position_ids"), ids, inferred, self.live)
            return layout
        if explicit is not None:
            name, q_ids, kv_ids = explicit
            _documents.check_whole(name, q_ids, self.live)
            if inferred is not None:
                _documents.check_agree((name, "position_ids"), q_ids, inferred, self.live)
            return layout & _segmented(q_ids, kv_ids)
        if inferred is None:
            return layout
        if q_len != kv_len:
            if torch.compiler.is_compiling():
                return layout
            raise LayoutError(
                f"position_ids describe several documents, but there are {kv_len} keys for {q_len} queries, and nobody "
                "knows to which document a cached key belongs; pack into a forward without earlier tokens"
            )
        return layout & _segmented(inferred, inferred)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the mask of a polyattn implementation is no tensor and has no attribute {name!r}: this model changes masks "
            "on its way to the attention layers, which polyattn cannot follow; give it a four-dimensional attention_mask, "
            "or choose transformers' own attn_implementation"
        )

    def __getitem__(self, index: object) -> NoReturn:
        return self.__getattr__(f"[{index!r}]")

    def __repr__(self) -> str:
        return f"LayoutMask({self.layout.describe()})"


def layout_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | PackedMask | LayoutMask | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LayoutMask:
    """The mask function of every polyattn implementation (transformers' ``AttentionMaskInterface``).

    Args:
        batch_size: B.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: absolute index of the first query.
        kv_offset: absolute index of the first key.
        mask_function: who sees whom, over absolute indices.
        attention_mask: padding ``[B, L]`` over absolute indices, True or 1 where a token is; missing tokens are padding.
            Or packed documents, or a mask that this function returned earlier in the same forward.
        device: where the mask is needed.
        **kwargs: what transformers passes for its own implementations.

    Returns:
        The mask, never ``None``: a layout says also what a missing mask leaves open.

    Raises:
        LayoutError: a mask of another rank or size than the call's, or packed documents that do not fit it.
    """
    if unknown := kwargs.keys() - _UNUSED:
        raise LayoutError(f"unknown arguments of a mask: {', '.join(sorted(unknown))}; they would be ignored")
    if isinstance(attention_mask, LayoutMask):
        return _handed_back(attention_mask, q_length, kv_length)
    span = Span(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    pattern = read_pattern(mask_function)
    if isinstance(attention_mask, PackedMask):
        return _packed_mask(attention_mask, pattern, span)
    padding, live = _padding(attention_mask, span)
    layout = layout_of(pattern, span, padding)
    documents = None
    if pattern.documents is not None:
        documents = ("position_ids", span.queries("packed sequence mask", pattern.documents))
    return LayoutMask(layout, batch=batch_size, live=live, documents=documents)


def with_own_window(layout: MaskLayout, window: int | None) -> MaskLayout:
    """The layout under a layer's own window, if it has a window to take.

    A mask that has one says it itself, and one of unrecognised functions was made for the layer as a whole.
    """
    visibility: Any = layout.visibility
    decided = getattr(visibility, "window", None) is not None or callable(visibility)
    return layout if window is None or decided else layout.with_window(window)


def explicit_documents(
    segments: dict[str, Any], batch: int, q_len: int, kv_len: int
) -> tuple[str, Tensor, Tensor] | None:
    """Where documents lie according to a layer's keyword arguments.

    Args:
        segments: ``segment_ids`` or ``seq_idx`` ``Int[B|1, Q]``, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` ``Int[N + 1]``,
            or ``None`` for each.
        batch: B.
        q_len: number of queries.
        kv_len: number of keys.

    Returns:
        The name of what said it, the documents of the queries and those of the keys; ``None`` if nothing did.

    Raises:
        LayoutError: a wrong shape, or two that differ.
    """
    found: list[tuple[str, Tensor, Tensor]] = []
    for name in ("segment_ids", "seq_idx"):
        ids = segments[name]
        if ids is None:
            continue
        if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != q_len or q_len != kv_len:
            raise LayoutError(
                f"{name} must be Int[B, K] with one document per token of the call, got {list(ids.shape)} for "
                f"{batch} rows of {q_len} queries and {kv_len} keys"
            )
        found.append((name, ids, ids))
    q_offsets, k_offsets = segments["cu_seq_lens_q"], segments["cu_seq_lens_k"]
    if (q_offsets is None) != (k_offsets is None):
        raise LayoutError("cu_seq_lens_q and cu_seq_lens_k must be given together, got one of them")
    if q_offsets is not None:
        q_ids = _documents.from_cu_seqlens("cu_seq_lens_q", q_offsets, batch, q_len)
        found.append(("cu_seq_lens_q", q_ids, _documents.from_cu_seqlens("cu_seq_lens_k", k_offsets, batch, kv_len)))
    for other in found[1:]:
        _documents.check_agree((found[0][0], other[0]), found[0][1], other[1], None)
    return found[0] if found else None


def _segmented(q_ids: Tensor, kv_ids: Tensor) -> MaskLayout:
    from polyattn import StructuredMask

    mask = StructuredMask(q_segments=q_ids, kv_segments=kv_ids)
    return MaskLayout(q_ids.shape[1], kv_ids.shape[1], visibility=mask)


def _handed_back(mask: LayoutMask, q_len: int, kv_len: int) -> LayoutMask:
    if (mask.layout.q_len, mask.layout.kv_len) != (q_len, kv_len):
        raise LayoutError(
            f"a mask that was made ahead must fit the forward, got {mask.layout.q_len} queries and "
            f"{mask.layout.kv_len} keys in the mask, {q_len} and {kv_len} in the forward"
        )
    return mask


def _packed_mask(packed: PackedMask, pattern: Pattern, span: Span) -> LayoutMask:
    check_length(packed, span.q_len, span.kv_len)
    packed = packed.to(span.device)
    simple = not (pattern.chunk or pattern.valid or pattern.opaque) and pattern.blocks is pattern.documents is None
    layout = packed.layouts[pattern.causal and simple].with_window(pattern.window if simple else None)
    if not simple:
        layout = layout & layout_of(pattern, span, None)
    return LayoutMask(layout, batch=span.batch, documents=("packed documents", packed.documents))


def _padding(attention_mask: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """The padding of the keys ``Bool[B, K]`` and of the queries ``Bool[B, Q]``; ``None`` where there is none."""
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise LayoutError(
            f"attention_mask must be [B, K] with 1 where a token is, or [B, 1, Q, K], got {got}; "
            "packed documents go into polyattn_transformers.packed(...)"
        )
    if attention_mask.shape[0] not in (1, span.batch):
        raise LayoutError(f"attention_mask must have {span.batch} rows, one per batch row, got {attention_mask.shape[0]}")
    mask = attention_mask.to(device=span.device, dtype=torch.bool)
    if isinstance(span.kv_offset, Tensor):
        return span.keys("attention_mask", mask), None
    missing = span.kv_offset + span.kv_len - mask.shape[1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    keys = span.keys("attention_mask", mask)
    live = None
    if not isinstance(span.q_offset, Tensor) and span.q_offset + span.q_len <= mask.shape[1]:
        live = span.queries("attention_mask", mask)
    readable = not torch.compiler.is_compiling() and (span.syncs or mask.device.type == "cpu") and not mask.is_meta
    return (None if readable and bool(keys.all()) else keys), live
