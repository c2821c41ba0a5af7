"""What one of several structures lets be seen, with the blocks of it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn._layout.indexing import pick
from polyattn._layout.lowering import find_table
from polyattn._layout.structure import MaskMod, Structure
from polyattn._layout.structured import StructuredMask
from polyattn._layout.tables import Table
from polyattn._layout.token_positions import agreed
from polyattn._layout.unite import unite
from polyattn._layout.windows import Sides

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

    def replace(self, **changes: Tensor) -> UnionMask:
        """The union with other tensors, by the names of :meth:`tensors`."""
        parts = []
        for i, (mask, active) in enumerate(self.parts):
            own = {name: changes[key] for name in mask.tensors() if (key := f"parts[{i}].{name}") in changes}
            parts.append(Part(mask.replace(**own), changes.get(f"parts[{i}].active_queries", active)))
        return UnionMask(tuple(parts))

    def axes(self, name: str) -> str:
        """As in the parts."""
        field = name.rpartition(".")[2]
        return "BQ" if field == "active_queries" else self.parts[0].mask.axes(field)

    def words(self) -> dict[str, str]:
        """The features that a backend needs for it, each with what was asked for."""
        found = {word: text for part in self.parts for word, text in part.mask.words().items()}
        return {**found, "union": f"{len(self.parts)} structures"}

    def rules(self) -> list[str]:
        """The rules in words for people."""
        return [" | ".join(f"({', '.join(part.mask.rules())})" for part in self.parts)]

    def narrowed(self, sides: Sides) -> UnionMask | None:
        """Each part under a window too."""
        masks = [part.mask.narrowed(sides) for part in self.parts]
        found = [mask for mask in masks if mask is not None]
        return self._of(found) if len(found) == len(masks) else None

    def in_positions(self, q_len: int, kv_len: int, device: torch.device | None) -> UnionMask:
        """The same with the positions of queries and keys as tensors."""
        return self._of([part.mask.in_positions(q_len, kv_len, device) for part in self.parts])

    @property
    def placed(self) -> bool:
        """Whether every part says itself where its queries and keys stand."""
        return all(part.mask.placed for part in self.parts)

    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions of queries and keys where all parts have the same ones."""
        (q, k), *others = (part.mask.places() for part in self.parts)
        return (q, k) if all(other[0] is q and other[1] is k for other in others) else (None, None)

    def token_positions(self, q_len: int, kv_len: int) -> Tensor:
        """``Int[B|1, Q]``, the one answer of all parts."""
        return agreed([part.mask.token_positions(q_len, kv_len) for part in self.parts])

    def _of(self, masks: Sequence[StructuredMask]) -> UnionMask:
        """The union of other masks with the active queries of these parts."""
        return UnionMask(tuple(part._replace(mask=mask) for part, mask in zip(self.parts, masks, strict=True)))

    def rows(self, q_len: int, kv_len: int, start: int, stop: int, device: torch.device | None) -> Tensor:
        """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, 1, stop - start, K]``."""
        seen = []
        for mask, active in self.parts:
            rows = mask.rows(q_len, kv_len, start, stop, device)
            seen.append(rows if active is None else rows & active[:, None, start:stop, None])
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
