"""Documents packed into rows: four ways to say where they lie, one result: the segment of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Copied, check_int, check_ints, ints, read
from polyattn._numbers import shown

Ints = Tensor | Sequence[int] | Sequence[Sequence[int]]


def from_lengths(lengths: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the lengths of the documents of each row."""
    rows = as_rows("lengths", lengths, fill=lambda _: 0)
    table = read("lengths", rows, validate=validate)
    values = table.values
    if values is not None:
        if (values < 0).any():
            raise LayoutError(f"lengths must be >= 0, got {int(values.min())}")
        # Sums of ints, which overflow nowhere.
        kv_len = _common_total("lengths", "add up to", [sum(row) for row in values.tolist()], kv_len)
    return _segments("lengths", table.map(lambda lengths: lengths.cumsum(1)), kv_len)


def from_cu_seqlens(cu_seqlens: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the offsets ``0, l1, l1 + l2, ...`` of each row."""
    rows = as_rows("cu_seqlens", cu_seqlens, fill=lambda row: row[-1] if row else 0)
    table = read("cu_seqlens", rows, validate=validate)
    values = table.values
    if table.tensor.shape[1] == 0:
        raise LayoutError("cu_seqlens must hold at least the offset 0, got no offsets")
    if values is not None:
        if (values[:, 0] != 0).any():
            raise LayoutError(f"cu_seqlens must start at 0, got {values[:, 0].tolist()}")
        if (values.diff(dim=1) < 0).any():
            raise LayoutError(f"cu_seqlens must never decrease, got {values.tolist()}; lengths go into lengths=")
        kv_len = _common_total("cu_seqlens", "end at", values[:, -1].tolist(), kv_len)
    return _segments("cu_seqlens", table.map(lambda offsets: offsets[:, 1:]), kv_len)


def from_document_ids(document_ids: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from the document of each token."""
    rows = as_rows("document_ids", document_ids)
    table = read("document_ids", rows, validate=validate)
    values = table.values
    if values is not None and (values < 0).any():
        raise LayoutError(
            f"document_ids must be >= 0, got {int(values.min())}; give padding an id of its own and say with "
            "active_queries= that its queries do not count"
        )
    return _of_length("document_ids", table, kv_len)


def from_position_ids(position_ids: Ints, kv_len: int | None, *, validate: bool) -> Copied:
    """Segments ``Int[B, K]`` from positions that restart at 0 with each document and step by 1."""
    if isinstance(position_ids, Tensor) and position_ids.dim() == 3:
        raise LayoutError(
            f"position_ids must be [B, K], got shape {list(position_ids.shape)}: of multi-axis positions [axes, B, K] "
            "pass the text axis alone (position_ids[0], say), or pass lengths= or document_ids="
        )
    rows = as_rows("position_ids", position_ids)
    table = read("position_ids", rows, validate=validate)
    values = table.values
    if values is not None:
        steps = (values[:, 1:] == values[:, :-1] + 1) | (values[:, 1:] == 0)
        fine = torch.cat([values[:, :1] == 0, steps], 1)
        if not fine.all():
            row, column = (~fine).nonzero()[0].tolist()
            before = f" after {int(values[row, column - 1])}" if column else " first"
            raise LayoutError(
                "position_ids must restart at 0 with each document and step by 1 inside it, got "
                f"{int(values[row, column])}{before} in row {row}, column {column}; documents at other positions are "
                "described by lengths=, cu_seqlens= or document_ids="
            )
    return _of_length("position_ids", table.map(lambda ids: (ids == 0).cumsum(1, dtype=torch.int32)), kv_len)


def lengths_within(name: str, lengths: Sequence[int] | Tensor, kv_len: int, *, validate: bool) -> Copied:
    """``Int[B]`` of numbers of keys, each in ``0 .. kv_len``."""
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(ints(name, lengths), dtype=torch.int64, device="cpu")
    check_ints(name, lengths, "[B]", (1,))
    copied = read(name, lengths, validate=validate)
    values = copied.values
    if values is not None and ((values < 0) | (values > kv_len)).any():
        raise LayoutError(f"{name} must lie in 0 .. kv_len, got {values.tolist()} and kv_len={kv_len}")
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


def as_rows(name: str, value: object, fill: Callable[[list[int]], int] | None = None) -> Tensor:
    """``value`` as an integer tensor of rows: one list or 1-D tensor is one row.

    Args:
        name: of the argument, for the message.
        value: a tensor of rank 1 or 2, ints, or one sequence of ints per batch row.
        fill: gives the number that lengthens a short list; ``None``: lists of different lengths are refused.
    """
    if isinstance(value, Tensor):
        check_ints(name, value, "[N] or [B, N]", (1, 2))
        return value if value.dim() == 2 else value[None]
    nested = isinstance(value, Sequence) and any(isinstance(row, Iterable) for row in value)
    lists = [ints(name, row) for row in cast("Sequence[object]", value)] if nested else [ints(name, value)]
    width = max(map(len, lists))
    if fill is None and any(len(row) != width for row in lists):
        raise LayoutError(f"{name} must have rows of one length, got {[len(row) for row in lists]}")
    rows = [row + [fill(row) if fill else 0] * (width - len(row)) for row in lists]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), width)


def _common_total(name: str, verb: str, found: list[int], kv_len: int | None) -> int:
    check_int(f"what {name} {verb}", max(found, default=0))
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
