"""What a layout is, and everything that it can be asked."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import hashlib
import operator
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Index, as_device, check_flag, check_int
from polyattn._layout.indexing import pick, positions, take
from polyattn._layout.known import Known, read_host
from polyattn._layout.sizes import infer_sizes
from polyattn._layout.structure import MaskMod, Structure
from polyattn._layout.structured import StructuredMask
from polyattn._layout.tables import Table, covered_keys, padded_intervals
from polyattn._layout.token_positions import agreed
from polyattn._layout.visibility import Visibility, dense_rows, held, moved, pinned, to_mod
from polyattn.messages import shown

if TYPE_CHECKING:
    from typing_extensions import Self

Device = torch.device | str
_L = TypeVar("_L", bound="LayoutBase")
#: Dense masks are computed in blocks of rows of about this many elements, which bounds their temporaries.
ROW_BLOCK = 2**22


def _everything() -> StructuredMask:
    # Neither one object for all layouts nor the class: torch.compile traces a function here.
    return StructuredMask()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayoutBase:
    """The fields of a layout and the questions to it; :class:`MaskLayout` adds pictures, operations, constructors."""

    q_len: int
    kv_len: int
    batch: int = cast("int", None)  # read off the tensors
    heads: int = cast("int", None)
    visibility: Visibility = dataclasses.field(default_factory=_everything)
    active_queries: Tensor | None = None
    validate: dataclasses.InitVar[bool] = True
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    _handed: dataclasses.InitVar[Known | None] = None
    _known: Known = dataclasses.field(init=False)
    #: Layouts whose queries these are, and which of them, where the visibility does not tell where they stand.
    _tokens: ClassVar[tuple[tuple[LayoutBase, Index], ...]] = ()

    def __post_init__(self, validate: bool, _handed: Known | None) -> None:
        check_flag("validate", validate)
        places = (self.q_positions, self.kv_positions)
        parts = (self.visibility, self.active_queries, places)
        batch, heads = infer_sizes(self.q_len, self.kv_len, self.batch, self.heads, *parts)
        known = _handed or read_host(self.visibility, self.active_queries, sync=validate)
        if not known.lowered and not (isinstance(self.visibility, Structure) and self.visibility.lazy):
            # Now: a layout that is an input of a graph has its blocks there only as a tensor that it holds already.
            known = known.lower(self.q_len, self.kv_len, batch)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "_known", known)

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; ``None`` for a layout that holds none and serves every device."""
        if self.active_queries is not None:
            return self.active_queries.device
        tensors = held(self.visibility)
        return tensors[0].device if tensors else None

    @property
    def may_have_fully_masked_rows(self) -> bool:
        """False when the host knows that every query sees a key; True also when it does not know."""
        known = self._known
        return (known if known.lowered else self._lowered()).may_have_fully_masked_rows

    @property
    def may_have_unseen_keys(self) -> bool:
        """False when the host knows that every key is seen by a query, or that unseen ones are finite; else True."""
        finite = isinstance(self.visibility, Structure) and self.visibility.finite
        return not finite and self._lowered().may_have_unseen_keys

    @property
    def max_runs(self) -> int | None:
        """The largest number of unbroken runs of keys that a query sees, as its blocks list them.

        1 for a layout that shows nothing; ``None`` where there are no blocks, and while tracing where it is above 1.
        """
        table = self._lowered().table
        if table is None or (torch.compiler.is_compiling() and not table.one_run):
            return None
        return table.runs

    def to_bands(self, max_runs: int | None = None) -> Tensor | None:
        """The structure as rectangles: an int64 CPU table ``[N, 7]``, or ``None`` for what has no such form.

        Columns ``batch, q_start, q_stop, k_start, k_stop, low, high``; rows sorted by batch, query and key, behind an
        empty block of zeros, so that N is at least 2. In a block query ``i`` sees key ``j``, both counted from its
        start, where ``low <= i - j <= high``; a bound that hides nothing is written as ``-(k_stop - k_start)`` or
        ``q_stop - q_start``. No pair lies in two blocks. Queries in no block see nothing. Inactive queries between
        active ones may be covered.
        The table stays on the host; in a layout of batch 1 it lists the one batch row that stands for all.

        Args:
            max_runs: the largest number of blocks that a query may lie in, at least 1; ``None``: any. ``None`` is
                returned where a query lies in more.
        """
        table = self._table(max_runs)
        return None if table is None else table.bands[:, :7]

    def to_blocks(self, max_runs: int | None = 1) -> Tensor | None:
        """The table of :meth:`to_bands` in positions, for a layout whose mask is one structure without sinks.

        Columns ``batch, q_start, q_stop, k_start, k_stop, shift, causal``: query ``i`` sees key ``j`` where
        ``d = i - j + shift``, the distance of their positions, satisfies ``d >= 0`` if ``causal``, and lies within
        ``visibility.window`` if there is one. ``None`` also where positions do not step by one under a window.
        Unions and layouts with sinks give the table of :meth:`to_bands` itself.
        """
        table, mask = self._table(max_runs), self._known.mask
        if table is None or not isinstance(mask, StructuredMask) or mask.sink_lengths is not None:
            return None if table is None else table.bands[:, :7]
        return table.in_positions(causal=mask.causal) if table.unit or mask.window is None else None

    def _lowered(self) -> Known:
        """What the host knows, the blocks included."""
        known = self._known
        if not known.lowered and not torch.compiler.is_compiling():
            known = known.lower(self.q_len, self.kv_len, self.batch)._replace(lowered=True)
            object.__setattr__(self, "_known", known)
        return known

    def _table(self, max_runs: int | None) -> Table | None:
        if max_runs not in (None, 1):
            check_int("max_runs", max_runs, 1)
        known = self._known
        table = (known if known.lowered else self._lowered()).table
        if table is None or max_runs is None or table.one_run:
            return table
        runs = self.max_runs
        return table if runs is not None and runs <= max_runs else None

    def to_dense(self, device: Device | None = None) -> Tensor:
        """The whole mask, ``Bool[B|1, H|1, Q, K]``; rows of inactive queries are False.

        Args:
            device: where to compute and return it; by default the layout's own device, else the CPU.

        Raises:
            LayoutError: a ``mask_mod`` raised an exception or returned something else than Bool.
        """
        blocks = list(self._row_blocks(device))
        return blocks[0].contiguous() if len(blocks) == 1 else torch.cat(blocks, 2)

    def dense_rows(self, start: int, stop: int, device: Device | None = None) -> Tensor:
        """Rows ``start .. stop - 1`` of :meth:`to_dense`, ``Bool[B|1, H|1, stop - start, K]``, possibly expanded.

        Raises:
            LayoutError: ``0 <= start <= stop <= q_len`` does not hold, or see :meth:`to_dense`.
        """
        check_int("start", start)
        check_int("stop", stop, most=self.q_len)
        if start > stop:
            raise LayoutError(f"start must be at most stop, got {start} and {stop}")
        layout, target = self if device is None else self.to(device), self._target(device)
        sizes = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
        rows = dense_rows(layout.visibility, sizes, start, stop, target)
        rows = rows.expand(*rows.shape[:2], stop - start, layout.kv_len)
        active = layout.active_queries
        return rows if active is None else rows & active[:, None, start:stop, None]

    def to_mask_mod(self) -> MaskMod:
        """The mask as a function for FlexAttention, active queries included; reads nothing on the host."""
        mod = to_mod(pinned(self.visibility, self.batch, self.heads), self.q_len, self.kv_len)
        active = self.active_queries
        if active is None:
            return mod

        def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mod(b, h, q_idx, kv_idx) & pick(active, b, q_idx)

        return both

    def rows_without_keys(self, device: Device | None = None) -> Tensor:
        """Which queries see nothing, inactive ones included: ``Bool[B|1, H|1, Q]``.

        Linear in ``q_len`` where :meth:`to_bands` is not ``None``.
        """
        intervals = self._intervals()
        if intervals is None:
            return torch.cat([~rows.any(-1) for rows in self._row_blocks(device)], 2)
        without = torch.ones(self.batch * self.q_len, dtype=torch.bool, device="cpu")
        without[intervals[0]] = False
        return without.view(self.batch, 1, self.q_len).to(self._target(device) or "cpu")

    def unseen_keys(self, device: Device | None = None) -> Tensor:
        """Which keys no active query (of that head) may see: ``Bool[B|1, H|1, K]``.

        Linear in ``q_len + kv_len`` where :meth:`to_bands` is not ``None``.
        """
        intervals = self._intervals()
        if intervals is None:
            return ~functools.reduce(operator.or_, (rows.any(2) for rows in self._row_blocks(device)))
        covered = covered_keys(*intervals, self.batch, self.q_len, self.kv_len)
        return ~covered[:, None].to(self._target(device) or "cpu")

    def key_intervals(self, max_runs: int = 1) -> Tensor | None:
        """The runs of keys that each query sees, from start to before stop: ``Int[B|1, Q, runs, 2]``, int64 on the CPU.

        In order of the keys, without two that touch; the last ones are empty (0 to 0) for a query that sees fewer.
        ``runs`` is the largest number that a query sees, at least 1. ``None`` where a query sees more than
        ``max_runs``, where :meth:`to_bands` is ``None``, and while tracing.
        """
        check_int("max_runs", max_runs, 1)
        found = self._intervals()
        return None if found is None else padded_intervals(*found, self.batch, self.q_len, max_runs)

    def token_positions(self) -> Tensor:
        """The position of each query's token, which rotary embeddings turn it by: ``Int[B|1, Q]``.

        The depth of its tokens in a tree, the place in its document, the distance to the first valid key under padding,
        the positions that the layout was given; otherwise the queries are the last ``q_len`` of ``kv_len`` positions.
        Selections and layouts that are joined with a dense mask or a ``mask_mod`` keep them.

        Raises:
            LayoutError: the parts of a union disagree, or their values cannot be compared while tracing.
        """
        if self._tokens:
            return agreed([take(of.token_positions(), 1, index) for of, index in self._tokens])
        if isinstance(self.visibility, Structure):
            return self.visibility.token_positions(self.q_len, self.kv_len)
        return positions((self.q_positions, self.kv_positions), self.q_len, self.kv_len, None)[0]

    def fingerprint(self) -> str | None:
        """A short hash of the sizes, fields and values; ``None`` for a ``mask_mod``. Copies device tensors to the host.

        Layouts with the same fingerprint are alike; alike layouts written in other fields or dtypes have another one.
        """
        if callable(self.visibility):
            return None
        return hashlib.sha256(b"".join(_written(self))).hexdigest()[:16]

    def _intervals(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The row, start and stop of every run of keys that an active query sees."""
        known = self._lowered()
        if known.table is None or torch.compiler.is_compiling():
            return None
        row, start, stop = known.table.intervals(self.q_len, self.kv_len)
        if known.active is None:
            return row, start, stop
        live = known.active.expand(self.batch, -1).flatten()[row]
        return row[live], start[live], stop[live]

    def _target(self, device: Device | None) -> torch.device | None:
        return self.device if device is None else as_device(device)

    def _row_blocks(self, device: Device | None) -> Iterator[Tensor]:
        layout = self if device is None else self.to(device)
        # A compiler fuses what is computed here; a loop would fix the size that it may keep symbolic.
        if torch.compiler.is_compiling():
            yield layout.dense_rows(0, self.q_len, device)
            return
        rows = max(1, ROW_BLOCK // max(1, self.batch * self.heads * self.kv_len))
        for start in range(0, max(1, self.q_len), rows):
            yield layout.dense_rows(start, min(start + rows, self.q_len), device)

    def to(self, device: Device) -> Self:
        """The layout with its tensors on ``device``. What a user's ``mask_mod`` captures stays where it is."""
        target = as_device(device)
        names = ("active_queries", "q_positions", "kv_positions")
        tensors = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.device in (None, target) and all(value.device == target for value in tensors.values()):
            return self
        tensors = {name: value.to(target) for name, value in tensors.items()}
        there = self._with(visibility=moved(self.visibility, target), **tensors, known=self._known)
        return telling(there, *((of.to(target), index) for of, index in self._tokens))

    def _with(self, *, known: Known, **changes: Any) -> Self:
        """This layout with some fields replaced; the host is told what is known and reads nothing."""
        names = [field.name for field in dataclasses.fields(self) if field.init]
        made = type(self)(**{**{name: getattr(self, name) for name in names}, **changes}, _handed=known)
        return telling(made, *self._tokens)

    def _joinable(self) -> Self:
        """The layout as it is joined with others."""
        mask, sizes = self.visibility, (self.q_len, self.kv_len)
        joinable = mask.joinable(*sizes) if isinstance(mask, Structure) else mask
        return self if joinable is mask else self._with(visibility=joinable, known=self._known.joinable(*sizes))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if callable(self.visibility):
            try:
                pickle.dumps(self.visibility, protocol=int(protocol))
            except Exception as error:
                raise LayoutError(
                    f"mask_mod must pickle to pickle its layout, got {shown(self.visibility)}, which does not "
                    f"({error}); define it at the top level of a module, or make the layout where it is used"
                ) from error
        return super().__reduce_ex__(protocol)


def telling(layout: _L, *tokens: tuple[LayoutBase, Index]) -> _L:
    """A new layout, whose queries are those of each of other layouts at an index."""
    if tokens:
        object.__setattr__(layout, "_tokens", tokens)
    return layout


def _written(value: object) -> Iterator[bytes]:
    """A layout, or anything in its fields, as bytes that tell it from another one."""
    if isinstance(value, Tensor):
        host = value.detach().cpu().contiguous()
        yield f"{host.dtype}{list(host.shape)}".encode()
        yield ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""
    elif dataclasses.is_dataclass(value) or isinstance(value, tuple):
        parts = (
            value if isinstance(value, tuple) else [getattr(value, f.name) for f in dataclasses.fields(value) if f.init]
        )
        yield f"{type(value).__name__}{len(parts)}".encode()
        for part in parts:
            yield from _written(part)
    else:
        yield f"{value};".encode()
