"""From bands to sequences: the rows of queries and keys of each kernel call, and where sequences begin.

A call is a row of a small table on the host; offsets and rows of all calls are concatenated into five tensors, which
move to the device. Nothing in them depends on the number of heads or on widths, so one table serves every layer.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn_fa2._pieces import EVERYTHING, WindowSize, pieces_by_call

Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """One kernel call: a row of ``Sequences.calls``.

    Attributes:
        queries: real queries, in all sequences.
        slots: queries with fillers.
        keys: keys.
        sequences: how many.
        max_seqlen_q: the longest sequence of queries, fillers included.
        max_seqlen_k: at least the longest sequence of keys.
        left: how many keys before its position a query sees; -1: all.
        right: how many keys after its position a query sees; -1: all.
        all_queries: 1 where this one call takes all queries in order, so that their rows are not listed.
        all_keys: 1 where this one call takes all keys in order, so that their rows are not listed.
        shared: 1 where some key is in two sequences of the layout.
        part: 0, or the number of a later part, whose queries earlier calls have written.
    """

    queries: int
    slots: int
    keys: int
    sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    all_queries: int
    all_keys: int
    shared: int
    part: int

    @property
    def window_size(self) -> WindowSize:
        """The two sides as the kernels take them."""
        return self.left, self.right


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """The kernel calls of a layout. Index tensors list one call after the other; in a fixed call they are ``None``.

    Attributes:
        calls: int64 CPU ``[N, 12]``, columns of :class:`Call`; rows of zeros up to N = 2 at least.
        cu_seqlens_q: int32, for each call where its sequences of slots begin, and where the last one ends.
        cu_seqlens_k: int32, likewise for keys.
        q_rows: int64, the row of the flattened ``[B * Q]`` of each query; empty where a call takes all.
        q_slots: int64, the place of each query within its call's slots; empty where there are no fillers.
        k_rows: int64, the row of the flattened ``[B * K]`` of each key; empty where a call takes all.
    """

    calls: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    q_rows: Tensor | None = None
    q_slots: Tensor | None = None
    k_rows: Tensor | None = None


def calls_of(table: Tensor) -> list[Call]:
    """The kernel calls that a table lists."""
    return [Call(*row) for row in table.tolist() if row[0]]


def uniform(
    batch: int, q_len: int, kv_len: int, window_size: WindowSize, *, fixed: bool, device: torch.device
) -> Sequences:
    """Every batch row as one sequence; ``fixed``: for a kernel that takes ``[B, S, H, D]``. Reads nothing."""
    call = Call(batch * q_len, batch * q_len, batch * kv_len, batch, q_len, kv_len, *window_size, 1, 1, 0, 0)
    if fixed:
        return Sequences(_table([call]))
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    # A compiler wants three tensors, not one thrice.
    nothing = [torch.empty(0, dtype=torch.int64, device=device) for _ in range(3)]
    return Sequences(_table([call]), rows * q_len, rows * kv_len, *nothing)


def from_bands(bands: Tensor, right: int, *, q_len: int, kv_len: int, batch: int, repeat: bool) -> Sequences:
    """The sequences of a table of blocks, on the CPU.

    Args:
        bands: int64 CPU ``[N, 7]``, see ``MaskLayout.to_bands``.
        right: how many keys after its position a query of most blocks sees, where that is bounded.
        q_len: number of queries Q.
        kv_len: number of keys K.
        batch: number of batch rows.
        repeat: whether the blocks of one batch row stand for all of them.
    """
    lower = _lower_op if torch.compiler.is_compiling() else _lower
    return Sequences(*lower(bands, right, q_len, kv_len, batch, repeat))


def from_validity(kv_valid: Tensor, active: Tensor | None, *, q_len: int, batch: int) -> Sequences:
    """The sequences of a mask that hides invalid keys and nothing else, wherever its holes are, on the CPU.

    No distance is compared, so that the keys that are left may close ranks.

    Args:
        kv_valid: Bool ``[B|1, K]``; read on the host.
        active: Bool ``[B|1, Q]``, or ``None``: all queries are.
        q_len: number of queries Q.
        batch: number of batch rows B.
    """
    lower = _lower_validity_op if torch.compiler.is_compiling() else _lower_validity
    return Sequences(*lower(kv_valid, active, q_len, batch))


def _lower(bands: Tensor, right: int, q_len: int, kv_len: int, batch: int, repeat: bool) -> Tables:
    groups = pieces_by_call(bands.tolist(), right, q_len=q_len, kv_len=kv_len)
    table = [(size, part, torch.tensor(pieces, dtype=torch.int64)) for size, part, pieces in groups]
    if repeat:
        table = [(size, part, _repeated(pieces, batch, q_len, kv_len)) for size, part, pieces in table]
    return _joined(table, batch * q_len, batch * kv_len)


def _lower_validity(kv_valid: Tensor, active: Tensor | None, q_len: int, batch: int) -> Tables:
    valid = kv_valid.cpu().expand(batch, -1)
    wanted = torch.ones(1, q_len, dtype=torch.bool) if active is None else active.cpu()
    rows = (wanted & valid.any(1, keepdim=True)).expand(batch, -1)
    keys = valid & rows.any(1, keepdim=True)
    q_sizes, k_sizes = (x.sum(1)[rows.any(1)] for x in (rows, keys))
    if q_sizes.numel() == 0:
        return _joined([], rows.numel(), keys.numel())
    q_rows, k_rows = (x.flatten().nonzero()[:, 0] for x in (rows, keys))
    whole = (int(len(q_rows) == rows.numel()), int(len(k_rows) == keys.numel()))
    sizes = (len(q_rows), len(q_rows), len(k_rows), len(q_sizes), int(q_sizes.max()), int(k_sizes.max()))
    call = Call(*sizes, *EVERYTHING, *whole, 0, 0)
    nothing = q_rows[:0]
    return (
        _table([call]),
        _offsets(q_sizes),
        _offsets(k_sizes),
        nothing if call.all_queries else q_rows,
        nothing.clone(),
        nothing.clone() if call.all_keys else k_rows,
    )


_lower_op = torch.library.custom_op("polyattn_fa2::lower", _lower, mutates_args=())
_lower_validity_op = torch.library.custom_op("polyattn_fa2::lower_validity", _lower_validity, mutates_args=())


def _unread_tables(*_: object) -> Tables:
    size = torch.library.get_ctx().new_dynamic_size
    offsets = [torch.empty(size(), dtype=torch.int32, device="cpu") for _ in range(2)]
    rows = [torch.empty(size(), dtype=torch.int64, device="cpu") for _ in range(3)]
    calls = torch.empty(size(), len(Call._fields), dtype=torch.int64, device="cpu")
    return calls, offsets[0], offsets[1], rows[0], rows[1], rows[2]


_lower_op.register_fake(_unread_tables)
_lower_validity_op.register_fake(_unread_tables)


def _repeated(pieces: Tensor, batch: int, q_len: int, kv_len: int) -> Tensor:
    step = torch.tensor([q_len, 0, 0, kv_len, 0], dtype=torch.int64)
    return (pieces + torch.arange(batch)[:, None, None] * step).flatten(0, 1)


def _joined(groups: list[tuple[WindowSize, int, Tensor]], q_rows: int, k_rows: int) -> Tables:
    """The calls of window sizes, parts and pieces ``[N, 5]``; ``q_rows`` and ``k_rows`` are B * Q and B * K."""
    groups = [group for group in groups if len(group[2])]
    if not groups:
        none = torch.empty(0, dtype=torch.int64)
        return _table([]), none.int(), none.int(), none.clone(), none.clone(), none.clone()
    q_start, queries, fillers, k_start, keys = torch.cat([pieces for _, _, pieces in groups]).unbind(1)
    alone = len(groups) == 1
    all_queries = alone and _is_everything(q_start, queries, q_rows)
    all_keys = alone and _is_everything(k_start, keys, k_rows)
    by_key = k_start.argsort()
    shared = bool((k_start[by_key][1:] < (k_start + keys)[by_key][:-1]).any())
    calls, cu_seqlens_q, cu_seqlens_k, slots = [], [], [], []
    for (left, right), part, pieces in groups:
        _, q_sizes, more, _, k_sizes = pieces.unbind(1)
        padded = q_sizes + more
        max_seqlen_q = int(padded.max())
        max_seqlen_k = max_keys(max_seqlen_q, int(k_sizes.max()), (left, right))
        totals = (int(q_sizes.sum()), int(padded.sum()), int(k_sizes.sum()))
        flags = (int(all_queries), int(all_keys), int(shared), part)
        calls.append(Call(*totals, len(pieces), max_seqlen_q, max_seqlen_k, left, right, *flags))
        cu_seqlens_q.append(_offsets(padded))
        cu_seqlens_k.append(_offsets(k_sizes))
        slots.append(_ranges(cu_seqlens_q[-1][:-1].long(), q_sizes))
    nothing = q_start.new_empty(0)
    return (
        _table(calls),
        torch.cat(cu_seqlens_q),
        torch.cat(cu_seqlens_k),
        nothing if all_queries else _ranges(q_start, queries),
        torch.cat(slots) if bool(fillers.any()) else nothing.clone(),
        nothing.clone() if all_keys else _ranges(k_start, keys),
    )


def max_keys(queries: int, keys: int, size: WindowSize) -> int:
    """The ``max_seqlen_k`` of a call whose longest sequences have so many queries and keys.

    The kernels take a side of ``max_seqlen_k`` or more for unbounded, and an unbounded one beside a bounded one for
    ``max_seqlen_k``: wrong for a query farther than that before its last key, unless ``max_seqlen_k`` says so.
    """
    left, right = size
    return max(keys, queries - 1) if right > 0 or (left >= 0 and right < 0) else keys


def _table(calls: list[Call]) -> Tensor:
    empty = (0,) * len(Call._fields)
    return torch.tensor([*calls, *[empty] * (2 - len(calls))], dtype=torch.int64, device="cpu")


def _is_everything(starts: Tensor, sizes: Tensor, count: int) -> bool:
    """Whether the ranges are all of ``count`` rows, in order."""
    before = sizes.cumsum(0) - sizes
    return int(sizes.sum()) == count and bool((starts == before).all())


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """``starts[0], starts[0] + 1, ...`` of every range, one after the other."""
    before = sizes.cumsum(0) - sizes
    return torch.repeat_interleave(starts - before, sizes) + torch.arange(int(sizes.sum()))
