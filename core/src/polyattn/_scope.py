"""One forward's prepared state: each distinct mask and rotary table is built once and shared by all layers.

``AttentionScope`` is a plain class on purpose: wrappers such as FSDP rebuild dataclasses, named tuples and pytrees at
every module boundary to cast their tensors, which would turn FP32 tables into BF16 and break identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor

from polyattn._backend import AttentionBackend, PreparedAttention
from polyattn._boundary import check_layout_type
from polyattn._errors import AttentionInputError, LayoutError
from polyattn._layout import MaskLayout
from polyattn._layout.checks import on_host
from polyattn._layout.operations import is_placed, steps_by_one
from polyattn._layout.windows import Window, window_sides
from polyattn._request import AttentionRequest
from polyattn.messages import shown
from polyattn.rope import RotaryEmbedding, RotaryTables
from polyattn.select import prepare, resolve_backend


class AttentionScope:
    """Shares prepared attention and rotary tables among the layers of one forward.

    Make one at the top of a model's forward, fill it there (``GroupedQueryAttention.fill``) and hand it to the
    layers; let it go with the forward. Filling it inside a checkpointed region cannot be traced.

    Args:
        layout: the mask of the forward; layers may narrow it with ``window=`` or bring another with ``layout=``. Or
            several by name, ``{"full": a, "sliding": b}``, of which each layer names its own.
        context_layout: the mask of layers that also attend to context keys, over context and own keys together;
            ``None`` when ``layout`` already is that mask, as it always is where layouts have names.
        length: of the sequence (largest position + 1, cached keys included), for rotary specs whose frequencies depend
            on it; a host int, never read off the positions.
    """

    def __init__(
        self,
        layout: MaskLayout | Mapping[str, MaskLayout],
        *,
        context_layout: MaskLayout | None = None,
        length: int | None = None,
    ) -> None:
        named: Any = layout if isinstance(layout, Mapping) else {None: layout}
        layouts: dict[str | None, MaskLayout] = dict(named)
        for name, one in layouts.items():
            check_layout_type(one, "layout" if name is None else f"layout[{shown(name)}]")
        if context_layout is not None:
            check_layout_type(context_layout, "context_layout")
            if None not in layouts:
                raise LayoutError("context_layout must be None where layouts have names; give it a name of its own")
        if length is not None and (
            isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0
        ):
            raise AttentionInputError(
                f"length must be an int >= 0, the length of the sequence, or None, got {shown(length)}; "
                "a host int, never a tensor"
            )
        self._layouts = layouts
        self._context_layout = context_layout
        self._length = length
        self._kept: dict[str, list[tuple[object, tuple[object, ...], Any]]] = {}

    @property
    def layout(self) -> MaskLayout:
        """The mask of the forward; another forward has another scope. An error where several have names."""
        return self.layout_of(None)

    def layout_of(self, name: str | None) -> MaskLayout:
        """The layout that a layer names; ``None``: the only one, which has no name.

        Raises:
            LayoutError: there is none of that name.
        """
        found = self._layouts.get(name)
        if found is None:
            asked = "no name" if name is None else f"the name {shown(name)}"
            has = ", ".join("one without a name" if known is None else shown(known) for known in self._layouts)
            raise LayoutError(
                f"layout must be one that the scope has, got {asked} in the layer's spec and a scope that has {has}; "
                "name the layer's in its spec (layout=...) and make the scope as AttentionScope({name: layout, ...})"
            )
        return found

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
        return {kind: len(self._kept.get(kind, ())) for kind in ("attention", "rotary")}

    def kept(self, kind: str) -> list[Any]:
        """What was kept of this kind, in the order in which it was built."""
        return [value for _, _, value in self._kept.get(kind, ())]

    def find(self, kind: str, key: object, *things: object) -> Any:
        """What was kept under these arguments, or ``None``.

        Args:
            kind: what sort of thing it is: ``"attention"``, ``"rotary"``, ``"window"``, or a name of the caller's own.
            key: a value that what was built depends on, compared by ``==``.
            things: tensors and layouts that it depends on, known again by identity.
        """
        for known_key, known_things, value in self._kept.get(kind, ()):
            if known_key != key or len(known_things) != len(things):
                continue
            if all(map(is_, known_things, things)) or all(map(_is_same, known_things, things)):
                return value
        return None

    def keep(self, kind: str, key: object, value: Any, *things: object) -> None:
        """Keep ``value`` for this forward; see :meth:`find`."""
        self._kept.setdefault(kind, []).append((key, things, value))

    def prepare(
        self,
        backend: str | AttentionBackend,
        request: AttentionRequest,
        *,
        layout: MaskLayout | None = None,
        window: Window = None,
        positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> PreparedAttention:
        """The prepared attention for (backend, layout, window, request), built at its first use.

        Args:
            backend: a name or a backend object.
            request: what the layer asks for. State prepared with ``needs_grad`` also serves a request without.
            layout: another layout than the scope's, for instance for context keys.
            window: the layer's window, an int or ``(left, right)``; the narrower of it and the layout's own holds.
            positions: Int ``[B|1, Q]``, found again by identity, by which the window measures distances over a layout
                that does not say where its queries stand (dense, a ``mask_mod``, others without causality); see
                :meth:`MaskLayout.with_window`.
            kv_positions: Int ``[B|1, C]``, of keys that come before those of the queries.

        Raises:
            RuntimeError: inside a compiled graph, where no value is read: positions that do not step by 1, for a window
                over a structure without positions.
            UnsupportedAttentionError, LayoutError: see :meth:`AttentionBackend.prepare`.
        """
        resolved = resolve_backend(backend) if isinstance(backend, str) else backend
        if layout is None:
            layout = self.layout
        else:
            check_layout_type(layout)
        if window is not None:
            places = (None, None) if positions is None or is_placed(layout) else (positions, kv_positions)
            sides = window_sides(window)
            whole, layout = layout, self.find("window", sides, layout, *places)
            if layout is None:
                layout = _windowed(whole, sides, *places)
                self.keep("window", sides, layout, whole, *places)
        found = self.find("attention", (resolved, request), layout)
        if found is None and "attention" in self._kept and not request.needs_grad:
            # The first pass of reentrant checkpointing runs without grad; the state of the real forward serves it.
            found = self.find("attention", (resolved, dataclasses.replace(request, needs_grad=True)), layout)
        if found is None:
            found = self.build(resolved, layout, request)
            self.keep("attention", (resolved, request), found, layout)
        prepared: PreparedAttention = found
        return prepared

    def build(self, backend: AttentionBackend, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """What :meth:`prepare` keeps for a layout that a window has narrowed already; for subclasses to override."""
        return prepare(backend, layout, request)

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
        tables: RotaryTables | None = self.find("rotary", rule, positions)
        if tables is None:
            tables = embedding(positions) if length is None else embedding(positions, length=length)
            self.keep("rotary", rule, tables, positions)
        return tables


def _windowed(layout: MaskLayout, window: Window, positions: Tensor | None, kv_positions: Tensor | None) -> MaskLayout:
    """The layout under a window, measured by positions; by indices, without a tensor, where that is the same."""
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


def _is_same(known: object, given: object) -> bool:
    """Whether ``given`` is ``known``, or the detached alias that reentrant checkpointing makes of a tensor."""
    if known is given:
        return True
    if torch.compiler.is_compiling() or not isinstance(known, Tensor) or not isinstance(given, Tensor):
        return False
    if known.shape != given.shape or known.dtype is not given.dtype or known.stride() != given.stride():
        return False
    aliases: bool = torch._C._is_alias_of(known, given)  # type: ignore[attr-defined]  # noqa: SLF001
    return aliases and bool(known.storage_offset() == given.storage_offset())
