"""Packed documents in the place of a mask: where they lie is said once, and no mask or cache can switch it off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout, StructuredMask
from polyattn.documents import ranks, together
from polyattn_transformers._documents import readable
from polyattn_transformers._no_tensor import NoTensor, as_device


class PackedMask(NoTensor):
    """Packed documents in the place of an ``attention_mask``; made by :func:`packed`, or from what else describes them.

    Args:
        documents: ``Int[B|1, K]``, one number per document.
        live: ``Bool[B|1, K]``, the tokens that are not padding; ``None``: all.
        name: how what described them is called in messages.
        layouts: what is known already of :meth:`layout`.
    """

    dtype = torch.bool
    ndim = 2
    what = "a PackedMask"
    cure = (
        "only attention of polyattn reads it (attn_implementation='polyattn_...' or polyattn_transformers.use), and "
        "generation takes no packed prompts; elsewhere, and in a model whose own code computes with the mask, give "
        "each document a row of its own, with padding"
    )

    def __init__(
        self,
        documents: Tensor,
        live: Tensor | None = None,
        *,
        name: str = "packed documents",
        layouts: dict[bool, MaskLayout] | None = None,
    ) -> None:
        self.documents = documents if live is None else _apart_from_padding(documents, live)
        self.live = live
        self.name = name
        self._layouts = layouts or {}
        self._positions: Tensor | None = None
        self._together: bool | None = None

    @property
    def positions(self) -> Tensor:
        """How many earlier tokens of its row each token shares its document with, ``Int[B|1, K]``."""
        if self._positions is None:
            self._positions = ranks(self.documents)
        return self._positions

    def has_positions(self, positions: object) -> bool:
        """Whether these are known to be :attr:`positions`."""
        if positions is self.positions:
            return True
        fits = isinstance(positions, Tensor) and positions.shape[-1] == self.positions.shape[1] and readable(positions)
        return fits and bool((positions == self.positions).all())  # type: ignore[attr-defined]

    @property
    def places(self) -> Tensor | None:
        """:attr:`positions`, unless the tokens of each document lie together: then the row has the same distances.

        Where nobody may look, documents are taken as scattered.
        """
        if self._together is None and readable(self.documents):
            self._together = bool(together(self.documents, self.live))
        return None if self._together else self.positions

    def layout(self, *, causal: bool) -> MaskLayout:
        """Who sees whom in attention that is causal or sees both ways, at which distance; made once."""
        if causal not in self._layouts:
            ids, length, places = self.documents, self.documents.shape[1], self.places
            mask = StructuredMask(
                causal=causal,
                kv_valid=self.live,
                q_segments=ids,
                kv_segments=ids,
                q_positions=places,
                kv_positions=places,
            )
            self._layouts[causal] = MaskLayout(length, length, visibility=mask)
        return self._layouts[causal]

    def lengths(self) -> list[int]:
        """How many tokens the documents have, in rising order."""
        rows = self.documents if self.live is None else self.documents.expand_as(self.live)
        found: set[int] = set()
        for index, row in enumerate(rows):
            tokens = row if self.live is None else row[self.live[index]]
            found.update(tokens.unique(return_counts=True)[1].tolist())
        return sorted(found)

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

    def view(self, *_: int) -> PackedMask:
        """The mask itself: models ask for ``[B, K]``."""
        return self

    def to(self, device: torch.device | str | None = None, *_: Any, **__: Any) -> PackedMask:
        """The mask on ``device``; a dtype, which transformers asks for too, changes nothing."""
        if not isinstance(device, (str, torch.device)) or as_device(device) == self.device:
            return self
        layouts = {causal: layout.to(device) for causal, layout in self._layouts.items()}
        moved = PackedMask(self.documents.to(device), name=self.name, layouts=layouts)
        moved.live = None if self.live is None else self.live.to(device)
        moved._together = self._together
        return moved

    def cumsum(self, *_: Any, **__: Any) -> Tensor:
        """The count of tokens, ``Int[B|1, K]``; chunks count from the first token of each document, not of the row."""
        return torch.ones_like(self.documents).cumsum(1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every function of torch but the zeros that transformers compares the count of tokens with."""
        if function is torch.zeros_like:
            return torch.zeros_like(args[0].documents)
        return super().__torch_function__(function, types, args, kwargs)

    def __repr__(self) -> str:
        return f"PackedMask({self.layout(causal=True).describe()})"


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


def _apart_from_padding(documents: Tensor, live: Tensor) -> Tensor:
    """Documents with odd numbers, and padding with the even number behind the document before it."""
    rows = max(len(documents), len(live))
    documents, live = documents.expand(rows, -1), live.expand(rows, -1)
    before = torch.where(live, documents, -1).cummax(1).values
    return torch.where(live, documents * 2 + 1, before * 2 + 2)
