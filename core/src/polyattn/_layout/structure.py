"""What a description of visibility is that is neither a tensor nor a function: one class for each kind.

A new kind is one class: its formula (:meth:`Structure.rows` and :meth:`Structure.mod`), its words, and whatever else it
can: blocks, parts, a window, positions. What it leaves out is done with its formula, or refused by its word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from polyattn._layout.checks import Index
from polyattn._layout.indexing import positions, take
from polyattn._layout.tables import Table
from polyattn._layout.windows import Sides

if TYPE_CHECKING:
    from typing_extensions import Self

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Structure:
    """A visibility whose class knows its rule."""

    #: Whether keys that no query sees are known to hold neither NaN nor Inf.
    finite: bool = False
    #: Whether the blocks are looked for when they are first asked for, not when the layout is made.
    lazy: ClassVar[bool] = False

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """The same structure with other values of some fields."""
        raise NotImplementedError

    def axes(self, name: str) -> str:
        """What the dimensions of a tensor run over: ``B`` and ``H``, where size 1 serves all, ``Q``, ``K``, or others.

        By default its name says it: one that begins with ``q_`` has ``"BQ"``, one that begins with ``kv_`` ``"BK"``;
        nothing is known of any other.
        """
        return "BQ" if name.startswith("q_") else "BK" if name.startswith("kv_") else ""

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, H, stop - start, K]``."""
        raise NotImplementedError

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The rule as a FlexAttention ``mask_mod``; reads nothing on the host."""
        raise NotImplementedError

    def words(self) -> dict[str, str]:
        """The features that a backend needs for it, each with what was asked for."""
        return {type(self).__name__: "a description of another kind"}

    def rules(self) -> list[str]:
        """The same for people."""
        return list(self.words().values())

    def find_table(self, _q_len: int, _kv_len: int, _rows: int, _active: Tensor | None) -> Table | None:
        """The blocks of the first ``rows`` batch rows, where all tensors are on the host; ``None``: it has none."""
        return None

    def narrowed(self, _sides: Sides) -> Self | None:
        """The structure under a window too; ``None`` where it has no such form."""
        return None

    def joinable(self, _q_len: int, _kv_len: int) -> Structure:
        """The same as it is joined with others."""
        return self

    def in_positions(self, q_len: int, kv_len: int, device: torch.device | None) -> Structure | None:
        """The same with the positions of queries and keys as tensors, for parts; ``None``: no such form."""
        whole = self.joinable(q_len, kv_len)
        return None if whole is self else whole.in_positions(q_len, kv_len, device)

    @property
    def placed(self) -> bool:
        """Whether it says itself where its queries and keys stand."""
        return False

    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions of queries and keys where they are given, and are one answer."""
        return None, None

    def token_positions(self, q_len: int, kv_len: int) -> Tensor:
        """``Int[B|1, Q]``; see :meth:`MaskLayout.token_positions`."""
        whole = self.joinable(q_len, kv_len)
        if whole is not self:
            return whole.token_positions(q_len, kv_len)
        return positions(self.places(), q_len, kv_len, None)[0]

    def part(
        self, axis: str, index: Index, q_len: int, kv_len: int, device: torch.device | None = None
    ) -> Structure | None:
        """The part at ``index`` of what runs over ``axis``, in its positions; ``None``: it has no such form."""
        whole = self if axis in "BH" else self.in_positions(q_len, kv_len, device)
        if whole is None:
            return None
        taken = {}
        for name, value in whole.tensors().items():
            at = whole.axes(name).find(axis)
            if at >= 0 and not (axis in "BH" and value.shape[at] == 1):
                taken[name] = take(value, at, index)
        return whole.replace(**taken)
