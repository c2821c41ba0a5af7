"""Moving rows of tensors between ranks, with gradients that come back the same way.

A route says which indices (along one dimension) go to which rank and where what arrives belongs. The reverse of a route
adds up what several ranks return for one row, in the order of ranks and in FP32 or wider, so that a run repeats its
bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """An exchange along two dimensions: what is picked from one of mine lands in one of the result.

    Attributes:
        group: the process group.
        pick: for each rank, the indices of mine that it gets.
        place: for each rank, where what it sends lands.
        pick_dim, place_dim: the dimensions that these index.
        lengths: how many indices ``pick_dim`` and ``place_dim`` have: mine before, the result's after.
        moves: whether any rank sends another one anything; alike on all ranks.
    """

    group: Any
    pick: tuple[Tensor, ...]
    place: tuple[Tensor, ...]
    pick_dim: int
    place_dim: int
    lengths: tuple[int, int]
    moves: bool = True

    @functools.cached_property
    def back(self) -> Route:
        """The way back."""
        return Route(self.group, self.place, self.pick, self.place_dim, self.pick_dim, self.lengths[::-1], self.moves)

    @functools.cached_property
    def once(self) -> bool:
        """Whether no place is filled from two ranks, so that rows are copied and not added up."""
        places = torch.cat(self.place)
        return len(places.unique()) == len(places)

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send and receive, all tensors in one message to each rank."""
        me = dist.get_rank(self.group)
        high = torch.promote_types(tensors[0].dtype, torch.float32)
        pieces = [[x.index_select(self.pick_dim, at.to(x.device)) for x in tensors] for at in self.pick]
        shapes = [[self._arriving(x, len(at)) for x in tensors] for at in self.place]
        if self.moves:
            sent = [[] if r == me else [piece.flatten() for piece in row] for r, row in enumerate(pieces)]
            sizes = [0 if r == me else sum(map(_size, row)) for r, row in enumerate(shapes)]
            flat = torch.cat([tensors[0].new_empty(0), *(piece for row in sent for piece in row)])
            arrived = flat.new_empty(sum(sizes))
            counts = [sum(piece.numel() for piece in row) for row in sent]
            dist.all_to_all_single(arrived, flat, sizes, counts, group=self.group)
            for rank, buffer in enumerate(arrived.split(sizes)):
                if rank != me:
                    parts = buffer.split([_size(shape) for shape in shapes[rank]])
                    pieces[rank] = [part.view(shape) for part, shape in zip(parts, shapes[rank], strict=True)]
        once = self.once
        results = []
        for i, x in enumerate(tensors):
            whole = x.new_zeros(self._whole(x), dtype=x.dtype if once else high)
            for row, at in zip(pieces, self.place, strict=True):
                add = whole.index_copy_ if once else whole.index_add_
                add(self.place_dim, at.to(x.device), row[i].to(whole.dtype))
            results.append(whole.to(x.dtype))
        return tuple(results)

    def _arriving(self, x: Tensor, count: int) -> list[int]:
        shape = self._whole(x)
        shape[self.place_dim] = count
        return shape

    def _whole(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        if self.pick_dim != self.place_dim:
            shape[self.pick_dim] = len(self.pick[dist.get_rank(self.group)])
        shape[self.place_dim] = self.lengths[1]
        return shape


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        return route.run(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.route.back.run(grads))


def move(route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``route.run``, differentiable: the gradients take the way back."""
    result: tuple[Tensor, ...] = _Move.apply(route, *tensors)
    return result


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [torch.empty_like(x, device="meta") for x in others]
        ctx.device = output.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros_like(x, device=ctx.device) for x in ctx.like))


def tie(output: Tensor, *others: Tensor) -> Tensor:
    """``output``, whose backward reaches ``others`` with zeros, so that no rank misses an exchange in backward."""
    result: Tensor = _Tie.apply(output, *others)
    return result


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
