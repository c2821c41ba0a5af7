"""Layouts of trees: rows that hold a shared prefix once, for all that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import check_int, ints
from polyattn._layout.indexing import ragged
from polyattn._layout.known import read_host
from polyattn._layout.operations import Combinable
from polyattn._layout.segments import Ints, read_rows
from polyattn._layout.structured import StructuredMask
from polyattn._layout.windows import Window

if TYPE_CHECKING:
    from typing_extensions import Self


class Trees(Combinable):
    """A layout with the constructors of trees."""

    @classmethod
    def tree(
        cls,
        parents: Ints,
        lengths: Ints,
        *,
        causal: bool = True,
        window: Window = None,
        active_queries: Tensor | None = None,
    ) -> Self:
        """Rows of nodes; a token sees the earlier tokens of its node and all tokens of the nodes above it.

        The position of a token is its depth: the number of tokens from the root to it. A window counts depths.

        Args:
            parents: the node before each node, an earlier one, or -1 for the root of a tree; a row may hold several.
                Ints of one row, one list per batch row, or an integer tensor ``[N]`` or ``[B, N]``.
            lengths: the number of tokens of each node, in the same forms. Nodes lie in the row in this order.
            causal: whether a query sees no later key of its node; ``False``: nodes are seen whole, both ways.
            window: how many depths a query sees, as :meth:`causal` takes it.
            active_queries: ``Bool[B|1, K]``.

        Raises:
            LayoutError: a parent does not come before its node, a length is negative, the two do not fit each other, or
                the rows have different numbers of tokens.
        """
        rows = _rows("parents", parents)
        sizes = _rows("lengths", lengths)
        if [len(row) for row in rows] != [len(row) for row in sizes]:
            raise LayoutError(
                f"lengths must have one entry for each of parents, got rows of {[len(row) for row in sizes]} and "
                f"{[len(row) for row in rows]} nodes"
            )
        for length in (length for row in sizes for length in row):
            check_int("every one of lengths", length)
        totals = [sum(row) for row in sizes]
        if len(set(totals)) > 1:
            raise LayoutError(
                f"lengths of every batch row must add up to one number, got {totals}; give the rest of a short row a "
                "node of its own with the parent -1"
            )
        check_int("what lengths add up to", totals[0] if totals else 0)
        tokens = [_tokens(*row) for row in zip(rows, sizes, strict=True)]
        depth, node, end = (torch.stack(columns) for columns in zip(*tokens, strict=True))
        mask = StructuredMask(
            causal=causal,
            window=window,
            q_positions=depth,
            kv_positions=depth,
            q_segments=node,
            kv_segments=node,
            kv_segment_ends=end,
        )
        known = read_host(mask, active_queries, sync=True)
        return cls(totals[0], totals[0], visibility=mask, active_queries=active_queries, _handed=known)

    @classmethod
    def shared_prefix(
        cls,
        prefix_length: int,
        response_lengths: Sequence[int] | Tensor,
        *,
        window: Window = None,
        active_queries: Tensor | None = None,
    ) -> Self:
        """One row: a prefix, then responses that each see it and themselves, causally. A tree of one level.

        Args:
            prefix_length: number of tokens of the prefix.
            response_lengths: of the responses, ints or ``Int[N]``.
            window: how many depths a query sees, as :meth:`causal` takes it.
            active_queries: ``Bool[1, K]``.
        """
        check_int("prefix_length", prefix_length)
        given = response_lengths.tolist() if isinstance(response_lengths, Tensor) else response_lengths
        responses = ints("response_lengths", given)
        for length in responses:
            check_int("every one of response_lengths", length)
        parents, lengths = [-1] + [0] * len(responses), [prefix_length, *responses]
        return cls.tree(parents, lengths, window=window, active_queries=active_queries)


def _rows(name: str, value: Ints) -> list[list[int]]:
    if not isinstance(value, Tensor) and any(isinstance(row, (list, tuple)) for row in value):
        return [ints(name, row) for row in cast("Sequence[Sequence[int]]", value)]
    table, rows = read_rows(name, value, validate=True)
    return cast("list[list[int]]", table[0].tolist()) if rows is None else rows


def _tokens(parents: list[int], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The depth of each token, its node in preorder, and one beyond the last node below that, ``Int64[K]``."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise LayoutError(
                f"parents must each be an earlier node or -1 for a root, got {parent} for node {node}; list a node "
                "after the one that it goes on from"
            )
    below = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            below[parents[node]] += below[node]
    number, depth, free, roots = [0] * len(parents), [0] * len(parents), [0] * len(parents), 0
    for node, parent in enumerate(parents):
        if parent < 0:
            number[node], roots = roots, roots + below[node]
        else:
            number[node], depth[node] = free[parent], depth[parent] + lengths[parent]
            free[parent] += below[node]
        free[node] = number[node] + 1
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    columns = torch.tensor([depth, number, below], dtype=torch.int64, device="cpu").reshape(3, -1)
    of, place = ragged(sizes, sum(lengths))
    depths, numbers, nodes = columns[:, of]
    return depths + place, numbers, numbers + nodes
