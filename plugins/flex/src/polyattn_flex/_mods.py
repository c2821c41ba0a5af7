"""The functions that FlexAttention takes: which key a query sees, and what becomes of a score."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn.kernels import of_kv_heads, shut_out

#: A row whose visible biases all lie below this is counted from the highest of them; FP32 still tells 1e-4 there.
_DEEP = -1e3

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: First key and key after the last of each run, ``Int32[B|1, Q]`` each; or ``Bool[B|1, H|1, Q, K]``; or a function.
Mask = tuple[Tensor, ...] | Tensor | MaskMod


def mask_mod(mask: Mask) -> MaskMod:
    """A mask as FlexAttention takes it."""
    if isinstance(mask, tuple):
        runs = list(zip(mask[::2], mask[1::2], strict=True))

        def in_range(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            inside = [(kv_idx >= _at(start, b, q_idx)) & (kv_idx < _at(stop, b, q_idx)) for start, stop in runs]
            return functools.reduce(operator.or_, inside)

        return in_range
    if isinstance(mask, Tensor):
        dense = mask

        def in_dense(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return _at(dense, b, h, q_idx, kv_idx)

        return in_dense
    function = mask

    def in_function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function(b, h, q_idx, kv_idx)

    return in_function


def score_mod(softcap: float | None, bias: Tensor | None, level: Tensor | None = None) -> ScoreMod | None:
    """Softcap, then bias ``[B|1, H|1, Q|1, K|1]``, less the level ``[B|1, H|1, Q]``; ``None``: scores stay."""
    if softcap is None and bias is None and level is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + _at(bias, b, h, q_idx, kv_idx)
        return score if level is None else score - _at(level, b, h, q_idx)

    return changed


def rows_that_see(keys: Tensor, mask: tuple[Tensor, ...] | Tensor, bias: Tensor | None) -> Tensor:
    """Which queries see one of ``keys`` (``Bool[B, H, K]``) that no bias blocks, ``Bool[B, H, Q]``."""
    visible = _dense(mask, keys.shape[2])
    if bias is not None:
        visible = visible & ~bias.isneginf()
    return torch.matmul(visible.float(), keys.float().unsqueeze(-1)).squeeze(-1) > 0


def without_hidden(
    q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor, ...] | Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with 0 in queries that see nothing and keys that nobody sees, for the mask and a bias of ``-inf``.

    Their NaN would pass through products with a weight of zero.
    """
    seen = _dense(mask, k.shape[2]) & ~bias.isneginf()
    rows, keys = ~seen.any(-1), of_kv_heads(~seen.any(-2), k.shape[1])
    return shut_out(q, k, v, rows.unsqueeze(-1), keys.unsqueeze(-1))


def row_peak(mask: tuple[Tensor, ...] | Tensor, bias: Tensor, kv_len: int) -> Tensor:
    """The highest bias that each query sees, ``[B|1, H|1, Q]``; ``-inf`` where mask and bias block all keys."""
    return torch.where(_dense(mask, kv_len), bias.detach(), -torch.inf).amax(-1)


def _dense(mask: tuple[Tensor, ...] | Tensor, kv_len: int) -> Tensor:
    if isinstance(mask, Tensor):
        return mask
    ends = [x[:, None, :, None] for x in mask]
    keys = torch.arange(kv_len, device=ends[0].device, dtype=ends[0].dtype)
    inside = [(keys >= start) & (keys < stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
    return functools.reduce(operator.or_, inside)


def row_level(peak: Tensor) -> Tensor:
    """What is subtracted from a row's scores, and added to its LSE again, so that its bias does not drown them.

    No weight depends on it. But kernels that work in powers of two take the lowest numbers of a dtype to ``-inf``,
    and a backward that forms weights as ``exp(score - lse)`` finds 1, not 1 / n, where ``log(n)`` is rounded away.
    """
    return torch.where((peak < _DEEP) & ~peak.isneginf(), peak, 0)


def _at(value: Tensor, *index: Tensor) -> Tensor:
    """``value[index]``, where a dimension of size 1 broadcasts."""
    places = [i * 0 if size == 1 else i for size, i in zip(value.shape, index, strict=True)]
    if value.requires_grad or torch.compiler.is_compiling():
        return value[tuple(places)]
    found: Tensor = torch.ops.aten.index(value, places)  # without the function that differentiates it, which is slow
    return found
