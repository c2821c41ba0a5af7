"""Keys that come from one rank after the other and are let go again: memory of two parts, whatever the length.

The parts are merged by their log-sum-exp. The backward fetches the keys again and runs each part again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyattn import AttentionBackend, AttentionRequest, AttentionResult, MaskLayout, PreparedAttention, apply_sinks
from polyattn.select import prepare
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.exchange import Route
from polyattn_context_parallel.gather import keys_route
from polyattn_context_parallel.intervals import Demand
from polyattn_context_parallel.shard import Shard


class Step(NamedTuple):
    """What comes from one rank, and attention to it; ``None`` where this rank's queries see nothing of it."""

    route: Route
    prepared: PreparedAttention | None


class Ring:
    """Attention of this rank's queries to the needed keys of one rank after the other.

    Raises:
        ContextParallelError: there is a bias.
    """

    def __init__(self, backend: AttentionBackend, shard: Shard, layout: MaskLayout, request: AttentionRequest) -> None:
        if request.has_bias:
            raise ContextParallelError("method ring takes no bias; use method='gather'")
        self.needs_lse = request.needs_lse
        part = dataclasses.replace(request, has_sinks=False, needs_lse=True, needs_lse_grad=request.needs_grad)
        demand = Demand.of(layout, shard.partition)
        needed, owner = demand.needed(shard.rank), shard.partition.owner_of()
        queries = layout.select_queries(shard.mine)
        self.steps = []
        for source in range(shard.ranks):
            keys = needed[owner[needed] == (shard.rank - source) % shard.ranks]
            alive = len(keys) and len(shard.mine)
            prepared = prepare(backend, queries.select_keys(keys), part) if alive else None
            self.steps.append(Step(keys_route(shard, demand, source), prepared))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> AttentionResult:
        """``q``, ``k``, ``v`` of this rank's tokens."""
        output, lse = _Ring.apply(self.steps, q, k, v)
        if sinks is not None:
            output = apply_sinks(output, lse, sinks)
        return AttentionResult(output, lse if self.needs_lse else None)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: list[Step], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        high = torch.promote_types(q.dtype, torch.float32)
        output = q.new_zeros(*q.shape[:3], v.shape[3], dtype=high)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=high)
        for step in steps:
            keys, values = step.route.run((k, v))
            if step.prepared is not None:
                part = step.prepared(q, keys, values)
                assert part.lse is not None
                total = torch.logaddexp(lse, part.lse)
                base = torch.where(total == -torch.inf, 0.0, total)
                output = (lse - base).exp()[..., None] * output + (part.lse - base).exp()[..., None] * part.output
                lse = total
        ctx.steps = steps
        ctx.save_for_backward(q, k, v, output, lse)
        return output.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        grad = grad.to(output.dtype)
        base = torch.where(lse == -torch.inf, 0.0, lse)
        rest = grad_lse - (grad * output).sum(-1)
        sums = [torch.zeros_like(x, dtype=output.dtype) for x in (q, k, v)]
        for step in ctx.steps:
            arrived = step.route.run((k, v))
            found = [torch.zeros_like(x) for x in arrived]
            if step.prepared is not None:
                inputs = [x.detach().requires_grad_() for x in (q, *arrived)]
                with torch.enable_grad():
                    part = step.prepared(*inputs)
                weight = (part.lse.detach() - base).exp()
                own = weight * ((grad * part.output.detach()).sum(-1) + rest)
                into = ((weight[..., None] * grad).to(part.output.dtype), own)
                dq, *found = torch.autograd.grad((part.output, part.lse), inputs, into)
                sums[0] += dq
            for total, returned in zip(sums[1:], step.route.back.run(tuple(found)), strict=True):
                total.add_(returned)
        return (None, *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)))
