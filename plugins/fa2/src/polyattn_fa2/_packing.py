"""Gathering tensors into the sequences of a kernel call, and scattering results back.

*Tokens* are a tensor as the kernels see it: ``[B, S, H, X]`` in a fixed call, else ``[B * S, H, X]``; an LSE is
``[B, S, H]`` or ``[B * S, H]``. Nothing here reads a value of a tensor on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from polyattn.kernels import merge_into
from polyattn_fa2._sequences import Call
from polyattn_fa2.providers import KernelCall


class Part(NamedTuple):
    """One kernel call, and which tokens take part.

    Attributes:
        call: of the kernel.
        slots: queries, fillers included.
        q_rows: int64, the token of each query; ``None``: all, in order.
        q_slots: int64, the slot of each query; ``None``: no fillers.
        k_rows: int64, the token of each key; ``None``: all, in order.
        later: whether other calls have written its queries.
    """

    call: KernelCall
    slots: int = 0
    q_rows: Tensor | None = None
    q_slots: Tensor | None = None
    k_rows: Tensor | None = None
    later: bool = False

    def queries(self, tokens: Tensor, fill: float = 0.0) -> Tensor:
        """The tokens of the call's queries, ``fill`` in the slots of fillers."""
        taken = tokens if self.q_rows is None else tokens.index_select(0, self.q_rows)
        if self.q_slots is None:
            return taken
        return taken.new_full((self.slots, *taken.shape[1:]), fill).index_copy_(0, self.q_slots, taken)

    def keys(self, tokens: Tensor) -> Tensor:
        """The tokens of the call's keys."""
        return tokens if self.k_rows is None else tokens.index_select(0, self.k_rows)

    def put_queries(self, target: Tensor | None, packed: Tensor, *, add: bool = False) -> Tensor:
        """``target`` with the call's queries written or added; the packed tensor itself where it is the whole."""
        real = packed if self.q_slots is None else packed.index_select(0, self.q_slots)
        if self.q_rows is None:
            return real
        assert target is not None
        real = real.to(target.dtype)
        return target.index_add_(0, self.q_rows, real) if add else target.index_copy_(0, self.q_rows, real)

    def merge_queries(self, output: Tensor, lse: Tensor, packed: Tensor, packed_lse: Tensor) -> None:
        """The call's queries merged into ``output`` and ``lse``, which hold what they saw of other keys."""
        if self.q_slots is not None:
            packed, packed_lse = packed.index_select(0, self.q_slots), packed_lse.index_select(0, self.q_slots)
        assert self.q_rows is not None
        seen, seen_lse = output.index_select(0, self.q_rows), lse.index_select(0, self.q_rows)
        merge_into(seen, seen_lse, packed, packed_lse)
        output.index_copy_(0, self.q_rows, seen)
        lse.index_copy_(0, self.q_rows, seen_lse)

    def put_keys(self, target: Tensor | None, packed: Tensor, *, shared: bool) -> Tensor:
        """Likewise for keys, which add up where a key is in several sequences."""
        if self.k_rows is None:
            return packed
        assert target is not None
        if shared:
            return target.index_add_(0, self.k_rows, packed.to(target.dtype))
        return target.index_copy_(0, self.k_rows, packed)


def parts(
    calls: list[Call],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_rows: Tensor | None,
    q_slots: Tensor | None,
    k_rows: Tensor | None,
    settings: tuple[float, float, float, bool],
) -> Iterator[Part]:
    """The calls of :class:`Sequences`, with ``scale, softcap, dropout, deterministic`` of every one."""
    scale, softcap, dropout, deterministic = settings
    at = at_query = at_key = 0
    for one in calls:
        call = KernelCall(scale, one.window_size, softcap, dropout, deterministic)
        if cu_seqlens_q is None or cu_seqlens_k is None or q_rows is None or q_slots is None or k_rows is None:
            yield Part(call)
            continue
        offsets = slice(at, at + one.sequences + 1)
        queries, keys = slice(at_query, at_query + one.queries), slice(at_key, at_key + one.keys)
        yield Part(
            call._replace(
                cu_seqlens_q=cu_seqlens_q[offsets],
                cu_seqlens_k=cu_seqlens_k[offsets],
                max_seqlen_q=one.max_seqlen_q,
                max_seqlen_k=one.max_seqlen_k,
            ),
            one.slots,
            None if one.all_queries else q_rows[queries],
            None if one.slots == one.queries else q_slots[queries],
            None if one.all_keys else k_rows[keys],
            one.part > 0,
        )
        at, at_query, at_key = offsets.stop, queries.stop, keys.stop


def tokens_of(x: Tensor, *, fixed: bool) -> Tensor:
    """``[B, H, S, ...]`` as tokens."""
    tokens = x.transpose(1, 2)
    return tokens if fixed else tokens.reshape(-1, *tokens.shape[2:])


def whole(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Tokens as a tensor of ``shape`` ``[B, H, S, ...]``; in memory they stay token by token."""
    b, h, s, *inner = shape
    return tokens.reshape(b, s, h, *inner).transpose(1, 2)
