"""A layout of whole sequences, and who holds which of their tokens."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyattn import MaskLayout
from polyattn.messages import listed, shown
from polyattn_context_parallel.balance import BALANCES
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.intervals import Demand, Partition


class Shard:
    """This rank's tokens of every sequence, under a layout of the whole sequences; made by :meth:`of` on every rank.

    Attributes:
        layout: the mask of the whole sequences; the first one, where several were named.
        layouts: every mask by its name; ``{"": layout}`` where one was given.
        group: the process group that the tokens are shared out in.
        rank: this process in it.
        ranks: its number of processes.
        partition: who owns which tokens.
        balance: the rule that shared them out.
    """

    def __init__(self, layouts: Mapping[str, MaskLayout], group: Any, partition: Partition, balance: str) -> None:
        self.layouts = dict(layouts)
        self.layout = next(iter(self.layouts.values()))
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.ranks = partition.ranks
        self.partition = partition
        self.balance = balance
        self.rows = tuple(partition.rows(rank) for rank in range(self.ranks))
        self._taken: list[weakref.ref[Tensor]] = []

    @classmethod
    def of(cls, layout: MaskLayout | Mapping[str, MaskLayout], mesh: Any, *, balance: str = "auto") -> Shard:
        """Share out the tokens.

        Args:
            layout: the mask of the whole sequences, the same on every rank; or several by name, for models whose
                layers name theirs. ``q_len`` and ``kv_len`` are the number of tokens.
            mesh: a one-dimensional ``DeviceMesh``, or a process group.
            balance: ``"contiguous"``, ``"zigzag"``, ``"documents"``, or ``"auto"``, the one whose busiest rank has
                the least to do.

        Raises:
            ContextParallelError: an argument is none of these, or the sizes of the layouts differ.
        """
        layouts = dict(layout) if isinstance(layout, Mapping) else {"": layout}
        check_layouts(layouts)
        if getattr(mesh, "ndim", 1) != 1:
            raise ContextParallelError(f"mesh must have one dimension, got {mesh.ndim}; take one of it: mesh['cp']")
        group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        if not isinstance(group, dist.ProcessGroup):
            raise ContextParallelError(f"mesh must be a DeviceMesh or a process group, got {shown(mesh)}")
        found, partition = share_out(list(layouts.values()), dist.get_world_size(group), balance)
        return cls(layouts, group, partition, found)

    @property
    def mine(self) -> Tensor:
        """The places of this rank's tokens in the whole sequences, ascending: int64 CPU ``[n]``."""
        return self.rows[self.rank]

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor of whole sequences: tokens, labels, positions.

        Positions stay those of the whole sequences. Take them after moving them to their device.

        Raises:
            ContextParallelError: ``x`` has another length along ``dim``.
        """
        if x.shape[dim] != self.layout.q_len:
            raise ContextParallelError(
                f"take needs a tensor of the whole sequences, {self.layout.q_len} long in dimension {dim}, "
                f"got shape {list(x.shape)}"
            )
        part = x.index_select(dim, self.mine.to(x.device))
        self._taken = [known for known in self._taken if known() is not None]
        self._taken.append(weakref.ref(part))
        return part

    def took(self, x: Tensor) -> bool:
        """Whether ``x`` came from :meth:`take`, as itself or as an alias of it."""
        for known in self._taken:
            part = known()
            if part is x or (part is not None and part.shape == x.shape and part.data_ptr() == x.data_ptr() != 0):
                return True
        return False

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tensor of whole sequences from every rank's part, on every rank; without gradients.

        Raises:
            ContextParallelError: ``x`` has another length along ``dim`` than this rank's number of tokens.
        """
        if x.shape[dim] != len(self.mine):
            raise ContextParallelError(
                f"gather needs rank {self.rank}'s {len(self.mine)} tokens in dimension {dim}, got shape {list(x.shape)}"
            )
        with torch.no_grad():
            mine = x.detach().movedim(dim, 0)
            most = max(map(len, self.rows))
            padded = mine.new_zeros(most, *mine.shape[1:])
            padded[: len(mine)] = mine
            parts = [torch.empty_like(padded) for _ in range(self.ranks)]
            dist.all_gather(parts, padded, group=self.group)
            whole = mine.new_empty(self.layout.q_len, *mine.shape[1:])
            for rows, part in zip(self.rows, parts, strict=True):
                whole[rows.to(x.device)] = part[: len(rows)]
            return whole.movedim(0, dim)

    def local_layout(self, name: str = "") -> MaskLayout:
        """The mask among this rank's tokens only: what a model reads sizes off."""
        layout = self.layouts.get(name, self.layout)
        return layout.select_queries(self.mine).select_keys(self.mine)

    def describe(self) -> str:
        """Tokens and visible pairs of each rank, in a few lines."""
        lines = [f"{self.layout.q_len} tokens on {self.ranks} ranks, {self.balance}; this is rank {self.rank}"]
        for name, layout in self.layouts.items():
            pairs = Demand.of(layout, self.partition).pairs
            mean = max(1.0, pairs.double().mean().item())
            lines.append(
                f"{name or 'layout'}: tokens {list(map(len, self.rows))}, pairs {pairs.tolist()}, "
                f"worst over mean {pairs.max().item() / mean:.3f}"
            )
        return "\n".join(lines)


def check_layouts(layouts: Mapping[str, MaskLayout]) -> None:
    """Whether these can be shared out together.

    Raises:
        ContextParallelError: one is not a layout, has other numbers of queries and keys, or differs in length.
    """
    if not layouts:
        raise ContextParallelError("layout must be a MaskLayout or a mapping of some, got an empty mapping")
    for name, layout in layouts.items():
        named = f"layout {shown(name)}" if name else "layout"
        if not isinstance(layout, MaskLayout):
            raise ContextParallelError(f"{named} must be a MaskLayout, got {shown(layout)}")
        if layout.q_len != layout.kv_len:
            raise ContextParallelError(
                f"{named} must have q_len == kv_len, the length of the whole sequences, "
                f"got q_len={layout.q_len} and kv_len={layout.kv_len}"
            )
    lengths = [layout.q_len for layout in layouts.values()]
    if len(set(lengths)) > 1:
        raise ContextParallelError(f"layouts must have one length, got {listed(lengths)}")


def share_out(layouts: list[MaskLayout], ranks: int, balance: str) -> tuple[str, Partition]:
    """The partition by a rule, and the rule's name; the first of several layouts that has documents decides.

    Raises:
        ContextParallelError: no such rule.
    """
    if balance != "auto":
        if balance not in BALANCES:
            raise ContextParallelError(f"balance must be auto, {', '.join(BALANCES)}, got {shown(balance)}")
        return balance, BALANCES[balance](layouts[0], ranks)
    found = [(name, rule(layouts[0], ranks)) for name, rule in BALANCES.items()]
    return min(found, key=lambda item: sum(_cost(layout, item[1]) for layout in layouts))


def _cost(layout: MaskLayout, partition: Partition) -> int:
    """What the busiest rank does, in pairs; a key that comes from another rank costs as much as 1,500 of them.

    This is the ratio of 450 TFLOP/s to 45 GB/s for four query heads a KV head.
    """
    demand = Demand.of(layout, partition)
    received = demand.keys.sum(1) - demand.keys.diagonal()
    return int(demand.pairs.max()) + 1500 * int(received.max())
