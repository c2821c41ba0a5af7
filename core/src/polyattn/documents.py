"""Documents packed into rows, for who builds layouts: where a token stands in its document."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ranks", "together"]


def ranks(documents: Tensor) -> Tensor:
    """How many earlier tokens of its row each token shares its document with, ``Int[B, K]``."""
    order = documents.argsort(dim=1, stable=True)
    ordered = documents.gather(1, order)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(order)
    starts = (index == 0) | (ordered != ordered.roll(1, 1))  # every size is that of the row, which may be symbolic
    rank = index - torch.where(starts, index, 0).cummax(1).values
    return torch.empty_like(rank).scatter_(1, order, rank)


def together(documents: Tensor, live: Tensor | None = None) -> Tensor:
    """Whether the tokens of each document lie together, ``Bool[]``, so that they have the distances of the row.

    Args:
        documents: ``Int[B, K]``.
        live: ``Bool[B, K]``, the tokens that count; ``None``: all.
    """
    resumed = (documents != documents.roll(1, 1)) & (ranks(documents) != 0)
    return ~(resumed if live is None else resumed & live).any()
