"""What the formula of structured masks is made of: chunks, distances that do not wrap, lengths of each query."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_of(position: Tensor, size: int) -> Tensor:
    """The chunk of a position, rounded down."""
    if size > torch.iinfo(position.dtype).max:  # not a number of the dtype; all of one sign is one chunk
        return -(position < 0).to(position.dtype)
    return torch.div(position, size, rounding_mode="floor")


def saturating_distance(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """``|q - k|``, at most the largest number of ``dtype``: positions at both ends of the range do not wrap."""
    limit = torch.iinfo(dtype).max
    high, low = torch.maximum(q, k), torch.minimum(q, k)
    return high - torch.maximum(low, high.clamp(min=-1) - limit)


def per_query(lengths: Tensor | None, q_segments: Tensor | None) -> Tensor | None:
    """Lengths ``[B|1]``, or ``[B|1, N]`` of the segments that ``q_segments`` name, as ``[B|1, Q|1]``."""
    if lengths is None or q_segments is None or lengths.dim() == 1:
        return None if lengths is None else lengths[:, None]
    rows = torch.broadcast_shapes(lengths.shape[:1], q_segments.shape[:1])[0]
    return lengths.expand(rows, -1).gather(1, q_segments.long().expand(rows, -1))
