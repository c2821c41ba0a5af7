"""Elements and positions by index, where a dimension of size 1 broadcasts and positions may be left out."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn._layout.checks import Index


def positions(
    given: tuple[Tensor | None, Tensor | None], q_len: int, kv_len: int, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys, ``Int[B|1, .]``: the ``given`` ones, others made on ``device``.

    Where none are given, the queries are the last ``q_len`` of ``kv_len`` positions (int32).
    """
    q, k = given
    keys = torch.arange(kv_len, dtype=torch.int32 if q is None else q.dtype, device=device)[None] if k is None else k
    if q is None:
        q = torch.arange(q_len, dtype=torch.int32, device=device)[None] + (kv_len - q_len)
    return q, keys


def pick(value: Tensor, *index: Tensor) -> Tensor:
    """``value[index]``, where a dimension of size 1 broadcasts: what a ``mask_mod`` does to a captured tensor."""
    return value[tuple(i * 0 if size == 1 else i for size, i in zip(value.shape, index, strict=True))]


def ragged(count: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Each index ``i`` of ``count`` repeated ``count[i]`` times, and the place of each repetition: ``Int64[total]``.

    ``total`` is the sum of ``count``, for who knows it without reading the tensor.
    """
    index = torch.repeat_interleave(count, output_size=total)
    return index, torch.arange(index.numel(), device=count.device) - (count.cumsum(0) - count)[index]


def take(value: Tensor, dim: int, index: Index) -> Tensor:
    """The part of ``value`` at ``index`` along ``dim``; a slice gives a view."""
    if isinstance(index, slice):
        return value[(slice(None),) * dim + (index,)]
    return value.index_select(dim, index.to(value.device))
