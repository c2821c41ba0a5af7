"""Packed documents as a model input: where they lie is said once, and no mask or cache can switch it off."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout
from polyattn_transformers._no_tensor import NoTensor

Ints = Tensor | Sequence[int] | Sequence[Sequence[int]]


def packed(
    lengths: Ints | None = None,
    *,
    cu_seqlens: Ints | None = None,
    document_ids: Ints | None = None,
    position_ids: Ints | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Model inputs for documents packed into rows, to be used as ``model(input_ids, **packed([3, 2, 4]))``.

    Exactly one of the first four, in the forms that ``MaskLayout.packed`` takes: one row, or one list per batch row.

    Args:
        lengths: of the documents.
        cu_seqlens: their offsets ``0, l1, l1 + l2, ...``.
        document_ids: the document of each token, ``[K]`` or ``[B, K]``.
        position_ids: positions that restart at 0 with each document, ``[K]`` or ``[B, K]``.
        device: where the model's inputs lie; by default where the arguments are.

    Returns:
        ``attention_mask``, a :class:`PackedMask` that keeps the documents apart in every layer of a model that runs on
        polyattn, and ``position_ids`` ``Int[B|1, K]``, which restart with each document.

    Raises:
        LayoutError: the description contradicts itself, or ``device`` is none.
    """
    target = None if device is None else _device(device)
    ways: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "document_ids": document_ids,
        "position_ids": position_ids,
    }
    mask = PackedMask(MaskLayout.packed(lengths, **ways, causal=True))
    mask = mask if target is None else mask.to(target)
    return {"attention_mask": mask, "position_ids": _positions(mask.documents)}


class PackedMask(NoTensor):
    """Packed documents in the place of an ``attention_mask``; made by :func:`packed`.

    Attributes:
        layouts: the mask of the documents by whether it is causal, made ahead of the forward.
    """

    dtype = torch.bool
    ndim = 2
    what = "a PackedMask"
    cure = (
        "only attention of polyattn reads it (attn_implementation='polyattn_...' or polyattn_transformers.use), and "
        "generation takes no packed prompts; elsewhere, pass position_ids that restart with each document and no "
        "attention_mask"
    )

    def __init__(self, causal: MaskLayout, full: MaskLayout | None = None) -> None:
        visibility: Any = causal.visibility
        if full is None:
            full = MaskLayout.packed(document_ids=visibility.q_segments, causal=False)
        self.layouts = {True: causal, False: full}
        self.documents: Tensor = visibility.q_segments

    @property
    def shape(self) -> torch.Size:
        """``[B|1, K]``, as of a padding mask."""
        return self.documents.shape

    @property
    def device(self) -> torch.device:
        """Where the documents lie."""
        return self.documents.device

    def dim(self) -> int:
        """2, as of a padding mask."""
        return self.ndim

    def to(self, device: torch.device | str | None = None, *_: Any, **__: Any) -> PackedMask:
        """The mask on ``device``; a dtype, which transformers asks for too, changes nothing."""
        if device is None or not isinstance(device, (str, torch.device)) or torch.device(device) == self.device:
            return self
        return PackedMask(self.layouts[True].to(device), self.layouts[False].to(device))

    def cumsum(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what a model with chunked attention asks of a padding mask."""
        raise LayoutError(
            "a model with chunked attention takes no packed documents: its chunks count from the start of the row, not "
            "of each document, so a packed document would not get the numbers that it gets alone; pad the documents"
        )

    def __repr__(self) -> str:
        return f"PackedMask({self.layouts[True].describe()})"


def check_size(mask: PackedMask, batch: int, q_len: int, kv_len: int) -> None:
    """Refuse packed documents that do not cover exactly the tokens of a call.

    Raises:
        LayoutError: other numbers of rows or tokens, or keys from earlier forwards, whose documents nobody knows.
    """
    rows, total = mask.shape
    if rows not in (1, batch):
        raise LayoutError(
            f"packed documents must have one row, or one for each row of the call, got {rows} rows in documents and "
            f"{batch} in the call; describe the rows that the model gets"
        )
    if total != q_len or total != kv_len:
        raise LayoutError(
            f"packed documents must cover the tokens of the call, got {total} tokens in documents, {q_len} queries and "
            f"{kv_len} keys; a cache with earlier tokens (or a static one) takes no packed batch"
        )


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = f"device must be a device of torch, such as 'cuda' or torch.device('cuda'), got {reprlib.repr(device)}"
        raise LayoutError(text) from error


def _positions(documents: Tensor) -> Tensor:
    """How many earlier tokens of its row each token shares its document with, ``Int[B, K]``."""
    order = documents.argsort(dim=1, stable=True)
    ordered = documents.gather(1, order)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(order)
    starts = torch.cat([torch.ones_like(ordered[:, :1], dtype=torch.bool), ordered.diff(dim=1) != 0], 1)
    rank = index - torch.where(starts, index, 0).cummax(1).values
    return torch.empty_like(rank).scatter_(1, order, rank)
