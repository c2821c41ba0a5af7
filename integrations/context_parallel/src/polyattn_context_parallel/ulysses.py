"""Heads instead of tokens: each rank sees whole sequences of some heads, so any mask and any backend serves."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyattn import AttentionBackend, AttentionRequest, AttentionResult, MaskLayout
from polyattn.select import prepare
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.exchange import Route, move, tie
from polyattn_context_parallel.shard import Shard


class Ulysses:
    """Attention of this rank's heads over the whole sequences.

    Raises:
        ContextParallelError: there are fewer query heads than ranks, or a bias.
    """

    def __init__(self, backend: AttentionBackend, shard: Shard, layout: MaskLayout, request: AttentionRequest) -> None:
        if request.heads < shard.ranks:
            raise ContextParallelError(
                f"method ulysses needs a query head for each of {shard.ranks} ranks, got heads={request.heads}; "
                "use method='gather'"
            )
        if request.has_bias:
            raise ContextParallelError("method ulysses takes no bias, whose rows are split; use method='gather'")
        ranks, length = shard.ranks, layout.q_len
        q_heads = [torch.arange(request.heads * r // ranks, request.heads * (r + 1) // ranks) for r in range(ranks)]
        # A KV head that query heads of several ranks read goes to each of them.
        kv_heads = [(heads // request.group).unique() for heads in q_heads]
        mine, own = q_heads[shard.rank], kv_heads[shard.rank]
        reads = torch.searchsorted(own, mine // request.group)
        even = len(mine) % len(own) == 0 and torch.equal(reads, torch.arange(len(mine)) // (len(mine) // len(own)))
        self.reads = None if even else reads
        self.mine = mine
        self.needs_grad, self.needs_lse = request.needs_grad, request.needs_lse
        self.q_route, self.kv_route = (
            Route(shard.group, tuple(heads), shard.rows, 1, 2, (count, length), ranks > 1)
            for heads, count in ((q_heads, request.heads), (kv_heads, request.kv_heads))
        )
        part = dataclasses.replace(request, heads=len(mine), kv_heads=len(own) if even else len(mine))
        self.inner = prepare(backend, layout.select_heads(slice(int(mine[0]), int(mine[-1]) + 1)), part)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> AttentionResult:
        """``q``, ``k``, ``v`` of this rank's tokens and of all heads."""
        (q,), (k, v) = move(self.q_route, q), move(self.kv_route, k, v)
        wide_k, wide_v = (k, v) if self.reads is None else (x[:, self.reads.to(x.device)] for x in (k, v))
        own = None if sinks is None else sinks[self.mine.to(sinks.device)]
        result = self.inner(q, wide_k, wide_v, bias=bias, sinks=own)
        output = tie(result.output, q, k, v) if self.needs_grad and not result.output.requires_grad else result.output
        (output,) = move(self.q_route.back, output)
        lse = None
        if self.needs_lse:
            assert result.lse is not None
            (lse,) = move(self.q_route.back, result.lse)
        return AttentionResult(output, lse)
