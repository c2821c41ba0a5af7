"""What a layout is, and everything that it can be asked."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout import picture
from polyattn._layout.blocks import covered_keys, key_ranges
from polyattn._layout.checks import as_device, check_flag, check_int
from polyattn._layout.lowering import Host, Known, Lowered, check_segment_prefixes, lower, read_host
from polyattn._layout.sizes import infer_sizes
from polyattn._layout.structured import MaskMod, StructuredMask, pick
from polyattn._layout.visibility import Visibility, dense_rows, held, moved, pinned, to_mod
from polyattn.messages import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Self

Device = torch.device | str
#: Dense masks are computed in blocks of rows of about this many elements, which bounds their temporaries.
ROW_BLOCK = 2**22


def _everything() -> StructuredMask:
    # Neither one object for all layouts nor the class: torch.compile traces a function here.
    return StructuredMask()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayoutBase:
    """The fields of a layout and the questions to it; :class:`MaskLayout` adds constructors and operations."""

    q_len: int
    kv_len: int
    batch: int = cast("int", None)  # read off the tensors
    heads: int = cast("int", None)
    visibility: Visibility = dataclasses.field(default_factory=_everything)
    active_queries: Tensor | None = None
    validate: dataclasses.InitVar[bool] = True
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    _known: dataclasses.InitVar[Known | None] = None
    _host: Host | None = dataclasses.field(init=False)
    _lowered: Lowered = dataclasses.field(init=False)

    def __post_init__(self, validate: bool, _known: Known | None) -> None:
        check_flag("validate", validate)
        places = (self.q_positions, self.kv_positions)
        parts = (self.visibility, self.active_queries, places)
        batch, heads = infer_sizes(self.q_len, self.kv_len, self.batch, self.heads, *parts)
        known = _known or Known(read_host(self.visibility, self.active_queries, sync=validate))
        if known.host is not None:
            check_segment_prefixes(known.host.mask)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "_host", known.host)
        object.__setattr__(self, "_lowered", known.lowered or lower(known.host, self.q_len, self.kv_len, batch))

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
        return self._lowered.fully_masked_rows

    @property
    def may_have_unseen_keys(self) -> bool:
        """False when the host knows that every key is seen by a query; True also when it does not know."""
        return self._lowered.unseen_keys

    def to_blocks(self) -> Tensor | None:
        """The structure as rectangles: an int64 CPU table ``[N, 7]``, or ``None`` for what has no such form.

        Columns ``batch, q_start, q_stop, k_start, k_stop, shift, causal``; rows sorted by batch and query, behind an
        empty block of zeros, so that N is at least 2. In a block query i sees key j where ``d = (i - q_start) -
        (j - k_start) + shift`` satisfies ``d >= 0`` if ``causal``, and ``|d| < visibility.window`` if there is one.
        Queries in no block see nothing, and no query is in two. Inactive queries between active ones may be covered.
        The table stays on the host; in a layout of batch 1 it lists the one batch row that stands for all.
        """
        return self._lowered.blocks

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

        Linear in ``q_len`` where :meth:`to_blocks` is not ``None``.
        """
        ranges = self.key_ranges()
        if ranges is None:
            return torch.cat([~rows.any(-1) for rows in self._row_blocks(device)], 2)
        start, stop = ranges
        return (stop <= start)[:, None].to(self._target(device) or "cpu")

    def unseen_keys(self, device: Device | None = None) -> Tensor:
        """Which keys no active query (of that head) may see: ``Bool[B|1, H|1, K]``.

        Linear in ``q_len + kv_len`` where :meth:`to_blocks` is not ``None``.
        """
        ranges = self.key_ranges()
        if ranges is None:
            return ~functools.reduce(operator.or_, (rows.any(2) for rows in self._row_blocks(device)))
        return ~covered_keys(*ranges, self.kv_len)[:, None].to(self._target(device) or "cpu")

    def key_ranges(self) -> tuple[Tensor, Tensor] | None:
        """The run of keys that each query sees, from ``start`` to before ``stop``: two int64 CPU tensors ``[B, Q]``.

        Empty (``stop <= start``) for a query that sees nothing; ``None`` where :meth:`to_blocks` is, and while tracing.
        """
        if self._lowered.blocks is None or self._host is None or torch.compiler.is_compiling():
            return None
        start, stop = key_ranges(self._lowered.blocks, self.batch, self.q_len, self._host.mask.window)
        active = self._host.active
        return (start, stop) if active is None else (start, torch.where(active, stop, start))

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
        return self._with(visibility=moved(self.visibility, target), **tensors, _known=self._facts())

    def _facts(self) -> Known:
        """What an operation may hand on."""
        return Known(self._host, self._lowered)

    def _with(self, *, _known: Known, **changes: Any) -> Self:
        """This layout with some fields replaced; the host is told what is known and reads nothing."""
        names = [field.name for field in dataclasses.fields(self) if field.init]
        return type(self)(**{**{name: getattr(self, name) for name in names}, **changes}, _known=_known)

    def describe(self) -> str:
        """One line: the rules, the sizes and what is inactive."""
        return picture.describe(self)

    def draw(self, *, batch: int = 0, head: int = 0, size: int = 64) -> str:
        """A picture in characters, one line for each query: ``#`` seen, ``-`` not seen, ``+`` seen in part.

        Args:
            batch: which batch row.
            head: which head.
            size: the largest number of lines and columns; larger masks are drawn in cells of several.
        """
        return picture.draw(self, batch, head, size)

    def plot(self, *, batch: int = 0, head: int = 0, size: int = 512) -> Figure:
        """A picture as a matplotlib figure, queries down and keys across; needs ``polyattn[viz]``.

        Args:
            batch: which batch row.
            head: which head.
            size: the largest number of cells in each direction.

        Raises:
            PolyattnError: matplotlib is not installed.
        """
        return picture.plot(self, batch, head, size)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe()}>"

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
