"""Attention over a cache whose pages the caller manages: the kernel finds them by its block table."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn import (
    AttentionInputError,
    AttentionRequest,
    AttentionResult,
    MaskLayout,
    Reason,
    UnsupportedAttentionError,
)
from polyattn.kernels import finished
from polyattn.messages import shown
from polyattn_fa2._backend import FlashBackend, FlashOptions
from polyattn_fa2._cached import CachedKeys, decode
from polyattn_fa2.providers.base import WIDTH_STEP

#: What the kernel wants the slots of a page to be a multiple of.
PAGE_STEP = 256


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    options: FlashOptions | None = None,
) -> AttentionResult:
    """Attention of the newest tokens over paged keys, without a copy of them. Inference only.

    Query i of Q stands at position ``lengths - Q + i`` of its row and sees the keys up to that, as by
    :meth:`MaskLayout.cached`. The key of position ``p`` is in slot ``p % page`` of page ``block_table[b, p // page]``.

    Args:
        q: ``[B, Hq, Q, D]``, FP16 or BF16, rotated already.
        k_pages: ``[pages, page, Hkv, D]``, as the kernel reads it; the new tokens are written already.
        v_pages: likewise.
        block_table: int32 ``[B, N]``; its values are not read here, and must be pages that exist.
        lengths: ``Int[B]``, tokens of each row, the queries included.
        window: of how many positions a query sees the keys, its own included.
        scale, softcap, sinks, return_lse: as for :func:`polyattn.attention`.
        options: of the backend ``fa``.

    Raises:
        AttentionInputError: a shape, dtype or device does not fit.
        UnsupportedAttentionError: the kernel cannot do it: no key lengths, pages of another size, widths that would
            have to be padded, gradients, or what the backend refuses anyway.
    """
    _check(q, k_pages, v_pages, block_table, lengths)
    backend = FlashBackend() if options is None else FlashBackend().configure(options)
    page, kv_heads = k_pages.shape[1:3]
    layout = MaskLayout.cached(lengths, q.shape[2], block_table.shape[1] * page, window=window, finite=True)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_pages, v_pages))
    request = AttentionRequest(
        *(q.shape[0], q.shape[1], kv_heads, q.shape[3], v_pages.shape[3], q.dtype, q.device),
        scale=scale,
        softcap=softcap,
        has_sinks=sinks is not None,
        needs_lse=return_lse,
    )
    reasons = (*backend.unsupported(layout, request), *_paging_reasons(q, k_pages, v_pages, wants_grad=wants_grad))
    if reasons:
        raise UnsupportedAttentionError(backend.name, reasons)
    settings = backend.plan(layout, request).settings
    cached = CachedKeys.of(layout, request)
    if cached is None:  # no row, no query or no page
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        return finished(torch.zeros_like(q), lse, request, sinks=sinks)
    output, lse = decode(q, k_pages.transpose(1, 2), v_pages.transpose(1, 2), cached, settings, block_table)
    return finished(output, lse, request, rows=cached.rows_without_keys(layout), sinks=sinks)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Shapes and dtypes; nothing is read.

    Raises:
        AttentionInputError: every fault in one message.
    """
    given = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table, "lengths": lengths}
    forms = {"q": 4, "k_pages": 4, "v_pages": 4, "block_table": 2, "lengths": 1}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() != forms[name]:
            got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x)
            raise AttentionInputError(f"{name} must be a tensor of {forms[name]} dimensions, got {got}")
    faults = []
    if v_pages.shape[:3] != k_pages.shape[:3] or k_pages.shape[3] != q.shape[3]:
        got = f"k_pages {list(k_pages.shape)} and v_pages {list(v_pages.shape)} beside q {list(q.shape)}"
        faults.append(f"k_pages must be [pages, page, Hkv, D] with the width of q, and v_pages like it, got {got}")
    if block_table.dtype is not torch.int32 or len(block_table) != len(q):
        got = f"{block_table.dtype} {list(block_table.shape)}"
        faults.append(f"block_table must be int32 [B, N] with B = {len(q)}, got {got}; block_table.int() casts")
    if len(lengths) != len(q):
        faults.append(f"lengths must be Int[B] with B = {len(q)}, got {list(lengths.shape)}")
    if len({x.dtype for x in (q, k_pages, v_pages)}) > 1:
        faults.append(f"q, k_pages and v_pages must share one dtype, got {q.dtype}, {k_pages.dtype}, {v_pages.dtype}")
    if len({x.device for x in given.values()}) > 1:
        where = ", ".join(f"{name} {x.device}" for name, x in given.items())
        faults.append(f"all tensors must be on one device, got {where}")
    if faults:
        raise AttentionInputError("; ".join(faults))


def _paging_reasons(q: Tensor, k_pages: Tensor, v_pages: Tensor, *, wants_grad: bool) -> tuple[Reason, ...]:
    found = []
    page, width, v_width = k_pages.shape[1], q.shape[3], v_pages.shape[3]
    if page % PAGE_STEP or page == 0:
        hint = "make larger pages, or gather them and use MaskLayout.cached"
        found.append(
            Reason("page_size", "kv_lengths", f"pages of {page} slots", f"a multiple of {PAGE_STEP} slots", hint)
        )
    if width % WIDTH_STEP or width != v_width:
        need = f"D = Dv, a multiple of {WIDTH_STEP}: padding would copy the cache"
        hint = "store keys and values padded, or gather them and use MaskLayout.cached"
        found.append(Reason("page_width", "unequal_width", f"D={width}, Dv={v_width}", need, hint))
    if wants_grad:
        hint = "call it under torch.no_grad(), or gather the pages"
        found.append(Reason("paged_grad", "grad", "gradients", "inference: the kernel has no backward", hint))
    return tuple(found)
