"""Keys that are listed for each query, as models that choose them by score do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyattn._layout.checks import check_flag, check_int, check_ints
from polyattn._layout.indexing import pick, positions
from polyattn._layout.structure import MaskMod, Structure


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedMask(Structure):
    """A query sees its listed keys; made by :meth:`MaskLayout.selected`.

    Attributes:
        indices: ``Int[B|1, H|1, Q, N]``, keys, or blocks of keys, of each query; -1 stands for none. One that is
            listed twice counts once.
        block: number of keys in a block; the last one may be shorter.
        causal: whether later keys are hidden although they are listed.
        q_positions: ``Int[B|1, Q]``, the positions of the queries; ``None``: the last ones.
    """

    indices: Tensor
    block: int = 1
    causal: bool = False
    q_positions: Tensor | None = None

    def __post_init__(self) -> None:
        check_ints("indices", self.indices, "[B|1, H|1, Q, N]", (4,))
        check_int("block", self.block, 1)
        check_flag("causal", self.causal)

    def tensors(self) -> dict[str, Tensor]:
        """The listed keys, and the positions where they are given."""
        given = {} if self.q_positions is None else {"q_positions": self.q_positions}
        return {"indices": self.indices, **given}

    def replace(self, **changes: Any) -> SelectedMask:
        """The same mask with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def axes(self, name: str) -> str:
        """See :class:`Structure`."""
        return "BHQN" if name == "indices" else super().axes(name)

    def words(self) -> dict[str, str]:
        """The features that a backend needs for it, each with what was asked for."""
        of = "keys" if self.block == 1 else f"blocks of {self.block} keys"
        found = {"selected": f"{self.indices.shape[3]} listed {of} for each query"}
        return {**found, "causal": "causal"} if self.causal else found

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: ``Bool[B|1, H|1, stop - start, K]``."""
        count = -(-kv_len // self.block)
        listed = self.indices[:, :, start:stop].long()
        seen = listed.new_zeros((*listed.shape[:3], count + 1), dtype=torch.bool)
        seen = seen.scatter(3, torch.where(listed < 0, count, listed), True)[..., :count]
        seen = seen if self.block == 1 else seen.repeat_interleave(self.block, 3)[..., :kv_len]
        if not self.causal:
            return seen
        q, k = positions((self.q_positions, None), q_len, kv_len, device)
        return seen & (k[:, None, None] <= q.expand(-1, q_len)[:, None, start:stop, None])

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The rule as a FlexAttention ``mask_mod``; reads nothing on the host."""
        indices, at = self.indices, self.q_positions
        rows, heads = (0 if size == 1 else 1 for size in indices.shape[:2])

        def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            block = torch.div(kv_idx, self.block, rounding_mode="floor")
            seen = (indices[b * rows, h * heads, q_idx] == block.unsqueeze(-1)).any(-1)
            if not self.causal:
                return seen
            q = q_idx + (kv_len - q_len) if at is None else pick(at, b, q_idx)
            return seen & (kv_idx <= q)

        return mod

    def in_positions(self, q_len: int, kv_len: int, device: torch.device | None) -> SelectedMask:
        """The same with the positions of the queries as a tensor."""
        q, _ = positions((self.q_positions, None), q_len, kv_len, device)
        return self.replace(q_positions=q)

    def part(self, axis: str, *index: Any, **rest: Any) -> Structure | None:
        """See :class:`Structure`; some of the keys have no such form."""
        return None if axis == "K" else super().part(axis, *index, **rest)

    @property
    def placed(self) -> bool:
        """Whether it says itself where its queries and keys stand."""
        return self.causal or self.q_positions is not None

    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions of the queries where they are given; keys stand at ``0 .. K - 1``."""
        return self.q_positions, None
