"""One forward's prepared state: each distinct mask and rotary table is built once and shared by all layers.

``AttentionScope`` is a plain class on purpose: wrappers such as FSDP rebuild dataclasses, named tuples and pytrees at
every module boundary to cast their tensors, which would turn FP32 tables into BF16 and break identity.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn._backend import AttentionBackend, PreparedAttention, prepare
from polyattn._boundary import check_layout_type
from polyattn._errors import AttentionInputError
from polyattn._layout import MaskLayout
from polyattn._numbers import shown
from polyattn._request import AttentionRequest
from polyattn._rope import RotaryEmbedding, RotaryTables
from polyattn._select import resolve_backend

if TYPE_CHECKING:
    from collections.abc import Hashable


class AttentionScope:
    """Shares prepared attention and rotary tables among the layers of one forward.

    Make one at the top of a model's forward, fill it there (``GroupedQueryAttention.prefill``) and hand it to the
    layers; let it go with the forward. Filling it inside a checkpointed region cannot be traced.

    Args:
        layout: the mask of the forward; layers may narrow it with ``window=`` or bring another with ``layout=``.
        context_layout: the mask of layers that also attend to context keys, over context and own keys together;
            ``None`` when ``layout`` already is that mask.
        length: of the sequence (largest position + 1, cached keys included), for rotary specs whose frequencies depend
            on it; a host int, never read off the positions.

    Attributes:
        memo: what layers found, by their kind and the shapes they were called with; theirs to fill.

    Raises:
        LayoutError: a layout is no :class:`MaskLayout`.
        AttentionInputError: ``length`` is no length.
    """

    def __init__(
        self, layout: MaskLayout, *, context_layout: MaskLayout | None = None, length: int | None = None
    ) -> None:
        check_layout_type(layout)
        if context_layout is not None:
            check_layout_type(context_layout, "context_layout")
        if length is not None and (
            isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0
        ):
            raise AttentionInputError(
                f"length must be an int >= 0, the length of the sequence, or None, got {shown(length)}; "
                "a host int, never a tensor"
            )
        self._context_layout = context_layout
        self._length = length
        self._layouts: list[MaskLayout] = [layout]
        self._prepared: dict[Hashable, PreparedAttention] = {}
        self._tables: list[tuple[Hashable, Tensor, RotaryTables]] = []
        self.memo: dict[Hashable, Any] = {}

    @property
    def layout(self) -> MaskLayout:
        """The mask of the forward; another forward has another scope."""
        return self._layouts[0]

    @property
    def context_layout(self) -> MaskLayout | None:
        """The mask of layers that also attend to context keys, where they have one of their own."""
        return self._context_layout

    @property
    def length(self) -> int | None:
        """Length of the sequence, where it was given."""
        return self._length

    @property
    def builds(self) -> dict[str, int]:
        """How many masks and how many rotary tables were built: ``{"attention": n, "rotary": n}``."""
        return {"attention": len(self._prepared), "rotary": len(self._tables)}

    def prepare(
        self,
        backend: str | AttentionBackend,
        request: AttentionRequest,
        *,
        layout: MaskLayout | None = None,
        window: int | None = None,
    ) -> PreparedAttention:
        """The prepared attention for (backend, layout, window, request), built at its first use.

        Args:
            backend: a name or a backend object.
            request: what the layer asks for. State prepared with ``needs_grad`` also serves a request without.
            layout: another layout than the scope's, for instance for context keys.
            window: the layer's window; the narrower of it and the layout's own holds.

        Raises:
            UnsupportedAttentionError, LayoutError: see :meth:`AttentionBackend.prepare`.
        """
        resolved = resolve_backend(backend) if isinstance(backend, str) else backend
        slot = self._slot(layout)
        key = (resolved, slot, window, request)
        found = self._prepared.get(key)
        if found is None and not request.needs_grad:
            # The first pass of reentrant checkpointing runs without grad; the state of the real forward serves it.
            found = self._prepared.get((resolved, slot, window, dataclasses.replace(request, needs_grad=True)))
        if found is None:
            base = self._layouts[slot]
            found = prepare(resolved, base if window is None else base.with_window(window), request)
            self._prepared[key] = found
        return found

    def rotary(self, embedding: RotaryEmbedding, positions: Tensor, *, length: int | None = None) -> RotaryTables:
        """The rotary tables of ``embedding`` at ``positions``, built at their first use.

        Args:
            embedding: embeddings of exactly the built-in class and of equal spec share tables; any other object
                shares only with itself.
            positions: Int ``[B|1, S]`` or ``[A, B|1, S]``; found again by identity, so pass the same tensor to all
                layers and do not change it in between.
            length: sequence length, for specs whose frequencies depend on it; the scope's own by default.
        """
        if length is None and embedding.needs_length:
            length = self.length
        rule = (embedding.sharing_key(), length)
        for known_rule, known_positions, known in self._tables:
            if known_rule == rule and _same_positions(known_positions, positions):
                return known
        tables: RotaryTables = embedding(positions) if length is None else embedding(positions, length=length)
        self._tables.append((rule, positions, tables))
        return tables

    def _slot(self, layout: MaskLayout | None) -> int:
        if layout is None:
            return 0
        for slot, known in enumerate(self._layouts):
            if known is layout:
                return slot
        check_layout_type(layout)
        self._layouts.append(layout)
        return len(self._layouts) - 1


def _same_positions(known: Tensor, given: Tensor) -> bool:
    """Whether ``given`` is the very tensor, or the detached alias that reentrant checkpointing makes of it."""
    if known is given:
        return True
    if torch.compiler.is_compiling() or known.shape != given.shape or known.dtype is not given.dtype:
        return False
    at_known, at_given = (known.storage_offset(), known.stride()), (given.storage_offset(), given.stride())
    aliases: bool = torch._C._is_alias_of(known, given)  # type: ignore[attr-defined]  # noqa: SLF001
    return at_known == at_given and aliases
