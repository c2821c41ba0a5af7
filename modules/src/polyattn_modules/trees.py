"""Rows with common beginnings packed into one row of a tree, in which a shared prefix stands once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout
from polyattn.messages import shown


class NextTokens(NamedTuple):
    """Every prediction of a next token in the rows, each once.

    Attributes:
        source: ``Int64[N]``, the place in the packed row whose output predicts.
        target: ``Int64[N]``, the token that follows.
        weight: ``Int64[N]``, how many of the rows make this prediction.
    """

    source: Tensor
    target: Tensor
    weight: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class PackedTree:
    """What :func:`pack_tree` makes of rows.

    Attributes:
        tokens: ``Int64[1, Q]``, the tokens of all nodes, a node after the one that it goes on from.
        parents: the node before each node, -1 for a root.
        lengths: the number of tokens of each node.
        index: for each row, in the order given, where its tokens stand among ``tokens``: ``Int64[L]``.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    index: tuple[Tensor, ...]

    @functools.cached_property
    def layout(self) -> MaskLayout:
        """Who sees whom: ``MaskLayout.tree(parents, lengths)``, made once."""
        return MaskLayout.tree(self.parents, self.lengths).to(self.tokens.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """The position of each token in its rows, ``Int64[1, Q]``."""
        return self.layout.token_positions()

    def rows(self, values: Tensor) -> list[Tensor]:
        """What belongs to the tokens of each row: of ``[1, Q, ...]`` a list of ``[L, ...]``, differentiable.

        Raises:
            LayoutError: ``values`` does not have one entry for each token of the packed row.
        """
        if values.dim() < 2 or values.shape[:2] != self.tokens.shape:
            raise LayoutError(
                f"values must be [1, {self.tokens.shape[1]}, ...], one entry for each token of the tree, "
                f"got {list(values.shape)}"
            )
        return [values[0, index.to(values.device)] for index in self.index]

    def next_tokens(self) -> NextTokens:
        """The predictions of the rows, so that a loss over them is computed once for what they share.

        ``(loss(logits[0, source], target) * weight).sum() / weight.sum()`` is the mean over the rows' own predictions.
        """
        length, device = self.tokens.shape[1], self.tokens.device
        count = torch.zeros(length, dtype=torch.int64, device=device)
        source = torch.full_like(count, -1)
        for index in self.index:
            source[index[1:]] = index[:-1]
            count[index[1:]] += 1
        target = (source >= 0).nonzero()[:, 0]
        return NextTokens(source[target], self.tokens[0, target], count[target])


def pack_tree(rows: Sequence[Tensor | Sequence[int]], *, min_shared: int = 1) -> PackedTree:
    """Pack rows of tokens so that what several of them begin with stands once.

    Each row is a path of the tree that results, and what a model computes for it there (with ``layout`` and
    ``positions``) equals what it computes for the row alone.

    Args:
        rows: token ids of at least one row, none empty: lists of ints, or integer tensors ``[L]`` on one device.
        min_shared: how many tokens two rows must share at least to share them.

    Raises:
        LayoutError: an argument is something else; the message names the row.
    """
    if not isinstance(min_shared, int) or isinstance(min_shared, bool) or min_shared < 1:
        raise LayoutError(f"min_shared must be an int >= 1, got {shown(min_shared)}")
    given = [_as_row(place, row) for place, row in enumerate(rows)]
    if not given:
        raise LayoutError("rows must hold at least one row of tokens, got none")
    devices = {row.device for row in given}
    if len(devices) > 1:
        raise LayoutError(f"rows must lie on one device, got {', '.join(sorted(map(str, devices)))}")
    lists = [row.tolist() for row in given]
    order = sorted(range(len(lists)), key=lists.__getitem__)
    shared = [0, *(_common(lists[a], lists[b]) for a, b in itertools.pairwise(order))]
    shared = [length if length >= min_shared else 0 for length in shared]
    nodes = list(_nodes([len(lists[row]) for row in order], shared))
    tokens = [token for node in nodes for token in lists[order[node.row]][node.start : node.stop]]
    index: list[list[int]] = [[] for _ in lists]
    first = 0
    for node in nodes:
        for place in range(node.row, node.last):
            index[order[place]] += range(first, first + node.stop - node.start)
        first += node.stop - node.start
    device = given[0].device
    return PackedTree(
        torch.tensor([tokens], dtype=torch.int64, device=device),
        tuple(node.parent for node in nodes),
        tuple(node.stop - node.start for node in nodes),
        tuple(torch.tensor(places, dtype=torch.int64, device=device) for places in index),
    )


class _Node(NamedTuple):
    """Tokens ``start .. stop - 1`` of the sorted rows ``row .. last - 1``, behind node ``parent``."""

    parent: int
    row: int
    last: int
    start: int
    stop: int


def _nodes(lengths: Sequence[int], shared: Sequence[int]) -> Iterator[_Node]:
    """The nodes of sorted rows, of which row i shares its first ``shared[i]`` tokens with the row before it."""
    todo, number = [(0, len(lengths), 0, -1)], 0
    while todo:
        row, last, start, parent = todo.pop()
        stop = min(shared[row + 1 : last], default=lengths[row])
        if stop > start:
            yield _Node(parent, row, last, start, stop)
            parent, number = number, number + 1
        if last - row == 1:
            continue
        cuts = [row, *(place for place in range(row + 1, last) if shared[place] == stop), last]
        groups = [(a, b, stop, parent) for a, b in itertools.pairwise(cuts) if b - a > 1 or lengths[a] > stop]
        todo += reversed(groups)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two rows begin with alike."""
    most = min(len(one), len(other))
    low, high = 0, most
    while low < high:  # by halves, so that lists are compared in one step each
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _as_row(place: int, row: object) -> Tensor:
    if isinstance(row, Tensor):
        if row.dim() != 1 or row.dtype.is_floating_point or row.dtype.is_complex or row.dtype is torch.bool:
            raise LayoutError(f"rows[{place}] must be token ids Int[L], got {row.dtype} {list(row.shape)}")
        found = row.long()
    else:
        tokens = list(cast("Sequence[int]", row)) if isinstance(row, Sequence) and not isinstance(row, str) else [None]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise LayoutError(f"rows[{place}] must be token ids, a list of ints or a tensor Int[L], got {shown(row)}")
        found = torch.tensor(tokens, dtype=torch.int64)
    if not found.numel():
        raise LayoutError(f"rows[{place}] must hold at least one token, got none; leave the row out")
    return found
