"""The mask object that travels through a model of transformers to its attention layers.

A model asks for one mask per kind of layer and hands it to every layer of that kind. The object therefore also keeps
what a backend prepared: once per forward and kind of layer, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SequenceKey, register_pytree_node

from polyattn import (
    AttentionBackend,
    AttentionRequest,
    AttentionScope,
    LayoutError,
    MaskLayout,
    PreparedAttention,
)
from polyattn._layout.checks import as_device
from polyattn_transformers import _documents
from polyattn_transformers._documents import Segments
from polyattn_transformers._no_tensor import NoTensor


class LayoutMask(NoTensor):
    """A mask as transformers carries it around: a ``MaskLayout``, and what backends prepared for it.

    A plain class, so that no wrapper takes it apart. It answers what generic code asks a four-dimensional mask for its
    shape, device and a contiguous copy, and refuses everything else by name.

    Args:
        layout: who sees whom.
        batch: batch rows of the forward; the layout may have one row for all.
        live: ``Bool[B|1, Q]``, the queries that are not padding, or ``None``: all, as far as is known.
        documents: who described the documents that the layout keeps apart, and ``Int[B|1, Q]``, where they lie.
        refusal: what a layer that attends by this mask is told.
    """

    # No __dict__: exporters of transformers cast whatever they find in one, and layouts do not change.
    __slots__ = ("_moved", "_narrowed", "_resized", "batch", "documents", "layout", "live", "refusal", "scope")

    dtype = torch.bool
    ndim = 4
    what = "the mask of a polyattn implementation"
    cure = (
        "this model changes masks on their way to the attention layers, which polyattn cannot follow; give the model a "
        "four-dimensional attention_mask, or choose transformers' own attn_implementation"
    )

    def __init__(
        self,
        layout: MaskLayout,
        *,
        batch: int,
        live: Tensor | None = None,
        documents: tuple[str, Tensor] | None = None,
        refusal: str | None = None,
    ) -> None:
        self.layout = layout
        self.batch = batch
        self.live = live
        self.documents = documents
        self.refusal = refusal
        self.scope = AttentionScope(layout)
        self._narrowed: list[tuple[int | None, tuple[object, ...], MaskLayout]] = []
        self._moved: dict[torch.device, LayoutMask] = {}
        self._resized: dict[int, LayoutMask] = {}

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
        """The mask on ``device``, made once for all layers there; a dtype changes nothing."""
        if not isinstance(device, (str, torch.device)) or self.device in (None, target := as_device(device)):
            return self
        if target not in self._moved:
            self._moved[target] = LayoutMask(
                self.layout.to(target),
                batch=self.batch,
                live=None if self.live is None else self.live.to(target),
                documents=None if self.documents is None else (self.documents[0], self.documents[1].to(target)),
                refusal=self.refusal,
            )
        return self._moved[target]

    def of_queries(self, q_len: int) -> LayoutMask:
        """The same for another number of queries, made once; the mask must not tell queries apart."""
        if q_len not in self._resized:
            layout = MaskLayout(q_len, self.layout.kv_len, visibility=self.layout.visibility)
            self._resized[q_len] = LayoutMask(layout, batch=self.batch, refusal=self.refusal)
        return self._resized[q_len]

    def prepare(
        self,
        backend: AttentionBackend,
        request: AttentionRequest,
        *,
        window: int | None,
        position_ids: Tensor | None,
        segments: Segments,
    ) -> PreparedAttention:
        """What ``backend`` prepared for the layer, at the first layer that asks.

        Args:
            backend: who attends.
            request: what the layer asks for.
            window: the layer's own window; holds where the mask has none.
            position_ids: ``Int[B|1, Q]``, evidence of documents where nothing else says where they lie.
            segments: the keyword arguments that say where documents lie; see :func:`explicit`.
        """
        if torch.compiler.is_compiling():
            # Nothing may be kept across a traced region; equal preparations are merged by the compiler.
            return backend.prepare(self.narrow(request.batch, window, position_ids, segments), request)
        evidence = (position_ids, *segments.values())
        for known_window, known_evidence, layout in self._narrowed:
            if known_window == window and all(a is b for a, b in zip(known_evidence, evidence, strict=True)):
                return self.scope.prepare(backend, request, layout=layout)
        layout = self.narrow(request.batch, window, position_ids, segments)
        self._narrowed.append((window, evidence, layout))
        return self.scope.prepare(backend, request, layout=layout)

    def narrow(self, batch: int, window: int | None, position_ids: Tensor | None, segments: Segments) -> MaskLayout:
        """The layout with the layer's window and with documents that were described elsewhere than in the mask."""
        layout = with_own_window(self.layout, window)
        q_len, kv_len = layout.q_len, layout.kv_len
        found = _documents.explicit(segments, batch, q_len, kv_len)
        if self.documents is not None:
            if found is not None:
                _documents.check_agree((self.documents[0], found[0]), self.documents[1], found[1], self.live)
            return layout
        inferred = None
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == q_len > 1:
            inferred = _documents.from_positions(position_ids, self.live, batch)
        if found is not None:
            name, q_ids, kv_ids = found
            _documents.check_whole(name, q_ids, self.live)
            rules: Any = layout.visibility
            if callable(rules) or {"window", "chunk_size"} & rules.given():
                _documents.check_together(name, q_ids, self.live)
            if inferred is not None:
                _documents.check_agree((name, "position_ids"), q_ids, inferred, self.live)
            return layout & _documents.segmented(q_ids, kv_ids)
        if inferred is None or (q_len != kv_len and torch.compiler.is_compiling()):
            return layout
        if q_len != kv_len:
            raise LayoutError(
                f"position_ids describe several documents, but there are {kv_len} keys for {q_len} queries, and nobody "
                "knows to which document a cached key belongs; pack into a forward without earlier tokens"
            )
        return layout & _documents.segmented(inferred, inferred)

    def __repr__(self) -> str:
        return f"LayoutMask({self.layout.describe()})"


def _to_tensors(mask: LayoutMask) -> tuple[list[Tensor], None]:
    """As an input of an exported program, a mask is ``Bool[B, 1, Q, K]``."""
    dense = mask.layout.to_dense(mask.layout.device)
    return [dense.expand(mask.batch, -1, -1, -1)], None


def _from_tensors(tensors: Iterable[Any], _: None) -> LayoutMask:
    (dense,) = tensors
    return LayoutMask(MaskLayout.dense(dense), batch=dense.shape[0])


register_pytree_node(
    LayoutMask,
    _to_tensors,
    _from_tensors,
    serialized_type_name="polyattn_transformers.LayoutMask",
    flatten_with_keys_fn=lambda mask: ([(SequenceKey(0), _to_tensors(mask)[0][0])], None),
)


def with_own_window(layout: MaskLayout, window: int | None) -> MaskLayout:
    """The layout under a layer's own window, if it has a window to take.

    A mask that has one says it itself, and one of unrecognised functions was made for the layer as a whole.
    """
    visibility: Any = layout.visibility
    decided = getattr(visibility, "window", None) is not None or callable(visibility)
    return layout if window is None or decided else layout.with_window(window)
