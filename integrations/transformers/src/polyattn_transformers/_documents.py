"""Documents packed into one row: where they come from, and whether two descriptions of them agree.

Explicit descriptions (a packed mask, segment ids, cumulative lengths) are taken at their word. Position ids are
evidence only: they are read as documents where they restart, after a check that nothing else explains them.
"""

from __future__ import annotations

import torch
from polyattn import LayoutError
from torch import Tensor


def from_positions(position_ids: Tensor, live: Tensor | None, batch: int) -> Tensor | None:
    """The documents that position ids describe.

    Between two live tokens of a row, positions may go on by 1 or by the distance of the tokens (a hole in the
    padding mask); where they do not increase, a new document starts. Padding is skipped.

    Args:
        position_ids: ``Int[B|1, Q]``.
        live: ``Bool[B|1, Q]``, the queries that are no padding; ``None``: all.
        batch: B.

    Returns:
        ``Int[B, Q]`` with one number per document, or ``None`` when every row is one document. While tracing, values
        are not read, and every 0 starts a document.

    Raises:
        LayoutError: positions jump ahead, or documents start at different positions.
    """
    positions = position_ids.expand(batch, -1)
    if torch.compiler.is_compiling() or positions.is_meta:
        return (positions == 0).cumsum(1)
    host = positions.cpu()
    if bool((host.diff(dim=1) == 1).all()):
        return None
    alive = torch.ones_like(host, dtype=torch.bool) if live is None else live.cpu().expand(batch, -1)
    starts = torch.zeros_like(host)
    for row in range(batch):
        at = alive[row].nonzero()[:, 0]
        restart = _restarts(host[row, at], at, row)
        starts[row, at[1:][restart]] = 1
    return starts.cumsum(1).to(positions.device) if bool(starts.any()) else None


def _restarts(positions: Tensor, at: Tensor, row: int) -> Tensor:
    """Which live tokens after the first one start a document, ``Bool[N - 1]``."""
    step = positions.diff()
    restart = step <= 0
    jump = ~restart & (step != 1) & (step != at.diff())
    if bool(jump.any()):
        i = int(jump.nonzero()[0, 0])
        raise LayoutError(
            f"position_ids must go on by 1 inside a document and restart with each document, got {int(positions[i])} "
            f"followed by {int(positions[i + 1])} in row {row}, column {int(at[i + 1])}; "
            "say where documents lie with segment_ids= or polyattn_transformers.packed(...)"
        )
    first = positions[1:][restart].unique().tolist()
    if len(first) > 1 or (first and int(positions[0]) < first[0]):
        raise LayoutError(
            f"position_ids must restart at one number with each document, got restarts at {first} in row {row}, which "
            f"begins at {int(positions[0])}; say where documents lie with segment_ids= or "
            "polyattn_transformers.packed(...)"
        )
    return restart


def from_cu_seqlens(name: str, cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Documents ``Int[B, L]`` from their offsets in the batch written out as one row of ``B * L`` tokens.

    Raises:
        LayoutError: the offsets are no offsets of that many tokens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise LayoutError(f"{name} must be Int[N + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if not torch.compiler.is_compiling() and not cu_seqlens.is_meta:
        offsets = cu_seqlens.tolist()
        if offsets[:1] != [0] or offsets != sorted(offsets) or offsets[-1] != batch * length:
            raise LayoutError(
                f"{name} must rise from 0 to the number of tokens, {batch * length} ({batch} rows of {length}), "
                f"got {offsets}"
            )
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).reshape(batch, length)


def check_agree(names: tuple[str, str], one: Tensor, other: Tensor, live: Tensor | None) -> None:
    """Refuse two descriptions that draw a border between different live tokens; nothing is checked while tracing.

    Args:
        names: how the two are called.
        one: ``Int[B|1, Q]``.
        other: ``Int[B|1, Q]``.
        live: ``Bool[B|1, Q]`` or ``None``.

    Raises:
        LayoutError: they differ.
    """
    if torch.compiler.is_compiling() or one.is_meta:
        return
    rows = max(one.shape[0], other.shape[0])
    left, right = (x.cpu().expand(rows, -1) for x in (one, other))
    alive = torch.ones_like(left, dtype=torch.bool) if live is None else live.cpu().expand(rows, -1)
    for row in range(rows):
        at = alive[row].nonzero()[:, 0]
        borders = [(x[row, at].diff() != 0) for x in (left, right)]
        if not torch.equal(*borders):
            column = int(at[1:][borders[0] != borders[1]][0])
            raise LayoutError(
                f"{names[0]} and {names[1]} must describe the same documents, got a border before column {column} of "
                f"row {row} in one of them only; give one of the two"
            )


def check_whole(name: str, documents: Tensor, live: Tensor | None) -> None:
    """Refuse a padding mask with a hole inside a document; nothing is checked while tracing.

    Raises:
        LayoutError: a padded token lies between two live tokens of one document.
    """
    if live is None or torch.compiler.is_compiling() or documents.is_meta:
        return
    rows = max(documents.shape[0], live.shape[0])
    ids, alive = documents.cpu().expand(rows, -1), live.cpu().expand(rows, -1)
    for row in range(rows):
        at = alive[row].nonzero()[:, 0]
        hole = (ids[row, at].diff() == 0) & (at.diff() > 1)
        if bool(hole.any()):
            column = int(at[:-1][hole][0]) + 1
            raise LayoutError(
                f"{name} and attention_mask must agree, got a masked token inside a document in row {row}, "
                f"column {column}; padding belongs before or after a document"
            )
