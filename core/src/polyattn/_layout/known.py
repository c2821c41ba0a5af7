"""What the host knows of a layout: its structure on the CPU, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Index, Read, on_host
from polyattn._layout.indexing import take
from polyattn._layout.lowering import find_table
from polyattn._layout.structure import Structure
from polyattn._layout.structured import StructuredMask
from polyattn._layout.tables import Table
from polyattn._layout.visibility import Visibility
from polyattn._layout.windows import Sides


class Known(NamedTuple):
    """What the host knows of a layout. Operations hand it on, so that no device is read and nothing found twice.

    Attributes:
        mask: the structure with its tensors on the CPU; ``None`` where there is none or a tensor was not read.
        active: the active queries, likewise.
        table: the blocks.
        may_have_fully_masked_rows: False where it is known that every query sees a key.
        may_have_unseen_keys: False where it is known that every key is seen.
        lowered: whether the blocks have been looked for.
    """

    mask: Structure | None = None
    active: Tensor | None = None
    table: Table | None = None
    may_have_fully_masked_rows: bool = True
    may_have_unseen_keys: bool = True
    lowered: bool = False

    def lower(self, q_len: int, kv_len: int, batch: int) -> Known:
        """With the blocks, where there is a structure; nothing is read while tracing.

        Raises:
            LayoutError: a segment of queries has no entry among the prefixes.
        """
        mask = self.mask
        if mask is None or torch.compiler.is_compiling():
            return self
        rows = self._distinct(batch)
        if isinstance(mask, StructuredMask):
            _check_lengths_per_segment(mask)
            table = find_table(mask, q_len, kv_len, rows, self.active)
        else:
            table = mask.find_table(q_len, kv_len, rows, self.active)
        if table is None:
            return self._replace(lowered=True)
        gaps = self.active is not None and not bool(self.active.all())
        return self._replace(
            table=table.repeat(batch) if rows < batch else table,
            may_have_fully_masked_rows=gaps or not table.covers("q", q_len, rows),
            may_have_unseen_keys=gaps or not table.covers("k", kv_len, rows),
            lowered=True,
        )

    def narrow(self, sides: Sides) -> Known:
        """Under a window too; blocks are found anew outside a traced graph."""
        old, table = self.mask, self.table
        mask = None if old is None else old.narrowed(sides)
        narrowed = Known(mask, self.active) if mask is not None else Known()
        if table is None or not torch.compiler.is_compiling() or not isinstance(old, StructuredMask):
            return narrowed
        if not (old.positional or old.q_positions is None) or not table.unit or old.sink_lengths is not None:
            return narrowed
        assert isinstance(mask, StructuredMask)
        return narrowed._replace(table=table.narrow(*mask.reach), lowered=True)

    def part(self, axis: str, index: Index | None, q_len: int, kv_len: int) -> Known:
        """Of the part at ``index``, on the host, of what runs over ``axis``; nothing where the index is not known."""
        if self.mask is None or index is None or torch.compiler.is_compiling():
            return Known()
        at = {"B": 0, "Q": 1}.get(axis)
        active = self.active
        if active is not None and at is not None and not (axis == "B" and len(active) == 1):
            active = take(active, at, index)
        mask = self.mask.part(axis, index, q_len, kv_len, torch.device("cpu"))
        return Known() if mask is None else Known(mask, active)

    def joinable(self, q_len: int, kv_len: int) -> Known:
        """Of the layout as it is joined with others."""
        mask = None if self.mask is None else self.mask.joinable(q_len, kv_len)
        return self if mask is self.mask else Known(mask, self.active)

    def expand(self, batch: int) -> Known:
        """For ``batch`` rows that are all like the one row of this."""
        if self.table is None or batch == 0 or torch.compiler.is_compiling():
            return Known(self.mask, self.active)
        return self._replace(table=self.table.repeat(batch))

    def _distinct(self, batch: int) -> int:
        """The number of batch rows that may differ: one stands for all where no tensor has several."""
        if batch <= 1:
            return batch
        tensors = [] if self.mask is None else list(self.mask.tensors().values())
        sizes = {value.shape[0] for value in (tensors if self.active is None else [*tensors, self.active])}
        return batch if sizes - {1} else 1


def read_host(visibility: Visibility, active: Tensor | None, copies: Sequence[Read] = (), *, sync: bool) -> Known:
    """The structure on the host; nothing where there is none or a tensor of it is not read.

    ``copies`` have been read already; with ``sync`` whatever else lies on a device is copied, each tensor once.
    """
    if not isinstance(visibility, Structure) or torch.compiler.is_compiling():
        return Known()
    known = {id(tensor): values for tensor, values in copies}
    tensors = visibility.tensors() | ({} if active is None else {"active": active})
    moved: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if id(value) not in known:
            known[id(value)] = on_host(value, sync=sync)
        values = known[id(value)]
        if values is None:
            return Known()
        if values is not value and value is not active:
            moved[name] = values
    host = visibility.replace(**moved) if moved else visibility
    return Known(host, None if active is None else known[id(active)])


def _check_lengths_per_segment(mask: StructuredMask) -> None:
    """Refuse segments of queries for which a prefix or a sink per segment has no entry."""
    ids = mask.q_segments
    for name in ("prefix_lengths", "sink_lengths"):
        lengths = getattr(mask, name)
        if lengths is None or ids is None or lengths.dim() == 1 or ids.numel() == 0:
            continue
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= lengths.shape[1]:
            raise LayoutError(
                f"q_segments must lie in 0 .. {lengths.shape[1] - 1}, the segments that {name} lists, "
                f"got {least} .. {most}"
            )
