"""The processes that `torchrun` started, which share the tokens of a step under ``context_parallel``."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyattn import ConfigError
from tiny_lm.config import RunConfig


def count() -> int:
    """How many processes there are; 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes results."""
    return int(os.environ.get("RANK", "0")) == 0


def mesh_of(config: RunConfig) -> DeviceMesh | None:
    """The mesh of all processes; ``None`` for one, which holds whole sequences.

    Raises:
        ConfigError: there are several, and nothing says how they share the work.
    """
    if count() == 1:
        return None
    parallel = config.attention.context_parallel
    if parallel is None:
        raise ConfigError(
            f"context_parallel must be set for {count()} processes, which would train the same model otherwise, got "
            "none; add `context_parallel: {method: auto}` to the config, or start one process"
        )
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(config.device, (count(),), mesh_dim_names=(parallel.mesh,))


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def any_of(value: bool) -> bool:
    """Whether ``value`` holds in any process, so that all do the same."""
    if not dist.is_initialized():
        return value
    flag = torch.tensor(int(value), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag)
    return bool(flag)
