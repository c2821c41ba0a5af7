"""Documents packed into rows: four ways to say where they lie, one result: the segment of every token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Copied, check_int, check_ints, ints, read
from polyattn.messages import shown

Ints = Tensor | Sequence[int] | Sequence[Sequence[int]]


def from_lengths(lengths: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the lengths of the documents of each row."""
    table, rows = read_rows("lengths", lengths, fill=lambda _: 0, validate=validate)
    rows = _numbers(table, rows)
    if rows is not None:
        _check_least("lengths", rows)
        # Sums of ints, which overflow nowhere.
        kv_len = _common_total("lengths", "add up to", [sum(row) for row in rows], kv_len)
    return _segments("lengths", table.map(lambda lengths: lengths.cumsum(1)), kv_len)


def from_cu_seqlens(cu_seqlens: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the offsets ``0, l1, l1 + l2, ...`` of each row."""
    table, rows = read_rows("cu_seqlens", cu_seqlens, fill=lambda row: row[-1] if row else 0, validate=validate)
    if table.tensor.shape[1] == 0:
        raise LayoutError("cu_seqlens must hold at least the offset 0, got no offsets")
    rows = _numbers(table, rows)
    if rows is not None:
        if any(row[0] != 0 for row in rows):
            raise LayoutError(f"cu_seqlens must start at 0, got {[row[0] for row in rows]}")
        if any(after < before for row in rows for before, after in itertools.pairwise(row)):
            raise LayoutError(f"cu_seqlens must never decrease, got {rows}; lengths go into lengths=")
        kv_len = _common_total("cu_seqlens", "end at", [row[-1] for row in rows], kv_len)
    return _segments("cu_seqlens", table.map(lambda offsets: offsets[:, 1:]), kv_len)


def from_document_ids(document_ids: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the document of each token."""
    table, rows = read_rows("document_ids", document_ids, validate=validate)
    if rows is None and table.values is not None and table.values.numel():
        rows = [[int(table.values.min())]]
    hint = "; give padding an id of its own and say with active_queries= that its queries do not count"
    _check_least("document_ids", rows or (), hint)
    return _of_length("document_ids", table, kv_len)


def from_position_ids(position_ids: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from positions that restart at 0 with each document and step by 1."""
    if isinstance(position_ids, Tensor) and position_ids.dim() == 3:
        raise LayoutError(
            f"position_ids must be [B, K], got shape {list(position_ids.shape)}: of multi-axis positions [axes, B, K] "
            "pass the text axis alone (position_ids[0], say), or pass lengths= or document_ids="
        )
    table, rows = read_rows("position_ids", position_ids, validate=validate)
    values = table.values
    if rows is None and values is not None:
        fine = (values == 0) | (values == torch.nn.functional.pad(values[:, :-1], (1, 0), value=-1) + 1)
        rows = [] if bool(fine.all()) else values.tolist()
    _check_steps(rows or ())
    return _of_length("position_ids", table.map(lambda ids: (ids == 0).cumsum(1, dtype=torch.int32)), kv_len)


def places(documents: Copied, *, unread: bool) -> Copied | None:
    """The place of each token in its document, where the distances of the row are others.

    Args:
        documents: ``Int[B, K]``.
        unread: whether places are wanted of documents whose values are not known on the host.
    """
    if documents.values is None:
        return documents.map(ranks) if unread else None
    return None if bool(together(documents.values)) else documents.map(ranks)


def ranks(documents: Tensor) -> Tensor:
    """How many earlier tokens of its row each token shares its document with, ``Int[B, K]``."""
    order = documents.argsort(dim=1, stable=True)
    ordered = documents.gather(1, order)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(order)
    starts = (index == 0) | (ordered != ordered.roll(1, 1))  # every size is that of the row, which may be symbolic
    rank = index - torch.where(starts, index, 0).cummax(1).values
    return torch.empty_like(rank).scatter_(1, order, rank)


def together(documents: Tensor, live: Tensor | None = None) -> Tensor:
    """Whether the tokens of each document lie together, ``Bool[]``, so that they have the distances of the row.

    Args:
        documents: ``Int[B, K]``.
        live: ``Bool[B, K]``, the tokens that count; ``None``: all.
    """
    resumed = (documents != documents.roll(1, 1)) & (ranks(documents) != 0)
    return ~(resumed if live is None else resumed & live).any()


def lengths_within(name: str, lengths: Sequence[int] | Tensor, kv_len: int, *, validate: bool) -> Copied:
    """``Int[B]`` of numbers of keys, each in ``0 .. kv_len``."""
    numbers = None if isinstance(lengths, Tensor) else ints(name, lengths)
    tensor = lengths if isinstance(lengths, Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    check_ints(name, tensor, "[B]", (1,))
    copied = read(name, tensor, validate=validate and numbers is None)
    if numbers is None and copied.values is not None:
        numbers = copied.values.tolist()
    if numbers is not None and any(number < 0 or number > kv_len for number in numbers):
        raise LayoutError(f"{name} must lie in 0 .. kv_len, got {numbers} and kv_len={kv_len}")
    return copied


def valid_keys(lengths: Sequence[int] | Tensor, kv_len: int | None, side: str, *, validate: bool) -> Copied:
    """``Bool[B, K]``, True for the first (``side="right"``: padding follows) or last ``lengths`` keys of each row."""
    if kv_len is None:
        raise LayoutError("kv_len must be given with lengths, got None")
    check_int("kv_len", kv_len)
    if side not in ("left", "right"):
        raise LayoutError(f"side must be 'left' or 'right', where the padding is, got {shown(side)}")

    def valid(count: Tensor) -> Tensor:
        keys = torch.arange(kv_len, dtype=count.dtype, device=count.device)
        return keys < count[:, None] if side == "right" else keys >= kv_len - count[:, None]

    return lengths_within("lengths", lengths, kv_len, validate=validate).map(valid)


def read_rows(
    name: str, value: object, fill: Callable[[list[int]], int] | None = None, *, validate: bool
) -> tuple[Copied, list[list[int]] | None]:
    """``value`` as an integer tensor of rows, and as ints where it was given so; one list or 1-D tensor is one row.

    Ints are known while tracing too, where no tensor can be read.

    Args:
        name: of the argument, for the message.
        value: a tensor of rank 1 or 2, ints, or one sequence of ints per batch row.
        fill: gives the number that lengthens a short list; ``None``: lists of different lengths are refused.
        validate: whether the values of a tensor must be readable.
    """
    if isinstance(value, Tensor):
        check_ints(name, value, "[N] or [B, N]", (1, 2))
        return read(name, value if value.dim() == 2 else value[None], validate=validate), None
    nested = isinstance(value, Sequence) and any(isinstance(row, Iterable) for row in value)
    lists = [ints(name, row) for row in cast("Sequence[object]", value)] if nested else [ints(name, value)]
    width = max(map(len, lists))
    if fill is None and any(len(row) != width for row in lists):
        raise LayoutError(f"{name} must have rows of one length, got {[len(row) for row in lists]}")
    rows = [row + [0 if fill is None else fill(row)] * (width - len(row)) for row in lists]
    tensor = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), width)
    return read(name, tensor, validate=False), rows


def _numbers(table: Copied, rows: list[list[int]] | None) -> list[list[int]] | None:
    """The numbers as ints, where they are known."""
    if rows is not None or table.values is None:
        return rows
    numbers: list[list[int]] = table.values.tolist()
    return numbers


def _check_least(name: str, rows: Iterable[list[int]], hint: str = "") -> None:
    negative = [number for row in rows for number in row if number < 0]
    if negative:
        raise LayoutError(f"{name} must be >= 0, got {min(negative)}{hint}")


def _check_steps(rows: Iterable[list[int]]) -> None:
    for at, row in enumerate(rows):
        for column, number in enumerate(row):
            if number not in (0, row[column - 1] + 1 if column else 0):
                before = f" after {row[column - 1]}" if column else " first"
                raise LayoutError(
                    f"position_ids must restart at 0 with each document and step by 1 inside it, got {number}{before} "
                    f"in row {at}, column {column}; documents at other positions are described by lengths=, "
                    "cu_seqlens= or document_ids="
                )


def _common_total(name: str, verb: str, found: list[int], kv_len: int | None) -> int:
    check_int(f"what {name} {verb}", max([0, *found]))
    if kv_len is None:
        if len(set(found)) != 1:
            raise LayoutError(
                f"{name} of every batch row must {verb} one number, got {found}; give the rest of a short row a "
                "document of its own"
            )
        return int(found[0])
    if any(total != kv_len for total in found):
        got = found[0] if len(found) == 1 else found
        raise LayoutError(
            f"{name} must {verb} kv_len, got {got} and kv_len={kv_len}; give the rest of a row a document of its own"
        )
    return kv_len


def _segments(name: str, ends: Copied, kv_len: int | None) -> Copied:
    """The segment of each token, given where each document of its row ends; empty documents take no token."""
    if kv_len is None:
        raise LayoutError(f"kv_len must be given with validate=False, where {name} is not read, got None")

    def segments(ends: Tensor) -> Tensor:
        tokens = torch.arange(kv_len, dtype=ends.dtype, device=ends.device).expand(ends.shape[0], kv_len)
        return torch.searchsorted(ends.contiguous(), tokens.contiguous(), right=True, out_int32=True)

    return ends.map(segments)


def _of_length(name: str, ids: Copied, kv_len: int | None) -> Copied:
    if kv_len is not None and ids.tensor.shape[1] != kv_len:
        raise LayoutError(f"{name} must have one entry per token, got {ids.tensor.shape[1]} and kv_len={kv_len}")
    return ids
