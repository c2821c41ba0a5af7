"""Where tokens stand: the one answer of several layouts, and places in documents."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn._errors import LayoutError


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


def places_in_documents(q: Tensor, k: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """The distances of queries to the first tokens of their documents, ``Int[B|1, Q]``.

    Args:
        q: ``Int[B|1, Q]``, the documents of the queries.
        k: ``Int[B|1, K]``, those of the keys.
        at: the positions of both, in the row.
    """
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
    return torch.empty_like(place).scatter_(1, order, ordered - first)[:, : q.shape[1]]
