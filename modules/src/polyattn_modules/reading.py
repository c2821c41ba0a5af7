"""What a layer's forward reads from its scope: prepared attention and rotary tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyattn import AttentionScope, MaskLayout, PreparedAttention, RotaryEmbedding, RotaryTables
from polyattn.kernels import autocast_dtype
from polyattn_modules.dtensors import check_tensors
from polyattn_modules.inputs import check_inputs, check_types
from polyattn_modules.kind import LayerKind
from polyattn_modules.sources import NOTHING, KeySource


class Read(NamedTuple):
    """What a forward reads from its scope.

    Attributes:
        prepared: the attention.
        tables, context_tables: of the layer's own keys, and of the context's.
        factors: arguments of :func:`rotate_channels`, where ``tables`` are known to fit what the layer projects: those
            of a built-in rotary module for the layer's own spec, outside a compiler.
        low: the autocast dtype (``None``: off) that it was read with.
    """

    prepared: PreparedAttention
    tables: RotaryTables | None
    context_tables: RotaryTables | None
    factors: tuple[Tensor, Tensor, bool] | None
    low: torch.dtype | None


def read_scope(
    layer: nn.Module,
    kind: LayerKind,
    scope: AttentionScope,
    hidden: Tensor,
    positions: Tensor | None,
    source: KeySource,
    bias: Tensor | None,
    return_lse: bool,
) -> Read:
    """Check the arguments of a forward and read the scope, which builds what it does not have yet.

    A layer that follows one of the same kind in a forward finds what that one read by a single look-up.

    Args:
        layer: which layer.
        kind: its backend and structure.
        scope, hidden, positions: see :meth:`GroupedQueryAttention.forward`.
        source: where other keys come from.
        bias: the attention bias.
        return_lse: whether the LSE is wanted.
    """
    if source is not NOTHING or not (isinstance(scope, AttentionScope) and isinstance(hidden, Tensor)):
        check_types(scope, hidden, source)
    if kind.mesh is not None:
        check_tensors(kind.mesh, hidden, positions, source, bias)
    own: MaskLayout | None = None
    if source.cache is not None:
        own = source.cache.layout(hidden.shape[1])
        positions = source.cache.positions(hidden.shape[1]) if positions is None else positions
    kv_positions = source.positions
    grad = torch.is_grad_enabled()
    bias_grad = bias is not None and grad and bias.requires_grad
    needs_grad = grad and (hidden.requires_grad or bias_grad or _others_want_grad(layer, source))
    compiling = torch.compiler.is_compiling()
    low = autocast_dtype(hidden.device) if compiling or torch._C._is_any_autocast_enabled() else None  # noqa: SLF001
    deterministic = torch.are_deterministic_algorithms_enabled()
    rotary: Any = layer._modules.get("rotary")  # noqa: SLF001  # as layer.rotary, in a fraction of the time
    # Where the tables come from: whether there are any, or the rotary module if they are its own. What built-in rotary
    # modules of one kind make is the same.
    turned_by: Any = rotary is not None
    if turned_by:
        shared, rope = rotary.sharing_key(), kind.spec.rope
        if shared is not rope and shared != rope:
            turned_by = rotary
    key = (
        hidden.shape,
        hidden.dtype,
        hidden.device,
        low,
        layer.training,
        needs_grad,
        return_lse,
        deterministic,
        turned_by,
        bias if bias is None else bias_grad,
        None if source is NOTHING else source.shape(),
    )
    # A compiler would guard on what is kept, and compile again when there is more.
    found: Read | None = None if compiling else scope.find(kind.name, key, positions, kv_positions, own)
    if found is None:
        if kind.mesh is None and not compiling:
            check_tensors(None, hidden, positions, source, bias)
        layout = check_inputs(kind.local, scope, hidden, positions, source, low, needs_grad)
        request = kind.request(
            batch=hidden.shape[0],
            dtype=hidden.dtype if low is None or hidden.dtype is torch.float64 else low,
            device=hidden.device,
            training=layer.training,
            needs_grad=needs_grad,
            has_bias=bias is not None,
            needs_bias_grad=bias_grad,
            needs_lse=return_lse,
            needs_lse_grad=return_lse and needs_grad,
            deterministic=deterministic,
        )
        window, places = kind.spec.window, {}
        if window is not None and source.keys_values is not None and kv_positions is not None:
            layout, window = _narrowed(scope, layout, window, positions, kv_positions), None
        elif window is not None:
            places = _places(positions, source)
        if kind.mesh is not None and layout.heads > 1:
            layout = _own_heads(scope, layout, kind)
        prepared = scope.prepare(kind.backend, request, layout=layout, window=window, **places)
        tables = None if rotary is None or positions is None else scope.rotary(rotary, positions)
        context_tables = None
        if rotary is not None and source.kv_hidden is not None and kv_positions is not None:
            context_tables = scope.rotary(rotary, kv_positions)
        if source.cache is not None and rotary is not None and rotary.needs_length:
            source.cache.hold_length(scope.length)
        factors = None if compiling or turned_by is not True else _factors(rotary, tables, hidden)
        found = Read(prepared, tables, context_tables, factors, low)
        if not compiling:
            scope.keep(kind.name, key, found, positions, kv_positions, own)
    return found


def _factors(rotary: nn.Module, tables: RotaryTables | None, hidden: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """See :class:`Read`."""
    if type(rotary) is not RotaryEmbedding or tables is None or tables.channels is None:
        return None
    cos, interleaved = tables.cos, rotary.spec.interleaved
    fits = cos.shape[0] in (1, hidden.shape[0]) and cos.shape[1] == hidden.shape[1] and cos.device == hidden.device
    return (*tables.channels, interleaved) if fits and tables.interleaved is interleaved else None


def _others_want_grad(layer: nn.Module, source: KeySource) -> bool:
    return any(x.requires_grad for x in (*source.tensors(), *layer.parameters()))


def _places(positions: Tensor | None, source: KeySource) -> dict[str, Tensor | None]:
    """By what a window measures distances; by indices where nobody says where tokens stand, or on several axes.

    Projected keys before the layer's own need positions unless the layout has its own: core refuses the rest.
    """
    if positions is None or (source.kv_hidden is not None and source.positions is None):
        return {}
    if positions.dim() != 2 and source.kv_hidden is None and source.past is None:
        return {}
    return {"positions": positions, "kv_positions": source.positions}


def _narrowed(
    scope: AttentionScope,
    layout: MaskLayout,
    window: int | tuple[int | None, int | None],
    positions: Tensor | None,
    kv_positions: Tensor,
) -> MaskLayout:
    """The layout over given keys under a window, measured by positions."""
    found: MaskLayout | None = scope.find("window", ("given", window), layout, positions, kv_positions)
    if found is None:
        found = layout.with_window(window, q_positions=positions, kv_positions=kv_positions)
        scope.keep("window", ("given", window), found, layout, positions, kv_positions)
    return found


def _own_heads(scope: AttentionScope, layout: MaskLayout, kind: LayerKind) -> MaskLayout:
    """The layout of this rank's heads."""
    heads = kind.heads_here
    found: MaskLayout | None = scope.find("heads", heads, layout)
    if found is None:
        found = layout.select_heads(slice(*heads))
        scope.keep("heads", heads, found, layout)
    return found
