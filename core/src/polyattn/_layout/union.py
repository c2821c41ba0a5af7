"""What one of several structures lets be seen, with the blocks of it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._layout.indexing import pick
from polyattn._layout.lowering import find_table
from polyattn._layout.structured import MaskMod, Structure, StructuredMask
from polyattn._layout.tables import Table
from polyattn._layout.unite import unite

#: A union of more parts than this is written as a dense mask or a function.
MAX_PARTS = 16


class Part(NamedTuple):
    """One structure, and the queries that see anything through it (``Bool[B|1, Q]``; ``None``: all)."""

    mask: StructuredMask
    active: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class UnionMask(Structure):
    """A query sees a key where one of the parts lets it be seen; made by ``layout | layout``."""

    parts: tuple[Part, ...]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all parts by name: ``parts[0].q_positions``, ``parts[0].active_queries``."""
        found: dict[str, Tensor] = {}
        for i, (mask, active) in enumerate(self.parts):
            named = mask.tensors() if active is None else {**mask.tensors(), "active_queries": active}
            found.update({f"parts[{i}].{name}": value for name, value in named.items()})
        return found

    def given(self) -> frozenset[str]:
        """The fields that are set in any part."""
        return functools.reduce(operator.or_, [part.mask.given() for part in self.parts])

    def replace(self, **changes: Tensor) -> UnionMask:
        """The union with other tensors, by the names of :meth:`tensors`."""
        parts = []
        for i, (mask, active) in enumerate(self.parts):
            own = {name: changes[key] for name in mask.tensors() if (key := f"parts[{i}].{name}") in changes}
            parts.append(Part(mask.replace(**own), changes.get(f"parts[{i}].active_queries", active)))
        return UnionMask(tuple(parts))

    def map(
        self,
        structure: Callable[[StructuredMask], StructuredMask],
        row: Callable[[Tensor | None], Tensor | None] | None = None,
    ) -> UnionMask:
        """The union of ``structure`` of the parts, their active queries as they are or as ``row`` gives them."""
        parts = ((structure(mask), active if row is None else row(active)) for mask, active in self.parts)
        return UnionMask(tuple(Part(*part) for part in parts))

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, stop - start, K]``."""
        seen = []
        for mask, active in self.parts:
            rows = mask.rows(q_len, kv_len, start, stop, device)
            seen.append(rows if active is None else rows & active[:, start:stop, None])
        return functools.reduce(operator.or_, seen)

    def mod(self, q_len: int, kv_len: int) -> MaskMod:
        """The union as a FlexAttention ``mask_mod``; reads nothing on the host."""
        mods = [(mask.mod(q_len, kv_len), active) for mask, active in self.parts]

        def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = [
                of(b, h, q_idx, kv_idx) if active is None else of(b, h, q_idx, kv_idx) & pick(active, b, q_idx)
                for of, active in mods
            ]
            return functools.reduce(operator.or_, seen)

        return mod

    def find_table(self, q_len: int, kv_len: int, rows: int, active: Tensor | None) -> Table | None:
        """The blocks of the union, no pair in two of them; ``None`` where a part has none."""
        tables: list[Table] = []
        for mask, shown in parts_of(self, active):
            table = find_table(mask, q_len, kv_len, rows, shown, exact=True)
            if table is None:
                return None
            tables.append(table)
        return unite(tables, q_len, kv_len)


def parts_of(visibility: object, active: Tensor | None) -> tuple[Part, ...]:
    """The parts of a union that a structure is made of; none of anything else.

    ``active`` are the queries of the whole that see anything.
    """
    if isinstance(visibility, StructuredMask):
        return (Part(visibility, active),)
    if not isinstance(visibility, UnionMask):
        return ()
    if active is None:
        return visibility.parts
    return tuple(Part(mask, active if own is None else own & active) for mask, own in visibility.parts)
