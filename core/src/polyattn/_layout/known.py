"""What the host knows of a layout: its structure on the CPU, and what follows from that."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.blocks import MAX_WINDOW, Block, find_blocks, narrow, to_table
from polyattn._layout.checks import Read, on_host
from polyattn._layout.structured import StructuredMask
from polyattn._layout.visibility import Visibility


class Known(NamedTuple):
    """What the host knows of a layout. Operations hand it on, so that no device is read and nothing found twice.

    Attributes:
        mask: the structure with its tensors on the CPU; ``None`` where there is none or a tensor was not read.
        active: the active queries, likewise.
        blocks: the table of :meth:`MaskLayout.to_blocks`.
        may_have_fully_masked_rows: False where it is known that every query sees a key.
        may_have_unseen_keys: False where it is known that every key is seen.
        lowered: whether the blocks have been looked for.
    """

    mask: StructuredMask | None = None
    active: Tensor | None = None
    blocks: Tensor | None = None
    may_have_fully_masked_rows: bool = True
    may_have_unseen_keys: bool = True
    lowered: bool = False

    def lower(self, q_len: int, kv_len: int, batch: int) -> Known:
        """With the blocks, where there is a structure; nothing is read while tracing.

        Raises:
            LayoutError: a segment of queries has no entry among the prefixes.
        """
        if self.mask is None or torch.compiler.is_compiling():
            return self
        if self.mask.prefix_lengths is not None:
            _check_segment_prefixes(self.mask, self.mask.prefix_lengths)
        rows = self._distinct(batch)
        blocks = find_blocks(self.mask, q_len, kv_len, rows, self.active)
        return self._replace(lowered=True) if blocks is None else self._with_blocks(blocks, rows, q_len, kv_len, batch)

    def narrow(self, window: int, q_len: int, kv_len: int, batch: int) -> Known:
        """Under a window that is narrower than the structure's own, with its blocks where they follow from these."""
        mask = self.mask
        if mask is None:
            return Known()
        narrowed = Known(mask.replace(window=window), self.active)
        if self.blocks is None or window > MAX_WINDOW or not (mask.positional or mask.q_positions is None):
            return narrowed
        if torch.compiler.is_compiling():  # nothing is read: the ends of the blocks are not trimmed
            return narrowed._replace(blocks=self.blocks, lowered=True)
        rows = self._distinct(batch)
        blocks = [block for block in map(Block._make, self.blocks[1:].tolist()) if block.batch < rows]
        return narrowed._with_blocks(narrow(blocks, window), rows, q_len, kv_len, batch)

    def expand(self, batch: int) -> Known:
        """For ``batch`` rows that are all like the one row of this."""
        if self.blocks is None or batch == 0 or torch.compiler.is_compiling():
            return Known(self.mask, self.active)
        blocks = [Block(*row) for row in self.blocks[1:].tolist() if row[2]]
        return self._replace(blocks=to_table(blocks, batch))

    def _distinct(self, batch: int) -> int:
        """The number of batch rows that may differ: one stands for all where no tensor has several."""
        if batch <= 1:
            return batch
        tensors = [] if self.mask is None else list(self.mask.tensors().values())
        sizes = {value.shape[0] for value in (tensors if self.active is None else [*tensors, self.active])}
        return batch if sizes - {1} else 1

    def _with_blocks(self, blocks: list[Block], rows: int, q_len: int, kv_len: int, batch: int) -> Known:
        gaps = self.active is not None and not bool(self.active.all())
        covered = sum([block.q_stop - block.q_start for block in blocks])
        return self._replace(
            blocks=to_table(blocks, batch if rows < batch else 1),
            may_have_fully_masked_rows=gaps or covered < rows * q_len,
            may_have_unseen_keys=gaps or not _all_seen(blocks, rows, kv_len),
            lowered=True,
        )


def read_host(visibility: Visibility, active: Tensor | None, copies: Sequence[Read] = (), *, sync: bool) -> Known:
    """The structure on the host; nothing where there is none or a tensor of it is not read.

    ``copies`` have been read already; with ``sync`` whatever else lies on a device is copied, each tensor once.
    """
    if not isinstance(visibility, StructuredMask) or torch.compiler.is_compiling():
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
    return Known(visibility.replace(**moved) if moved else visibility, None if active is None else known[id(active)])


def _check_segment_prefixes(mask: StructuredMask, prefixes: Tensor) -> None:
    """Refuse segments of queries for which a prefix per segment has no entry."""
    ids = mask.q_segments
    if ids is None or prefixes.dim() == 1 or ids.numel() == 0:
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= prefixes.shape[1]:
        raise LayoutError(
            f"q_segments must lie in 0 .. {prefixes.shape[1] - 1}, the segments that prefix_lengths lists, "
            f"got {least} .. {most}"
        )


def _all_seen(blocks: list[Block], batch: int, kv_len: int) -> bool:
    """Whether every key of every batch row lies in a block."""
    reached = [0] * batch
    for block in sorted(blocks, key=operator.attrgetter("k_start")):
        if block.k_start <= reached[block.batch]:
            reached[block.batch] = max(reached[block.batch], block.k_stop)
    return reached.count(kv_len) == batch
