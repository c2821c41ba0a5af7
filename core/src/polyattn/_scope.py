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
from polyattn._errors import AttentionInputError, LayoutError
from polyattn._layout import MaskLayout
from polyattn._layout.checks import on_host
from polyattn._layout.operations import is_placed, steps_by_one
from polyattn._request import AttentionRequest
from polyattn.messages import shown
from polyattn.rope import RotaryEmbedding, RotaryTables
from polyattn.select import resolve_backend

if TYPE_CHECKING:
    from collections.abc import Hashable


class AttentionScope:
    """Shares prepared attention and rotary tables among the layers of one forward.

    Make one at the top of a model's forward, fill it there (``GroupedQueryAttention.fill``) and hand it to the
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
        self._windows: list[tuple[tuple[int, int], Tensor | None, Tensor | None, int]] = []
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
        positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> PreparedAttention:
        """The prepared attention for (backend, layout, window, request), built at its first use.

        Args:
            backend: a name or a backend object.
            request: what the layer asks for. State prepared with ``needs_grad`` also serves a request without.
            layout: another layout than the scope's, for instance for context keys.
            window: the layer's window; the narrower of it and the layout's own holds.
            positions: Int ``[B|1, Q]``, by which the window measures distances over a layout that does not say itself
                where its queries stand (dense, a ``mask_mod``, full and others without causality); see
                :meth:`MaskLayout.with_window`. Found again by identity.
            kv_positions: Int ``[B|1, C]``, of keys that come before those of the queries.

        Raises:
            RuntimeError: inside a compiled graph, where no value is read: positions that do not step by 1, for a window
                over a structure without positions.
            UnsupportedAttentionError, LayoutError: see :meth:`AttentionBackend.prepare`.
        """
        resolved = resolve_backend(backend) if isinstance(backend, str) else backend
        slot = self._slot(layout)
        if window is not None:
            slot = self._narrowed(slot, window, positions, kv_positions)
        key = (resolved, slot, request)
        found = self._prepared.get(key)
        if found is None and not request.needs_grad:
            # The first pass of reentrant checkpointing runs without grad; the state of the real forward serves it.
            found = self._prepared.get((resolved, slot, dataclasses.replace(request, needs_grad=True)))
        if found is None:
            found = prepare(resolved, self._layouts[slot], request)
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

    def _narrowed(self, slot: int, window: int, positions: Tensor | None, kv_positions: Tensor | None) -> int:
        """The slot of a layout under a window."""
        layout = self._layouts[slot]
        if positions is None or is_placed(layout):
            positions = kv_positions = None
        asked = (slot, window)
        for known, known_positions, known_kv_positions, narrowed in self._windows:
            same = _same_positions(known_positions, positions) and _same_positions(known_kv_positions, kv_positions)
            if known == asked and same:
                return narrowed
        found = self._slot(_windowed(layout, window, positions, kv_positions))
        self._windows.append((asked, positions, kv_positions, found))
        return found

    def _slot(self, layout: MaskLayout | None) -> int:
        if layout is None:
            return 0
        for slot, known in enumerate(self._layouts):
            if known is layout:
                return slot
        check_layout_type(layout)
        self._layouts.append(layout)
        return len(self._layouts) - 1


def _windowed(layout: MaskLayout, window: int, positions: Tensor | None, kv_positions: Tensor | None) -> MaskLayout:
    """The layout under a window that measures by the positions, or by the indices where that is the same.

    By indices a structure stays what it is, without a tensor to read or to compare with.
    """
    if positions is None:
        return layout.with_window(window)
    positions = _wide(positions)
    if kv_positions is not None:
        if positions.dim() != 2 or kv_positions.dim() != 2:
            raise LayoutError(
                "positions and kv_positions must be Int[B|1, S] for a window over a layout that does not say where its "
                f"queries stand, got shapes {list(positions.shape)} and {list(kv_positions.shape)}; give the layout "
                "the positions that count: MaskLayout.dense(..., q_positions=..., kv_positions=...)"
            )
        rows = max(len(positions), len(kv_positions))
        keys = torch.cat((_wide(kv_positions).expand(rows, -1), positions.expand(rows, -1)), 1)
        return layout.with_window(window, q_positions=positions.to(keys.dtype), kv_positions=keys)
    steps = steps_by_one(layout, positions)
    if steps is not None and torch.compiler.is_compiling():
        torch._assert_async(  # noqa: SLF001 - torch names it so
            steps,
            "positions must step by 1 (in each document) for a window over a layout without positions inside "
            "torch.compile; give the layout its positions, StructuredMask(q_positions=..., kv_positions=...)",
        )
        return layout.with_window(window)
    known = None if steps is None else on_host(steps, sync=True)
    if known is not None and bool(known):
        return layout.with_window(window)
    return layout.with_window(window, q_positions=positions, kv_positions=positions)


def _wide(positions: Tensor) -> Tensor:
    """Integers as layouts take them; whatever else it is, they refuse it."""
    narrow = positions.dtype in (torch.int16, torch.int8, torch.uint8)
    return positions.long() if narrow else positions


def _same_positions(known: Tensor | None, given: Tensor | None) -> bool:
    """Whether ``given`` is the very tensor, or the detached alias that reentrant checkpointing makes of it."""
    if known is given:
        return True
    if known is None or given is None or torch.compiler.is_compiling():
        return False
    if known.shape != given.shape or known.dtype is not given.dtype:
        return False
    at_known, at_given = (known.storage_offset(), known.stride()), (given.storage_offset(), given.stride())
    aliases: bool = torch._C._is_alias_of(known, given)  # type: ignore[attr-defined]  # noqa: SLF001
    return at_known == at_given and aliases
