"""What a layer's forward reads from its scope: prepared attention and rotary tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyattn import AttentionScope, PreparedAttention, RotaryEmbedding, RotaryTables
from polyattn.kernels import autocast_dtype
from polyattn_modules.inputs import check_inputs, check_types
from polyattn_modules.kind import Call

if TYPE_CHECKING:
    from polyattn_modules.gqa import GroupedQueryAttention


class Read(NamedTuple):
    """What a forward reads from its scope, the positions and the autocast dtype (``None``: off) that it read with."""

    prepared: PreparedAttention
    tables: RotaryTables | None
    context_tables: RotaryTables | None
    positions: Tensor | None
    kv_positions: Tensor | None
    low: torch.dtype | None

    def holds(self, positions: Tensor | None, kv_positions: Tensor | None) -> bool:
        """Whether a layer of the same kind with arguments of the same shapes would read the same."""
        if self.positions is not positions or self.kv_positions is not kv_positions:
            return False
        kind = self.prepared.autocast_kind
        return self.low is (torch.get_autocast_dtype(kind) if kind and torch.is_autocast_enabled(kind) else None)


def read_scope(
    layer: GroupedQueryAttention,
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
        scope, hidden, positions, kv_hidden, kv_positions: see :meth:`GroupedQueryAttention.forward`.
        bias: the attention bias.
        return_lse: whether the LSE is wanted.
    """
    if not (isinstance(scope, AttentionScope) and isinstance(hidden, Tensor)) or kv_hidden is not None:
        check_types(scope, hidden, kv_hidden)
    grad = torch.is_grad_enabled()
    bias_grad = bias is not None and grad and bias.requires_grad
    needs_grad = grad and (hidden.requires_grad or bias_grad or _others_want_grad(layer, kv_hidden))
    deterministic = torch.are_deterministic_algorithms_enabled()
    asked = (layer.training, needs_grad, bias is not None, bias_grad, return_lse, deterministic)
    context = None if kv_hidden is None else (kv_hidden.shape, kv_hidden.dtype, kv_hidden.device)
    parts: dict[str, Any] = layer._modules  # noqa: SLF001  # as layer.rotary, in a fraction of the time
    kind, rotary = layer.kind, parts.get("rotary")
    spec = kind.spec
    # Where the tables come from: whether there are any, or the rotary module if they are its own. What built-in rotary
    # modules of one kind make is the same.
    source: Any = rotary is not None
    if rotary is not None:
        shared = rotary.sharing_key()
        if shared is not spec.rope and shared != spec.rope:
            source = rotary
    key = (kind, source, hidden.shape, hidden.dtype, hidden.device, asked, context)
    # A compiler would guard on the table, and compile again when it has grown.
    compiling = torch.compiler.is_compiling()
    found: Read | None = None if compiling else scope.memo.get(key)
    if found is None or not found.holds(positions, kv_positions):
        check_inputs(spec, scope, hidden, positions, kv_hidden, kv_positions)
        low = autocast_dtype(hidden.device)
        dtype = hidden.dtype if low is None or hidden.dtype is torch.float64 else low
        request = kind.request(Call(hidden.shape[0], dtype, hidden.device, *asked))
        layout = None if kv_hidden is None else scope.context_layout
        places = {} if spec.window is None else _places(positions, kv_positions, kv_hidden)
        prepared = scope.prepare(kind.backend, request, layout=layout, window=spec.window, **places)
        tables = (_tables(rotary, scope, positions), _tables(rotary, scope, kv_positions))
        found = Read(prepared, *tables, positions, kv_positions, low)
        if not compiling:
            scope.memo[key] = found
    return found


def _others_want_grad(layer: GroupedQueryAttention, kv_hidden: Tensor | None) -> bool:
    others = (kv_hidden, *layer.parameters())
    return any(x is not None and x.requires_grad for x in others)


def _tables(rotary: RotaryEmbedding | None, scope: AttentionScope, positions: Tensor | None) -> RotaryTables | None:
    return None if rotary is None or positions is None else scope.rotary(rotary, positions)


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
