"""What each method would move and compute, without processes: on the intervals of a layout, in well under a second."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyattn import AttentionRequest, MaskLayout
from polyattn.messages import shown
from polyattn_context_parallel.attention import METHODS, check_choice, chosen
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.intervals import Demand
from polyattn_context_parallel.shard import check_layouts, share_out

#: Assumed rates of one rank: floating-point operations, bytes inside a node and between nodes, each a second.
FLOPS, INSIDE, BETWEEN = 450e12, 360e9, 45e9


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one method asks of the rank that has most of it, forward and backward of one layer.

    Attributes:
        method: ``"all-gather"`` (every key to every rank, for comparison), ``"gather"``, ``"ring"`` or ``"ulysses"``.
        sent: bytes that a rank sends to others.
        memory: bytes of keys and values that a rank holds for its backward.
        seconds: predicted, without overlap of computing and sending, at :data:`FLOPS`, :data:`INSIDE`,
            :data:`BETWEEN`.
    """

    method: str
    sent: int
    memory: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Who does what.

    Attributes:
        ranks: number of ranks.
        balance: the rule that shares out the tokens.
        method: the method asked for, or the one that ``auto`` is.
        tokens: int64 ``[ranks]``.
        pairs: int64 ``[ranks]``: visible pairs of queries and keys, over all batch rows of the layout.
        keys: int64 ``[ranks, ranks]``: how many keys of rank j the queries of rank i see.
        costs: of each method that can.
    """

    ranks: int
    balance: str
    method: str
    tokens: Tensor
    pairs: Tensor
    keys: Tensor
    costs: tuple[Cost, ...]

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 where there are none."""
        mean = self.pairs.double().mean().item()
        return self.pairs.max().item() / mean if mean else 1.0

    def __str__(self) -> str:
        received = self.keys.sum(1) - self.keys.diagonal()
        lines = [
            f"{self.tokens.sum().item()} tokens on {self.ranks} ranks, balance {self.balance}, method {self.method}",
            f"visible pairs: {self.pairs.sum().item()}, worst rank over mean {self.imbalance:.3f}",
            f"keys from other ranks: at most {received.max().item()}",
            f"{'method':<12}{'MB sent':>12}{'MB held':>12}{'ms a layer':>12}",
        ]
        for cost in self.costs:
            lines.append(
                f"{cost.method:<12}{cost.sent / 1e6:>12.3f}{cost.memory / 1e6:>12.3f}{cost.seconds * 1e3:>12.3f}"
            )
        return "\n".join(lines)


def plan(
    layout: MaskLayout,
    ranks: int,
    *,
    request: AttentionRequest,
    node: int = 8,
    balance: str = "auto",
    method: str = "auto",
) -> Plan:
    """What context parallelism would do with a layout; no process group is needed.

    A layout without bands is counted as if every query saw every key, and so are inactive queries among active ones.

    Args:
        layout: the mask of the whole sequences.
        ranks: number of ranks, at least 1.
        request: of the whole sequences' attention: batch, heads, widths and dtype are read.
        node: number of ranks that share a node.
        balance: see :meth:`Shard.of`.
        method: see :class:`ContextParallelScope`.

    Raises:
        ContextParallelError: an argument is out of range, or the method cannot run on so many ranks.
    """
    check_layouts({"": layout})
    for name, value in (("ranks", ranks), ("node", node)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ContextParallelError(f"{name} must be an int >= 1, got {shown(value)}")
    check_choice("method", method, ("auto", *METHODS))
    if method == "ulysses" and request.heads < ranks:
        raise ContextParallelError(
            f"method ulysses needs a query head for each of {ranks} ranks, got heads={request.heads}"
        )
    balance, partition = share_out([layout], ranks, balance)
    demand, tokens = Demand.of(layout, partition), partition.counts()
    rows = request.batch // layout.batch if layout.batch else 1
    width = (request.head_dim + request.v_head_dim) * request.dtype.itemsize * request.batch
    computing = 7.0 * demand.pairs.double() * rows * request.heads * (request.head_dim + request.v_head_dim) / FLOPS

    def cost(name: str, keys: Tensor, held: Tensor) -> Cost:
        """Of keys that go from rank j (column) to rank i (row), whose gradients come back."""
        token = request.kv_heads * width
        traffic = (keys + keys.T) * token
        return Cost(name, int(traffic.sum(1).max()), int(held.max()) * token, _slowest(computing, traffic, node))

    away = 1 - torch.eye(ranks, dtype=torch.int64)
    costs = [
        cost("all-gather", tokens.expand(ranks, ranks) * away, tokens.sum()[None]),
        cost("gather", demand.keys * away, demand.keys.sum(1)),
        # The backward fetches the keys again.
        _ring(request.kv_heads * width, demand.keys * away, tokens, computing, node),
    ]
    if request.heads >= ranks:
        costs.append(_ulysses(request, tokens, int(demand.pairs.sum()) * rows, node))
    found = chosen(layout, request, ranks) if method == "auto" else method
    return Plan(ranks, balance, found, tokens, demand.pairs, demand.keys, tuple(costs))


def _ring(token: int, keys: Tensor, tokens: Tensor, computing: Tensor, node: int) -> Cost:
    traffic = (2 * keys.T + keys) * token
    held = int((tokens + keys.max(1).values).max()) * token
    return Cost("ring", int(traffic.sum(1).max()), held, _slowest(computing * 4.5 / 3.5, traffic, node))


def _ulysses(request: AttentionRequest, tokens: Tensor, pairs: int, node: int) -> Cost:
    ranks = len(tokens)
    edges = torch.arange(ranks + 1) * request.heads // ranks
    heads = edges.diff()
    kv_heads = (edges[1:] - 1) // request.group - edges[:-1] // request.group + 1
    size = request.dtype.itemsize * request.batch
    both = request.head_dim + request.v_head_dim
    # From rank i to rank j: queries, keys and values of j's heads; outputs (and, in backward, all of these) of i's.
    there = tokens[:, None] * (heads * request.head_dim + kv_heads * both)
    back = tokens[None] * heads[:, None] * request.v_head_dim
    one_way = (there + back) * size
    one_way.fill_diagonal_(0)
    traffic = one_way + one_way.T
    computing = 7.0 * pairs * heads.double() * both / FLOPS
    held = int(tokens.sum()) * int(kv_heads.max()) * both * size
    return Cost("ulysses", int(traffic.sum(1).max()), held, _slowest(computing, traffic, node))


def _slowest(computing: Tensor, traffic: Tensor, node: int) -> float:
    """Seconds of the slowest rank, which computes and then sends."""
    at = torch.arange(len(traffic)) // node
    inside = torch.where(at[:, None] == at, traffic, 0).sum(1).double()
    between = traffic.sum(1).double() - inside
    return float((computing + inside / INSIDE + between / BETWEEN).max())
