"""What a query sees of cached keys: those of its own row, up to its own position, wherever their slots are.

A cache has slots; the key of position ``p`` lies in slot ``p``, or ``p % slots`` in a ring.
The lengths of rows may lie on a device: the rule is arithmetic on them and reads nothing. Whoever does not know the
class gets the same rule as a :class:`StructuredMask` with positions, by :meth:`CachedMask.joinable`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyattn._layout.checks import check_flag, check_ints
from polyattn._layout.lowering import find_table
from polyattn._layout.structure import MaskMod, Structure
from polyattn._layout.structured import StructuredMask
from polyattn._layout.tables import Table
from polyattn._layout.windows import Sides, Window, as_window, narrower, window_sides


@dataclasses.dataclass(frozen=True, eq=False)
class CachedMask(Structure):
    """A cache of keys whose last queries are its newest tokens; made by :meth:`MaskLayout.cached`.

    Attributes:
        lengths: ``Int[B|1]``, tokens of each row, the queries included: query i of Q stands at ``lengths - Q + i``.
        window: of how many positions a query sees the keys, its own included, or ``None``.
        ring: whether the slot of position ``p`` is ``p % K`` and not ``p``.
        finite: whether slots that a query does not see are known to hold neither NaN nor Inf.
    """

    lengths: Tensor
    window: Window = None
    ring: bool = False
    finite: bool = False
    #: There is a new one for each step of decoding, whose kernels need no blocks.
    lazy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ints("lengths", self.lengths, "[B]", (1,))
        check_flag("ring", self.ring)
        check_flag("finite", self.finite)
        window = as_window(window_sides(self.window), torch.iinfo(self.lengths.dtype).max, one_sided=True)
        object.__setattr__(self, "window", window)

    def tensors(self) -> dict[str, Tensor]:
        """The lengths."""
        return {"lengths": self.lengths}

    def replace(self, **changes: Any) -> CachedMask:
        """The same mask with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def axes(self, _name: str) -> str:
        """The lengths are per batch row."""
        return "B"

    def words(self) -> dict[str, str]:
        """The features that a backend needs for it, each with what was asked for."""
        found = {"kv_lengths": "a ring of cached keys" if self.ring else "cached keys"}
        return found if self.window is None else {**found, "window": f"window {self.window}"}

    def narrowed(self, sides: Sides) -> CachedMask:
        """The mask under a window; later keys are hidden anyway."""
        return self.replace(window=narrower(window_sides(self.window), sides))

    @property
    def placed(self) -> bool:
        """It says itself where its queries and keys stand."""
        return True

    def joinable(self, q_len: int, kv_len: int) -> StructuredMask:
        """The same as a mask with the position of each query and of each slot's key."""
        kind: Any = {"dtype": self.lengths.dtype, "device": self.lengths.device}
        lengths, slots = self.lengths[:, None], torch.arange(kv_len, **kind)[None]
        queries, valid = lengths + torch.arange(-q_len, 0, **kind), None
        if self.ring:
            slots = lengths - 1 - (lengths - 1 - slots) % kv_len
            valid = slots >= 0
        return StructuredMask(causal=True, window=self.window, kv_valid=valid, q_positions=queries, kv_positions=slots)

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, 1, stop - start, K]``."""
        return self.joinable(q_len, kv_len).rows(q_len, kv_len, start, stop, device)

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The rule as a FlexAttention ``mask_mod``; reads nothing on the host."""
        return self.joinable(q_len, kv_len).mod(q_len, kv_len)

    def find_table(self, q_len: int, kv_len: int, rows: int, active: Tensor | None) -> Table | None:
        """The blocks for lengths on the host: one for each batch row, two where a ring has come round."""
        if 0 in (q_len, kv_len, rows):
            return Table.empty()
        if active is not None:
            return find_table(self.joinable(q_len, kv_len), q_len, kv_len, rows, active)
        length = self.lengths.long()
        row, none = torch.arange(rows, device="cpu"), torch.zeros_like(length)
        # First slot, the one behind the last, and the position of the first key.
        stretches = [(none, length, none)]
        if self.ring:
            newest = length % kv_len
            oldest = torch.maximum(newest, kv_len + newest - length).clamp(max=kv_len)
            stretches = [(none, newest, length - newest)] * (kv_len > 1)
            stretches += [(oldest, none + kv_len, length - newest - kv_len + oldest)]
        found = []
        for start, stop, position in stretches:
            shift = length - q_len - position
            columns = (row, none, none + q_len, start, stop, start - stop, none + q_len, shift)
            found.append(torch.stack(columns, 1))
        bands = Table(torch.cat(found)).narrow(window_sides(self.window)[0], 0).bands
        return Table.of(bands[bands[:, 2] > bands[:, 1]].unbind(1), unit=True, alone=not self.ring)
