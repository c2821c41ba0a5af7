"""What all ranks must agree on before any tensor is sent."""

from __future__ import annotations

import datetime as dt
import re
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from polyattn_context_parallel.errors import ContextParallelError

_CONTROL: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def agree(group: Any, asked: Mapping[str, str], refusal: str, timeout: float) -> None:
    """Return when every rank of the group asks for the same and none refuses it.

    Args:
        group: the process group; messages go through one of the host for the same ranks.
        asked: what this rank asks for, by name.
        refusal: why this rank cannot; empty where it can.
        timeout: seconds until a rank that has not come is given up.

    Raises:
        ContextParallelError: the ranks differ or one refuses, with the same message on all; or one did not come, which
            the first rank can name.
    """
    control = _control(group)
    try:
        dist.monitored_barrier(control, dt.timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        named = re.search(r"[Rr]anks? ([\d, ]+) failed", first)
        late = [int(rank) for rank in named[1].replace(",", " ").split()] if named else []
        who = f"ranks {late}" if late else "a rank"
        raise ContextParallelError(
            f"{who} did not come within {timeout:g} s to prepare attention together: {first}", late
        ) from error
    every: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(every, (dict(asked), refusal), group=control)
    faults, ranks = [], set()
    for name in asked:
        values = [mine.get(name) for mine, _ in every]
        if len(set(values)) > 1:
            ranks |= {rank for rank, value in enumerate(values) if value != values[0]}
            faults.append(f"  - {name}: " + ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values)))
    refusing = {rank: text for rank, (_, text) in enumerate(every) if text}
    if faults:
        lines = "\n".join(faults)
        raise ContextParallelError(f"all ranks must ask for the same attention, they differ in\n{lines}", sorted(ranks))
    if refusing:
        lines = "\n".join(f"  - rank {rank}: {text}" for rank, text in refusing.items())
        raise ContextParallelError(f"not every rank can do this attention:\n{lines}", list(refusing))


def _control(group: Any) -> Any:
    """The group itself where it talks through the host, else one for the same ranks that does."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _CONTROL:
        ranks = dist.get_process_group_ranks(group)
        _CONTROL[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _CONTROL[group]
