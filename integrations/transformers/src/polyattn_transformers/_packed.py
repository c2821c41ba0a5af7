"""Packed documents and trees of rows as model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout
from polyattn_transformers._no_tensor import as_device
from polyattn_transformers._packing import PackedMask
from polyattn_transformers._tree_mask import Tree, packed_tree

Ints = Tensor | Sequence[int] | Sequence[Sequence[int]]


def packed(
    lengths: Ints | None = None,
    *,
    cu_seqlens: Ints | None = None,
    document_ids: Ints | None = None,
    position_ids: Ints | None = None,
    tree: Tree | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Model inputs for documents packed into rows, to be used as ``model(input_ids, **packed([3, 2, 4]))``.

    Exactly one of the first five. The first four have the forms that ``MaskLayout.packed`` takes: one row, or one list
    per batch row.

    Args:
        lengths: of the documents.
        cu_seqlens: their offsets ``0, l1, l1 + l2, ...``.
        document_ids: the document of each token, ``[K]`` or ``[B, K]``.
        position_ids: positions that restart at 0 with each document, ``[K]`` or ``[B, K]``.
        tree: what :func:`polyattn.pack_tree` makes of rows that share prefixes, to be used as
            ``model(tree.tokens, **packed(tree=tree))``: each row gets what it has alone.
        device: where the model's inputs lie; by default where the arguments are.

    Returns:
        ``attention_mask``, a :class:`PackedMask` that keeps the documents apart in every layer of a model that runs on
        polyattn, and ``position_ids`` ``Int[B|1, K]``, which restart with each document, or are depths in the tree.

    Raises:
        LayoutError: the description contradicts itself, or ``device`` is not a device.
    """
    target = None if device is None else as_device(device)
    ways: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "document_ids": document_ids,
        "position_ids": position_ids,
    }
    if tree is not None:
        others = {"lengths": lengths, **ways}
        if given := [name for name, value in others.items() if value is not None]:
            raise LayoutError(f"packed() must get tree= alone, got also {', '.join(given)}")
        return packed_tree(tree, target)
    visibility: Any = MaskLayout.packed(lengths, **ways, causal=True).visibility
    mask = PackedMask(visibility.q_segments)
    for causal in (True, False):
        mask.layout(causal=causal)  # both ahead of the forward, which may be traced
    mask = mask if target is None else mask.to(target)
    return {"attention_mask": mask, "position_ids": mask.positions}
