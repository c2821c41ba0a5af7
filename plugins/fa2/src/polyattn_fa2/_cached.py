"""Cached keys by the kernel's own key lengths of rows: one call on the cache as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn import AttentionRequest, MaskLayout
from polyattn.kernels import CachedMask, op_or_function, with_width
from polyattn_fa2 import providers
from polyattn_fa2._ops import Settings, padded_width
from polyattn_fa2._pieces import WindowSize
from polyattn_fa2.providers.base import KernelCall


@dataclasses.dataclass(frozen=True, eq=False)
class CachedKeys:
    """The call of a layout.

    Attributes:
        lengths: int32 ``[B]``, the slots of each row that hold keys, in order of their positions from the last one.
        window_size: how many keys before and after its position a query sees; -1: all.
    """

    lengths: Tensor
    window_size: WindowSize

    @classmethod
    def of(cls, layout: MaskLayout, request: AttentionRequest) -> CachedKeys | None:
        """The call; ``None`` where the kernel cannot say it: gradients, or a ring whose order counts.

        The order of slots in a ring counts but for one query that sees all of them.
        """
        mask = layout.visibility
        if not isinstance(mask, CachedMask) or layout.active_queries is not None or request.needs_grad:
            return None
        if 0 in (request.batch, layout.q_len, layout.kv_len) or request.dropout > 0:
            return None
        left = mask.window - 1 if isinstance(mask.window, int) and mask.window < layout.kv_len else -1
        lengths = mask.lengths.expand(request.batch)
        if mask.ring:
            if layout.q_len > 1 or mask.window != layout.kv_len:
                return None
            lengths = lengths.clamp(max=layout.kv_len)
        return cls(lengths.to(torch.int32).contiguous(), (left, 0))

    def rows_without_keys(self, layout: MaskLayout) -> Tensor:
        """``Bool[B, 1, Q, 1]``: queries before the first position."""
        places = torch.arange(-layout.q_len, 0, device=self.lengths.device)
        return (self.lengths[:, None] + places < 0)[:, None, :, None]


def decode(
    q: Tensor, k: Tensor, v: Tensor, cached: CachedKeys, settings: Settings, block_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, Q, Dv]`` and FP32 LSE ``[B, Hq, Q]``.

    Shapes are those of ``flash``; with a block table, k and v are ``[pages, Hkv, page, D]``.
    """
    run: Callable[..., tuple[Tensor, Tensor]] = op_or_function(_decode_op, _decode, q)
    how = (settings.provider, settings.scale, settings.softcap)
    return run(q, k, v, cached.lengths, block_table, list(cached.window_size), *how)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    window_size: list[int],
    provider: str,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    width, v_width = padded_width(q.shape[3], v.shape[3]), v.shape[3]
    tq, tk, tv = (with_width(x, width).transpose(1, 2) for x in (q, k, v))
    call = KernelCall(scale, (window_size[0], window_size[1]), softcap, 0.0, False)
    output, lse = providers.get(provider).decode(tq, tk, tv, lengths, block_table, call)
    lse = torch.where(lse == torch.inf, torch.nan, lse)  # the kernels say +inf where a sum is NaN
    return output[..., :v_width].transpose(1, 2).contiguous(), lse.contiguous()


_decode_op = torch.library.custom_op("polyattn_fa2::decode", _decode, mutates_args=())


@_decode_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    window_size: list[int],
    provider: str,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
