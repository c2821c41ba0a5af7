"""The mask function that transformers calls: its own description of a mask becomes a ``MaskLayout``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from polyattn import LayoutError, MaskLayout
from polyattn_transformers._build import Span, layout_of
from polyattn_transformers._documents import check_together, readable
from polyattn_transformers._layout_mask import LayoutMask
from polyattn_transformers._packing import PackedMask, check_size
from polyattn_transformers._pattern import MaskFunction, Pattern, read_pattern
from polyattn_transformers._tree_mask import TreeMask

#: What transformers' factories pass for its own implementations, and what a layout does not need.
_UNUSED = frozenset(
    {"local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip", "dtype", "config", "use_vmap"}
)


def layout_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | PackedMask | LayoutMask | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LayoutMask:
    """The mask function of every polyattn implementation (transformers' ``AttentionMaskInterface``).

    Args:
        batch_size: B.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: absolute index of the first query.
        kv_offset: absolute index of the first key.
        mask_function: who sees whom, over absolute indices.
        attention_mask: padding ``[B, L]`` over absolute indices, True or 1 where a token is; missing tokens are
            padding. Or packed documents, or a mask that this function returned earlier in the same forward.
        device: where the mask is needed.
        **kwargs: what transformers passes for its own implementations.

    Returns:
        The mask, never ``None``: a layout says also what a missing mask leaves open.

    Raises:
        LayoutError: a mask of another rank or size than the call's, or packed documents that do not fit it.
    """
    if unknown := [name for name in kwargs if name not in _UNUSED]:  # no set of keys: Dynamo of torch 2.10
        raise LayoutError(f"unknown arguments of a mask: {', '.join(sorted(unknown))}; they would be ignored")
    if isinstance(attention_mask, LayoutMask):
        return _handed_back(attention_mask, q_length, kv_length)
    span = Span(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    pattern = read_pattern(mask_function)
    if pattern.refusal is not None:  # sizes may be wrong for the same reason: a window of 0 shortens what a cache keeps
        return LayoutMask(MaskLayout.full(q_length, max(kv_length, 0)), batch=batch_size, refusal=pattern.refusal)
    if isinstance(attention_mask, PackedMask):
        return _packed_mask(attention_mask, pattern, span)
    if pattern.causal:
        _check_length(attention_mask, span)
    padding, live = _padding(attention_mask, span)
    layout = layout_of(pattern, span, padding)
    documents = None
    if pattern.documents is not None:
        documents = ("position_ids", span.queries("packed sequence mask", pattern.documents))
    return LayoutMask(layout, batch=batch_size, live=live, documents=documents)


def _handed_back(mask: LayoutMask, q_len: int, kv_len: int) -> LayoutMask:
    if (mask.layout.q_len, mask.layout.kv_len) != (q_len, kv_len):
        raise LayoutError(
            f"a mask that was made ahead must fit the forward, got {mask.layout.q_len} queries and "
            f"{mask.layout.kv_len} keys in the mask, {q_len} and {kv_len} in the forward"
        )
    return mask


def _packed_mask(packed: PackedMask, pattern: Pattern, span: Span) -> LayoutMask:
    check_size(packed, span.batch, span.q_len, span.kv_len)
    packed = packed.to(span.device)
    documents = (packed.name, packed.documents)
    given = pattern.given()
    if isinstance(packed, TreeMask) and not {"causal"} <= given <= {"causal", "window"}:
        more = ", ".join(sorted(given - {"causal", "window"})) or "no causality"
        raise LayoutError(
            f"packed(tree=...) must go into causal attention with or without a window, got a mask with {more}; give "
            "each row a row of its own, with padding"
        )
    if given & {"opaque", "documents", "blocks"}:
        check_together(packed.name, packed.documents, packed.live)
    if given <= {"causal", "window"}:
        layout = packed.layout(causal=pattern.causal).with_window(pattern.window)
    elif given & {"chunk", "window"} and not given & {"documents", "blocks"}:
        places = packed.positions if "chunk" in given else packed.places
        pattern = dataclasses.replace(pattern, documents=packed.documents)
        layout = layout_of(pattern, span, packed.live, places)
    else:
        layout = packed.layout(causal=False) & layout_of(pattern, span, None)
    return LayoutMask(layout, batch=span.batch, live=packed.live, documents=documents)


def _check_length(attention_mask: Tensor | None, span: Span) -> None:
    """Refuse a causal mask of the caller that does not say of every new token whether it is padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or isinstance(span.q_offset, Tensor):
        return
    found, earlier = attention_mask.shape[1], span.q_offset
    without_cache = earlier == 0 and found == span.kv_len
    if found < earlier + span.q_len or (without_cache and found != span.q_len):
        raise LayoutError(
            f"attention_mask must be [B, K] with one entry for each of {earlier} cached and {span.q_len} new tokens, "
            f"got {found} entries"
        )


def _padding(attention_mask: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """The padding of the keys ``Bool[B, K]`` and of the queries ``Bool[B, Q]``; ``None`` where there is none."""
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise LayoutError(
            f"attention_mask must be [B, K] with 1 where a token is, or [B, 1, Q, K], got {got}; "
            "packed documents go into polyattn_transformers.packed(...)"
        )
    if attention_mask.shape[0] not in (1, span.batch):
        raise LayoutError(f"attention_mask must have {span.batch} rows or 1, got {attention_mask.shape[0]}")
    mask = attention_mask.to(device=span.device, dtype=torch.bool)
    if isinstance(span.kv_offset, Tensor):
        return span.keys("attention_mask", mask), None
    missing = span.kv_offset + span.kv_len - mask.shape[1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    keys = span.keys("attention_mask", mask)
    live = None
    if not isinstance(span.q_offset, Tensor) and span.q_offset + span.q_len <= mask.shape[1]:
        live = span.queries("attention_mask", mask)
    # A look at the values costs a wait on a device; without padding it saves the mask.
    look = readable(mask) and (span.syncs or mask.device.type == "cpu")
    return (None if look and bool(keys.all()) else keys), live
