"""A layout as the arguments of one varlen call, for who calls a kernel directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout, StructuredMask
from polyattn.kernels import check_layout_type
from polyattn_fa2._pieces import EVERYTHING, WindowSize
from polyattn_fa2._sequences import max_keys

_CALLS = "attention(..., backend='fa') makes the calls that it takes"


class VarlenCall(NamedTuple):
    """Arguments of ``flash_attn_varlen_func`` by their names: ``flash_attn_varlen_func(q, k, v, **call._asdict())``.

    In a sequence of n queries and m keys query i stands at key ``i + m - n``.

    Attributes:
        cu_seqlens_q: int32 ``[sequences + 1]``, where the queries of each sequence begin, and where the last ones end.
        cu_seqlens_k: likewise for keys.
        max_seqlen_q: of the longest sequence of queries.
        max_seqlen_k: at least that of keys: as large as the kernels need it to tell the sides of a window apart.
        causal: whether a query sees no key after its own.
        window_size: ``(left, right)``, how many keys before and after its own a query sees; -1: all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size: WindowSize


def cu_seqlens(layout: MaskLayout, *, device: torch.device | str | None = None) -> VarlenCall:
    """The one varlen call that lets be seen exactly what a layout does.

    The tensors of the call are q ``[B * Q, Hq, D]``, k and v ``[B * K, Hkv, D]``: the tokens of all batch rows, one row
    after the other, B that of the layout (:meth:`MaskLayout.expand` gives one of batch 1 more rows).

    Args:
        layout: full, causal, with a window, packed, chunked and others; its values are read on the host.
        device: of the offsets; by default the layout's own, else the CPU.

    Raises:
        LayoutError: ``layout`` is not a MaskLayout, or no single call says the same; the message says why.
    """
    check_layout_type(layout)
    call = _call(layout)
    if isinstance(call, str):
        raise LayoutError(f"layout must be what one varlen call says, got {layout.describe()}: {call}")
    target = device or layout.device or "cpu"
    return call._replace(cu_seqlens_q=call.cu_seqlens_q.to(target), cu_seqlens_k=call.cu_seqlens_k.to(target))


def _call(layout: MaskLayout) -> VarlenCall | str:
    """The call on the host, or why there is none."""
    bands, intervals = layout.to_bands(max_runs=1), layout.key_intervals()
    problem = _problem(layout)
    if problem or bands is None or intervals is None:
        return problem
    row, _, q_stop, k_start, k_stop, _, _ = bands[bands[:, 2] > 0].unbind(1)
    first_query, first_key = row * layout.q_len, row * layout.kv_len
    # Keys that no query sees come first in the sequence behind them, where a window may hide them.
    offsets_q, offsets_k = (_from_zero(stops) for stops in (first_query + q_stop, first_key + k_stop))
    if bool((first_key + k_start < offsets_k[:-1]).any()):
        return f"keys of a sequence come before the last ones of the sequence before it; {_CALLS}"
    rows = torch.arange(layout.batch)[:, None, None] * layout.kv_len
    seen = (intervals[:, :, 0] + rows).flatten(0, 1)
    every_key = int(offsets_k[-1]) == layout.batch * layout.kv_len  # the kernels leave garbage in gradients of others
    for size in _sizes(layout) if every_key else ():
        if torch.equal(_seen(offsets_q, offsets_k, size), seen):
            queries, keys = (int(offsets.diff().max()) for offsets in (offsets_q, offsets_k))
            most = max_keys(queries, keys, size)
            return VarlenCall(offsets_q.int(), offsets_k.int(), queries, most, size[1] == 0, size)
    if layout.may_have_unseen_keys:
        return f"some keys are seen by no query, and a call would show them; take them out (select_keys), or {_CALLS}"
    return f"its sequences are not all seen under one window; {_CALLS}"


def _problem(layout: MaskLayout) -> str:
    """Why there is no call, as far as the kind of the layout says it; empty if it does not."""
    if 0 in (layout.batch, layout.q_len, layout.kv_len):
        return f"it has {layout.batch} batch rows, {layout.q_len} queries and {layout.kv_len} keys, and none may be 0"
    if layout.heads > 1:
        return "it differs by head"
    if layout.active_queries is not None:
        return "a call computes inactive queries too; take them out (select_queries), or leave active_queries out"
    if layout.max_runs is None:
        return "it has no blocks: it is a dense mask or a function, or its values were not read on the host"
    if layout.max_runs > 1:
        return f"a query sees up to {layout.max_runs} runs of keys, and in a call one; {_CALLS}"
    if layout.may_have_fully_masked_rows:
        return "a query sees nothing, which has the LSE +inf in a call; take it out (select_queries)"
    return ""


def _sizes(layout: MaskLayout) -> Iterator[WindowSize]:
    """Windows that may say what the layout does, its own first."""
    mask = layout.visibility
    if isinstance(mask, StructuredMask):
        left, right = (-1 if side is None else side for side in mask.reach)
        yield left, 0 if mask.causal else right
    yield -1, 0
    yield EVERYTHING


def _seen(offsets_q: Tensor, offsets_k: Tensor, size: WindowSize) -> Tensor:
    """The first key that each query of a call sees, and the one after its last: ``[tokens, 2]``."""
    queries, keys = offsets_q.diff(), offsets_k.diff()
    sequence = torch.arange(len(queries)).repeat_interleave(queries)
    query = torch.arange(len(sequence)) - offsets_q[sequence]
    at, last = query + (keys - queries)[sequence], keys[sequence]
    left, right = size
    start = (at - left).clamp(min=0) if left >= 0 else torch.zeros_like(at)
    stop = torch.minimum(at + right + 1, last) if right >= 0 else last
    return torch.stack([start, stop], 1) + offsets_k[sequence, None]


def _from_zero(stops: Tensor) -> Tensor:
    return torch.cat([stops.new_zeros(1), stops])
