"""What the host knows of a layout: its structure on the CPU, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.blocks import Block, find_blocks, to_table
from polyattn._layout.checks import Copied, on_host
from polyattn._layout.structured import StructuredMask
from polyattn._layout.visibility import Visibility, held


class Host(NamedTuple):
    """The tensors of a structured layout on the CPU."""

    mask: StructuredMask
    active: Tensor | None


class Lowered(NamedTuple):
    """The table of blocks, and whether there may be queries without keys and keys that nobody sees."""

    blocks: Tensor | None = None
    fully_masked_rows: bool = True
    unseen_keys: bool = True


class Known(NamedTuple):
    """What an operation hands on to the layout that it makes, so that no device is read twice."""

    host: Host | None = None
    lowered: Lowered | None = None


def read_host(
    visibility: Visibility, active: Tensor | None, copies: Sequence[Copied] = (), *, sync: bool
) -> Host | None:
    """The structure on the host, or ``None`` where there is none or a tensor of it is not read.

    Args:
        visibility: the description.
        active: the active queries.
        copies: tensors of the description that have been read already.
        sync: whether to copy what lies on a device, each tensor once.
    """
    if not isinstance(visibility, StructuredMask) or torch.compiler.is_compiling():
        return None
    known = {id(copy.tensor): copy.values for copy in copies}
    tensors = visibility.tensors() | ({} if active is None else {"active": active})
    for value in tensors.values():
        if id(value) not in known:
            known[id(value)] = on_host(value, sync=sync)
    values = {name: known[id(value)] for name, value in tensors.items()}
    if any(value is None for value in values.values()):
        return None
    read = {name: value for name, value in values.items() if value is not tensors[name] and name != "active"}
    return Host(active=values.get("active"), mask=visibility.replace(**read) if read else visibility)


def check_segment_prefixes(mask: StructuredMask) -> None:
    """Refuse segments of queries for which a prefix per segment has no entry."""
    ids, prefixes = mask.q_segments, mask.prefix_lengths
    if ids is None or prefixes is None or prefixes.dim() == 1 or ids.numel() == 0:
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= prefixes.shape[1]:
        raise LayoutError(
            f"q_segments must lie in 0 .. {prefixes.shape[1] - 1}, the segments that prefix_lengths lists, "
            f"got {least} .. {most}"
        )


def lower(host: Host | None, q_len: int, kv_len: int, batch: int) -> Lowered:
    """The blocks of a layout; nothing is known without values on the host, and nothing is read while tracing."""
    if host is None or torch.compiler.is_compiling():
        return Lowered()
    tensors = [*host.mask.tensors().values(), *held(host.active)]
    rows = batch if any(len(value) != 1 for value in tensors) else min(batch, 1)  # else one stands for all
    blocks = find_blocks(host.mask, q_len, kv_len, rows, host.active)
    if blocks is None:
        return Lowered()
    gaps = host.active is not None and not bool(host.active.all())
    covered = sum(block.q_stop - block.q_start for block in blocks)
    table = to_table(blocks, batch if rows < batch else 1)
    return Lowered(table, gaps or covered < rows * q_len, gaps or not _all_seen(blocks, rows, kv_len))


def _all_seen(blocks: list[Block], batch: int, kv_len: int) -> bool:
    """Whether every key of every batch row lies in a block."""
    reached = [0] * batch
    for block in sorted(blocks, key=lambda block: block.k_start):
        if block.k_start <= reached[block.batch]:
            reached[block.batch] = max(reached[block.batch], block.k_stop)
    return all(stop == kv_len for stop in reached)
