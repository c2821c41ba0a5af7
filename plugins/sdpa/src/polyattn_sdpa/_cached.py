"""Attention over cached keys: one fused call over the slots that some query sees.

The query heads of a KV head are rows of one head, so that each key is read once. Keys are never copied. On the CPU the
call is cut to the slots in use; on an accelerator, where nothing is read, it takes all of them under a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyattn import AttentionRequest, MaskLayout
from polyattn.kernels import CachedMask, accumulation_dtype
from polyattn_sdpa import _kernels
from polyattn_sdpa._tiles import additive

#: Rows of a call, with more of which tiles without a mask are faster.
FEW_ROWS = 64


def takes(layout: MaskLayout, request: AttentionRequest) -> bool:
    """Whether the layout is one of cached keys that this does: nothing has to be hidden but by the mask."""
    mask = layout.visibility
    if not isinstance(mask, CachedMask) or not mask.finite or layout.active_queries is not None:
        return False
    if request.needs_grad or request.has_bias or request.dropout > 0 or 0 in (request.batch, layout.q_len):
        return False
    few = torch.compiler.is_compiling() or layout.q_len * request.group <= FEW_ROWS
    return few or layout.to_bands() is None


def lengths_for_call(layout: MaskLayout, request: AttentionRequest) -> Tensor | None:
    """The lengths where the call reads them, in a graph on the CPU."""
    inside = torch.compiler.is_compiling() and request.device.type == "cpu"
    return _mask(layout).lengths if inside else None


def _readable(request: AttentionRequest) -> bool:
    return request.device.type == "cpu" and not torch.compiler.is_compiling()


def rows_without_keys(layout: MaskLayout, request: AttentionRequest) -> Tensor | None:
    """``Bool[B|1, 1, Q, 1]``: queries before the first position; ``None`` where there are none."""
    lengths = _mask(layout).lengths
    if _readable(request) and not bool((lengths < layout.q_len).any()):
        return None
    places = torch.arange(-layout.q_len, 0, device=lengths.device)
    return (lengths[:, None] + places < 0)[:, None, :, None]


def masked(layout: MaskLayout, request: AttentionRequest, rows: Tensor | None) -> tuple[Tensor | None, int, int]:
    """The additive mask, and the first slot of the call and the one behind its last."""
    mask, start, stop = _mask(layout), 0, layout.kv_len
    if _readable(request):
        start, stop = span(mask.lengths, layout.q_len, layout.kv_len, reach_of(layout))
        alike = layout.q_len == 1 and int(mask.lengths.min()) == int(mask.lengths.max())
        if alike and not mask.ring and rows is None:
            return None, start, stop
    visible = layout.to_dense(request.device)[..., start:stop]
    return additive(visible if rows is None else visible | rows, request.dtype), start, stop


def reach_of(layout: MaskLayout) -> int:
    """How many slots before its own a query may see; -1: all."""
    mask = _mask(layout)
    return mask.window - 1 if isinstance(mask.window, int) and not mask.ring else -1


def span(lengths: Tensor, q_len: int, kv_len: int, reach: int) -> tuple[int, int]:
    """The slots that some query sees, of lengths on the CPU."""
    least, most = int(lengths.min()), int(lengths.max())
    return (0 if reach < 0 else max(0, least - q_len - reach)), max(1, min(most, kv_len))


def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, start: int, stop: int, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, Hq, Q, Dv]`` and LSE ``[B, Hq, Q]``, or ``None`` where it is not wanted.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        mask: additive ``[B|1, 1, Q, stop - start]``, or ``None``.
        start: the first slot.
        stop: the one behind the last.
        scale: of the scores.
        want_lse: whether the LSE is wanted.
    """
    batch, heads, count, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    k, v = k[:, :, start:stop], v[:, :, start:stop]
    rows = q.reshape(batch, kv_heads, group * count, width)
    if mask is not None and group > 1:
        mask = mask.expand(-1, -1, group, -1) if count == 1 else mask.repeat(1, 1, group, 1)
    if want_lse:
        output, lse = _kernels.forward(rows, k, v, mask, False, scale)
        return output.reshape(batch, heads, count, v.shape[3]), lse.reshape(batch, heads, count)
    if width != v.shape[3] and q.dtype in (torch.float32, torch.float64):
        # No fused kernel takes unequal widths, and the op would write out all keys times the root of the scale.
        scores = (rows * scale) @ k.mT
        output = torch.softmax(scores if mask is None else scores + mask, -1) @ v
    else:
        output = scaled_dot_product_attention(rows, k, v, mask, scale=scale)
    return output.reshape(batch, heads, count, v.shape[3]), None


def _decode_unread(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lengths: Tensor, reach: int, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor]:
    start, stop = span(lengths, q.shape[2], k.shape[2], reach)
    output, lse = decode(q, k, v, mask[..., start:stop], start, stop, scale, want_lse)
    if lse is None:  # an operator returns tensors
        lse = q.new_empty(0, dtype=accumulation_dtype(q.dtype))
    return output.contiguous(), lse.contiguous()


#: For the graphs of CPUs: what the lengths say is known when it runs.
decode_op = torch.library.custom_op("polyattn_sdpa::decode", _decode_unread, mutates_args=())


@decode_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lengths: Tensor, reach: int, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3] if want_lse else (0,), dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _mask(layout: MaskLayout) -> CachedMask:
    assert isinstance(layout.visibility, CachedMask)
    return layout.visibility
