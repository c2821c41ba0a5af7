"""What a call gives beside its tokens, refused where it has another type or shape than every reader takes it for.

Some models flatten masks and positions, so that a wrong shape becomes another mask without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyattn import LayoutError
from polyattn_transformers._no_tensor import NoTensor

_WHOLE = (torch.int32, torch.int64)


def check_mask(mask: object) -> None:
    """Refuse an attention mask that is neither ``[B, K]`` nor ``[B, 1, Q, K]`` nor made ahead.

    Masks are made ahead by generation, by the model around this one, or by :func:`packed`.

    Raises:
        LayoutError: another type or rank.
    """
    if mask is None or isinstance(mask, (Mapping, NoTensor)):
        return
    wanted = "attention_mask must be [B, K] with one entry per token, or [B, 1, Q, K]"
    if not isinstance(mask, Tensor):
        raise LayoutError(f"{wanted}, got {type(mask).__name__}; make a tensor with torch.tensor(...)")
    if mask.dim() not in (2, 4):
        cure = "add the batch dimension" if mask.dim() < 2 else "call .reshape(B, K) on one entry per token"
        raise LayoutError(f"{wanted}, got shape {list(mask.shape)}; {cure}")


def check_positions(position_ids: object, batch: int, length: int, *, axes: bool) -> None:
    """Refuse position ids that are not one integer for each token of the call.

    Args:
        position_ids: what the caller gave, or ``None``.
        batch: rows of the call.
        length: tokens of a row.
        axes: whether the model takes positions of several axes, ``[A, B, K]``.

    Raises:
        LayoutError: another type or dtype, or another number of rows or tokens.
    """
    if position_ids is None:
        return
    if not isinstance(position_ids, Tensor):
        raise LayoutError(
            f"position_ids must be an integer tensor [B, K], got {type(position_ids).__name__}; make one with "
            "torch.tensor(...)"
        )
    if position_ids.dtype.is_floating_point or position_ids.dtype is torch.bool:
        raise LayoutError(
            f"position_ids must be integers, got {position_ids.dtype}, which cannot tell positions apart; "
            "call .long() where they are made"
        )
    if position_ids.dtype not in _WHOLE:
        raise LayoutError(
            f"position_ids must be of dtype int32 or int64, got {position_ids.dtype}, which not every model takes; "
            "call .long() where they are made"
        )
    shape = list(position_ids.shape)
    rows_fit = len(shape) >= 2 and (shape[-2] in (1, batch) or len(shape) == 3)
    if not rows_fit or shape[-1] != length or len(shape) > (3 if axes else 2):
        raise LayoutError(
            f"position_ids must be [B, K] with one position per token of {batch} rows of {length}, got {shape}"
        )


def as_numbers(name: str, documents: Tensor) -> Tensor:
    """Numbers of documents as integers of a width that layouts take.

    Raises:
        LayoutError: the dtype has no integers; the message calls the argument ``name``.
    """
    if documents.dtype in _WHOLE:
        return documents
    if documents.dtype.is_floating_point or documents.dtype.is_complex or documents.dtype is torch.bool:
        raise LayoutError(
            f"{name} must be integers, the number of a document for each token, got {documents.dtype}; "
            "call .long() where they are made"
        )
    return documents.long()
