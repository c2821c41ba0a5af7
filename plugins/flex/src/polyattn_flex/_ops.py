"""The compiled CPU kernel as one opaque operator.

Inlined into an outer graph it reads wrong addresses where q is a view of a linear layer's output; as a custom op it is
compiled by itself, whatever surrounds it. It is inference only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn_flex._blocks import Blocks
from polyattn_flex._kernels import compiled
from polyattn_flex._mods import rows_that_see, without_hidden

#: A partition that no tile divides keeps torch from its decode kernel, which gives wrong numbers for a row whose
#: scores are very negative in one tile and masked in another.
_NO_DECODE = {"PARTITION_SIZE": 1}


def infer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    mask: tuple[Tensor, ...] | Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    limit: int,
    dynamic: bool,
) -> Tensor:
    """The output ``[B, Hq, Q, Dv]``; arguments as for ``compiled``."""
    of_mask = list(mask) if isinstance(mask, tuple) else [mask]
    output: Tensor = _infer_op(q, k, v, blocks.tensors(), of_mask, bias, scale, softcap, limit, dynamic)
    return output


@torch.library.custom_op("polyattn_flex::infer", mutates_args=())
def _infer_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: list[Tensor],
    mask: list[Tensor],
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    limit: int,
    dynamic: bool,
) -> Tensor:
    kept: tuple[Tensor, ...] | Tensor = mask[0] if len(mask) == 1 else tuple(mask)
    # Sums are the cheapest look at everything. Values that no bias hides need none.
    looked_at = (q, k) if bias is None else (q, k, v)
    finite = math.isfinite(sum(x.sum(dtype=torch.float32).item() for x in looked_at))
    if bias is not None and not finite:
        q, k, v = without_hidden(q, k, v, kept, bias)
    # Whether autograd or autocast is on would make another kernel of the same code.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        output, _ = compiled(
            _ordered(q),
            _ordered(k),
            _ordered(v),
            Blocks(*blocks),
            kept,
            bias if bias is None else bias.detach(),
            scale=scale,
            softcap=softcap,
            lse=False,
            limit=limit,
            dynamic=dynamic,
            kernel_options=_NO_DECODE,
        )
    if not finite:  # the kernel takes a row of NaN for one that sees nothing
        spoilt = k.isnan().any(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
        live = rows_that_see(torch.ones_like(spoilt), kept, bias)
        lost = live & (~q.isfinite().all(-1) | rows_that_see(spoilt, kept, None))
        output = torch.where(lost.unsqueeze(-1), torch.nan, output)
    return _as(q, output)


@_infer_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: list[Tensor],
    mask: list[Tensor],
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    limit: int,
    dynamic: bool,
) -> Tensor:
    return _as(q, q.new_empty((*q.shape[:3], v.shape[3])))


def _ordered(x: Tensor) -> Tensor:
    """``x`` in one of two orders of strides, heads first or sequence first, since each one is another kernel."""
    x = x.detach()
    return x if x.transpose(1, 2).is_contiguous() else x.contiguous()


def _as(q: Tensor, output: Tensor) -> Tensor:
    """``output`` in the order of ``q``, which the kernel gives it anyway."""
    if q.transpose(1, 2).is_contiguous():
        return output.transpose(1, 2).contiguous().transpose(1, 2)
    return output.contiguous()
