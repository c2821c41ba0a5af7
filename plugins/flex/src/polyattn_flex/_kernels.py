"""FlexAttention itself, in two forms: compiled once for each set of sizes, or evaluated densely.

Importing this module imports FlexAttention, and calling :func:`compiled` starts the compiler; nothing does so before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from polyattn import Reason, UnsupportedAttentionError
from polyattn.kernels import put_back, with_width, without
from polyattn_flex._blocks import TILE, Blocks
from polyattn_flex._mods import Mask, mask_mod, row_level, row_peak, score_mod, without_hidden
from polyattn_flex._reasons import on_cpu

#: Heads of 8 and 16 channels are wrong in torch's kernel on a CPU without AVX-512, where 8 keys are left over from
#: pieces of 16 (torch 2.14, all numbers of keys below 150); wider ones are right.
NARROW = 16

Result = tuple[Tensor, Tensor | None]


def compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    mask: Mask,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    lse: bool,
    limit: int,
    dynamic: bool,
    kernel_options: Mapping[str, Any],
) -> Result:
    """Attention by the compiled kernel; inlined where an outer graph is being traced.

    Args:
        q: ``[B, Hq, Q, D]``, not empty.
        k: ``[B, Hkv, K, D]``, not empty.
        v: ``[B, Hkv, K, Dv]``.
        blocks: the tiles to visit.
        mask: evaluated in partial tiles; no function where there is a bias.
        bias: ``[B|1, H|1, Q|1, K|1]``.
        scale: of the scores.
        softcap: of the scaled scores.
        lse: whether the LSE is wanted; the CPU kernel has none.
        limit: how many kernels the process may hold.
        dynamic: whether a kernel serves all lengths.
        kernel_options: as torch names them.

    Returns:
        Output ``[B, Hq, Q, Dv]``, and natural-log LSE ``[B, Hq, Q]`` or ``None``.

    Raises:
        UnsupportedAttentionError: this call needs one kernel more than ``limit``.
        RuntimeError: ``torch.compile`` is turned off.
    """
    arguments = (q, k, v, blocks, mask, bias, scale, softcap, lse, dict(kernel_options))
    if torch.compiler.is_compiling():
        return _flex(*arguments)
    # Dynamo's own limit is 8, and it counts all sizes of the process.
    most = {"recompile_limit": limit, "accumulated_recompile_limit": limit}
    try:
        with torch._dynamo.config.patch(most):  # noqa: SLF001 - torch documents it under this name
            return _compiled_flex(dynamic)(*arguments)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # noqa: SLF001 - likewise
        raise UnsupportedAttentionError(
            "flex_attention",
            (
                Reason(
                    code="compile_limit",
                    feature="options",
                    got=f"sizes that need another kernel, with compile_limit={limit} reached",
                    need=f"at most {limit} sets of sizes, dtypes, strides and constants in one process",
                    hint="set dynamic: true in backend_options, which compiles for all lengths at once, pad lengths "
                    "to a few sizes, or raise compile_limit",
                ),
            ),
            (),
        ) from error


@functools.cache
def _compiled_flex(dynamic: bool) -> Callable[..., Result]:
    return torch.compile(_flex, dynamic=dynamic, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    mask: Mask,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    lse: bool,
    kernel_options: dict[str, Any],
) -> Result:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "backend 'flex_attention': torch.compile is turned off (TORCHDYNAMO_DISABLE, the stance force_eager, or a "
            "TorchDispatchMode around the call), and the kernel never runs uncompiled unasked; turn it on, or set the "
            "backend option compiled=False"
        )
    block_mask = made(blocks, mask, q.shape[2], k.shape[2])
    level = None
    if on_cpu(q.device):
        if q.shape[-1] <= NARROW:
            q, k = with_width(q, 2 * NARROW), with_width(k, 2 * NARROW)
    elif bias is not None:  # the CPU kernel counts in powers of e and has no backward
        assert not callable(mask)
        level = row_level(row_peak(mask, bias, k.shape[2]))
        q, k, v = without_hidden(q, k, v, mask, bias)
    attend: Any = flex_attention  # no overload takes a return_aux that may be None
    output = attend(
        q,
        k,
        v,
        score_mod=score_mod(softcap, bias, level),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True) if lse else None,
    )
    if not lse:
        return output, None
    return output[0], output[1].lse if level is None else output[1].lse + level


def made(blocks: Blocks, mask: Mask, q_len: int, kv_len: int, tile: int = TILE) -> BlockMask:
    """The block mask that torch takes."""
    return BlockMask(
        seq_lengths=(q_len, kv_len),
        kv_num_blocks=blocks.partial_count,
        kv_indices=blocks.partial_index,
        full_kv_num_blocks=blocks.full_count,
        full_kv_indices=blocks.full_index,
        q_num_blocks=blocks.key_partial_count,
        q_indices=blocks.key_partial_index,
        full_q_num_blocks=blocks.key_full_count,
        full_q_indices=blocks.key_full_index,
        BLOCK_SIZE=(tile, tile),
        mask_mod=mask_mod(mask),
    )


# Dynamo cannot trace the transforms inside; what comes after Dynamo can, autograd included.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def evaluated(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What ``flex_attention`` computes outside ``torch.compile``: the same functions, dense, differentiable.

    Called as the function that torch itself calls there, without its detour through Dynamo, which costs more than the
    attention. Arguments and results as for :func:`compiled`; ``mask`` is ``Bool[B|1, H|1, Q, K]``.
    """
    level = rows = None
    if bias is not None:
        peak = row_peak(mask, bias, k.shape[2])
        level, rows = row_level(peak), peak.isneginf().unsqueeze(-1)
        q, k, v = without_hidden(q, k, v, mask, bias)
        bias = without(bias, rows)  # the derivative of an LSE of -inf is NaN
    change = score_mod(softcap, bias, level) or _unchanged
    output, lse, *_ = math_attention(q, k, v, change, (mask_mod(mask),), scale, {})
    lse = lse * math.log(2)  # torch's functions below the public one count in powers of two
    if level is None:
        return output, lse
    return put_back(output, lse + level, rows)


def _unchanged(score: Tensor, *_: Tensor) -> Tensor:
    return score
