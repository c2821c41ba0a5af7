"""The positions that rotary embeddings turn the tokens of a layout by."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.cached import CachedMask
from polyattn._layout.indexing import positions
from polyattn._layout.structured import StructuredMask
from polyattn._layout.union import UnionMask
from polyattn.documents import ranks


def token_positions(visibility: object, given: tuple[Tensor | None, Tensor | None], q_len: int, kv_len: int) -> Tensor:
    """``Int[B|1, Q]``; see :meth:`MaskLayout.token_positions`.

    Args:
        visibility: of the layout.
        given: the positions of queries and keys that a dense mask or ``mask_mod`` was given.
        q_len: number of queries.
        kv_len: number of keys.
    """
    if isinstance(visibility, CachedMask):
        visibility = visibility.in_positions(q_len, kv_len)
    if isinstance(visibility, StructuredMask):
        return _of_structure(visibility, q_len, kv_len)
    if not isinstance(visibility, UnionMask):
        return positions(given, q_len, kv_len, None)[0]
    return agreed([_of_structure(part.mask, q_len, kv_len) for part in visibility.parts])


def agreed(found: list[Tensor]) -> Tensor:
    """The one answer of the parts of a union.

    Raises:
        LayoutError: they disagree, or their values cannot be compared while tracing.
    """
    first, *others = found
    for other in others:
        if torch.compiler.is_compiling():
            raise LayoutError(
                "token_positions() of a union compares those of its parts, which is not possible while tracing; "
                "call it outside torch.compile"
            )
        if not bool((first == other).all()):
            raise LayoutError(
                "token_positions() of a union must be the same in all its parts, got parts that place a token "
                "differently; give positions to the rotary embedding yourself"
            )
    return first


def _of_structure(mask: StructuredMask, q_len: int, kv_len: int) -> Tensor:
    q, k = mask.q_segments, mask.kv_segments
    if mask.kv_segment_ends is None and q is not None and k is not None:
        if mask.q_positions is None and q is k:
            return ranks(q)
        return _places(mask, q, k, q_len, kv_len)
    q_positions, _ = positions((mask.q_positions, mask.kv_positions), q_len, kv_len, _device(mask))
    if mask.q_positions is not None or mask.kv_valid is None:
        return q_positions
    first = mask.kv_valid.to(torch.int32).argmax(1, keepdim=True)
    return (q_positions - first.to(q_positions.dtype)).clamp(min=0)


def _places(mask: StructuredMask, q: Tensor, k: Tensor, q_len: int, kv_len: int) -> Tensor:
    """The distances of the queries to the first token of their documents, where positions are those of the row."""
    at = positions((mask.q_positions, mask.kv_positions), q_len, kv_len, q.device)
    rows = max(len(q), len(k), *map(len, at))
    document = torch.cat([q.expand(rows, -1), k.expand(rows, -1).to(q.dtype)], 1)
    place = torch.cat([x.expand(rows, -1) for x in at], 1)
    by_place = place.argsort(dim=1, stable=True)
    order = by_place.gather(1, document.gather(1, by_place).argsort(dim=1, stable=True))
    document, ordered = document.gather(1, order), place.gather(1, order)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(order.shape[1], device=order.device).expand_as(order)
    first = ordered.gather(1, torch.where(starts, index, 0).cummax(1).values)
    return torch.empty_like(place).scatter_(1, order, ordered - first)[:, :q_len]


def _device(mask: StructuredMask) -> torch.device | None:
    return next((value.device for value in mask.tensors().values()), None)
