"""The keys that this rank's queries see come to them: one exchange, one call of the backend over keys in order."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn import AttentionBackend, AttentionRequest, AttentionResult, MaskLayout
from polyattn.select import prepare
from polyattn_context_parallel.exchange import Route, move, tie
from polyattn_context_parallel.intervals import Demand
from polyattn_context_parallel.shard import Shard


class Gather:
    """Attention of this rank's queries to the needed keys of all ranks."""

    def __init__(self, backend: AttentionBackend, shard: Shard, layout: MaskLayout, request: AttentionRequest) -> None:
        demand = Demand.of(layout, shard.partition)
        self.keys = demand.needed(shard.rank)
        self.queries = len(shard.mine)
        self.needs_grad = request.needs_grad
        self.route = keys_route(shard, demand)
        self.inner = prepare(backend, layout.select_queries(shard.mine).select_keys(self.keys), request)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> AttentionResult:
        """``q``, ``k``, ``v`` of this rank's tokens; a bias has this rank's rows and the columns of all tokens."""
        if self.route.moves or len(self.keys) != self.queries:
            k, v = move(self.route, k, v)
        if bias is not None and bias.shape[-1] != 1:
            bias = bias.index_select(-1, self.keys.to(bias.device))
        result = self.inner(q, k, v, bias=bias, sinks=sinks)
        detached = not self.queries or not len(self.keys) or not result.output.requires_grad
        if self.needs_grad and self.route.moves and detached:
            # This rank's backward needs no exchange, but those of others wait for it.
            return AttentionResult(tie(result.output, k, v), result.lse)
        return result


def keys_route(shard: Shard, demand: Demand, source: int | None = None) -> Route:
    """The exchange that brings each rank the keys that it needs, or only those of the rank ``source`` places before."""
    needs = [demand.needed(rank) for rank in range(shard.ranks)]
    owner = shard.partition.owner_of()
    mine = shard.mine
    wanted = needs[shard.rank]
    if source is not None:
        wanted = wanted[owner[wanted] == (shard.rank - source) % shard.ranks]
    pick, place = [], []
    for rank, keys in enumerate(needs):
        sends = source is None or rank == (shard.rank + source) % shard.ranks
        own = keys[owner[keys] == shard.rank] if sends else keys[:0]
        pick.append(torch.searchsorted(mine, own))
        place.append((owner[wanted] == rank).nonzero()[:, 0])
    others = demand.keys.clone().fill_diagonal_(0)
    moves = bool(others.any()) and source != 0
    return Route(shard.group, tuple(pick), tuple(place), 2, 2, (len(mine), len(wanted)), moves)
