"""What a layer's forward reads from its scope: prepared attention and rotary tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyattn import AttentionScope, PreparedAttention, RotaryEmbedding, RotaryTables
from polyattn.kernels import autocast_dtype
from polyattn_modules.inputs import check_inputs, check_types
from polyattn_modules.kind import LayerKind


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
    kv_hidden: Tensor | None,
    kv_positions: Tensor | None,
    bias: Tensor | None,
    return_lse: bool,
) -> Read:
    """Check the arguments of a forward and read the scope, which builds what it does not have yet.

    A layer that follows one of the same kind in a forward finds what that one read by a single look-up.

    Args:
        layer: which layer.
        kind: its backend and structure.
        scope, hidden, positions, kv_hidden, kv_positions: see :meth:`GroupedQueryAttention.forward`.
        bias: the attention bias.
        return_lse: whether the LSE is wanted.
    """
    if not (isinstance(scope, AttentionScope) and isinstance(hidden, Tensor)) or kv_hidden is not None:
        check_types(scope, hidden, kv_hidden)
    grad = torch.is_grad_enabled()
    bias_grad = bias is not None and grad and bias.requires_grad
    needs_grad = grad and (hidden.requires_grad or bias_grad or _others_want_grad(layer, kv_hidden))
    compiling = torch.compiler.is_compiling()
    low = autocast_dtype(hidden.device) if compiling or torch._C._is_any_autocast_enabled() else None  # noqa: SLF001
    deterministic = torch.are_deterministic_algorithms_enabled()
    rotary: Any = layer._modules.get("rotary")  # noqa: SLF001  # as layer.rotary, in a fraction of the time
    # Where the tables come from: whether there are any, or the rotary module if they are its own. What built-in rotary
    # modules of one kind make is the same.
    source: Any = rotary is not None
    if source:
        shared, rope = rotary.sharing_key(), kind.spec.rope
        if shared is not rope and shared != rope:
            source = rotary
    key = (
        hidden.shape,
        hidden.dtype,
        hidden.device,
        low,
        layer.training,
        needs_grad,
        return_lse,
        deterministic,
        source,
        bias if bias is None else bias_grad,
        kv_hidden if kv_hidden is None else (kv_hidden.shape, kv_hidden.dtype, kv_hidden.device),
    )
    # A compiler would guard on what is kept, and compile again when there is more.
    found: Read | None = None if compiling else scope.find(kind.name, key, positions, kv_positions)
    if found is None:
        check_inputs(kind.spec, scope, hidden, positions, kv_hidden, kv_positions)
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
        layout = None if kv_hidden is None else scope.context_layout
        window = kind.spec.window
        places = {} if window is None else _places(positions, kv_positions, kv_hidden)
        prepared = scope.prepare(kind.backend, request, layout=layout, window=window, **places)
        tables = None if rotary is None or positions is None else scope.rotary(rotary, positions)
        context_tables = None if rotary is None or kv_positions is None else scope.rotary(rotary, kv_positions)
        factors = None if compiling or source is not True else _factors(rotary, tables, hidden)
        found = Read(prepared, tables, context_tables, factors, low)
        if not compiling:
            scope.keep(kind.name, key, found, positions, kv_positions)
    return found


def _factors(rotary: nn.Module, tables: RotaryTables | None, hidden: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """See :class:`Read`."""
    if type(rotary) is not RotaryEmbedding or tables is None or tables.channels is None:
        return None
    cos, interleaved = tables.cos, rotary.spec.interleaved
    fits = cos.shape[0] in (1, hidden.shape[0]) and cos.shape[1] == hidden.shape[1] and cos.device == hidden.device
    return (*tables.channels, interleaved) if fits and tables.interleaved is interleaved else None


def _others_want_grad(layer: nn.Module, kv_hidden: Tensor | None) -> bool:
    others = (kv_hidden, *layer.parameters())
    return any(x is not None and x.requires_grad for x in others)


def _places(
    positions: Tensor | None, kv_positions: Tensor | None, kv_hidden: Tensor | None
) -> dict[str, Tensor | None]:
    """By what a window measures distances; by indices where nobody says where tokens stand, or on several axes."""
    given = [x for x in (positions, kv_positions) if isinstance(x, Tensor)]
    if len(given) < (1 if kv_hidden is None else 2) or given[0] is not positions:
        return {}
    if kv_hidden is None and given[0].dim() != 2:
        return {}
    return {"positions": positions, "kv_positions": kv_positions}
