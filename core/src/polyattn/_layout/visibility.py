"""The three descriptions of visibility behind one set of functions.

A visibility is a ``Bool[B|1, H|1, Q, K]`` tensor, a ``mask_mod`` with FlexAttention's signature, or a
:class:`StructuredMask`. Parts and intersections of a ``mask_mod`` are ``mask_mod`` objects of our own, so that
they can be moved and pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import Index, check_bool, check_int
from polyattn._layout.structured import MaskMod, StructuredMask, pick, structured_mod, take, visible_rows

Visibility = Tensor | MaskMod | StructuredMask


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedMod:
    """A ``mask_mod`` seen through indices: element i of a selected axis is element ``index[i]`` of the whole."""

    whole: MaskMod
    batch: Index | None = None
    heads: Index | None = None
    queries: Index | None = None
    keys: Index | None = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether the selected query sees the selected key."""
        return self.whole(_at(self.batch, b), _at(self.heads, h), _at(self.queries, q_idx), _at(self.keys, kv_idx))


@dataclasses.dataclass(frozen=True, eq=False)
class BothMod:
    """The intersection of two visibilities of the same lengths."""

    left: Visibility
    right: Visibility
    q_len: int
    kv_len: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether both let the query see the key."""
        return self.mod()(b, h, q_idx, kv_idx)

    def mod(self) -> MaskMod:
        """The intersection as a function whose parts are resolved once."""
        left, right = (to_mod(part, self.q_len, self.kv_len) for part in (self.left, self.right))
        return lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)


def _at(index: Index | None, i: Tensor) -> Tensor:
    if index is None:
        return i
    return i * index.step + index.start if isinstance(index, slice) else index[i]


def held(visibility: object) -> Iterator[Tensor]:
    """The tensors that a description holds; what a user's ``mask_mod`` captures is not among them."""
    if isinstance(visibility, Tensor):
        yield visibility
    elif isinstance(visibility, StructuredMask):
        yield from visibility.tensors().values()
    elif isinstance(visibility, (SelectedMod, BothMod)):
        for field in dataclasses.fields(visibility):
            yield from held(getattr(visibility, field.name))


def moved(visibility: Visibility, device: torch.device) -> Visibility:
    """The description with its tensors on ``device``; a user's ``mask_mod`` stays as it is."""
    if isinstance(visibility, Tensor):
        return visibility.to(device)
    if isinstance(visibility, StructuredMask):
        return visibility.replace(**{name: value.to(device) for name, value in visibility.tensors().items()})
    if isinstance(visibility, BothMod):
        return dataclasses.replace(
            visibility, left=moved(visibility.left, device), right=moved(visibility.right, device)
        )
    if isinstance(visibility, SelectedMod):
        axes = {name: getattr(visibility, name) for name in ("batch", "heads", "queries", "keys")}
        index = {name: value.to(device) for name, value in axes.items() if isinstance(value, Tensor)}
        return dataclasses.replace(visibility, whole=cast("MaskMod", moved(visibility.whole, device)), **index)
    return visibility


def selected(visibility: Tensor | MaskMod, axis: str, index: Index) -> Tensor | MaskMod:
    """The part of a tensor or ``mask_mod`` at ``index`` along ``axis``: ``heads``, ``queries`` or ``keys``."""
    if isinstance(visibility, Tensor):
        return take(visibility, {"heads": 1, "queries": 2, "keys": 3}[axis], index)
    return SelectedMod(visibility, **{axis: index})


def pinned(visibility: Visibility, batch: int, heads: int) -> Visibility:
    """A ``mask_mod`` of one batch row or head as one that serves all: called with index 0, whatever the index."""
    if isinstance(visibility, (Tensor, StructuredMask)):
        return visibility
    first = slice(0, 1, 0)  # of step 0, so that every index selects element 0
    axes = {name: first for name, size in (("batch", batch), ("heads", heads)) if size == 1}
    return SelectedMod(visibility, **axes) if axes else visibility


def to_mod(visibility: Visibility, q_len: int, kv_len: int) -> MaskMod:
    """The description as a function for FlexAttention; nothing is read on the host."""
    if isinstance(visibility, Tensor):
        dense = visibility
        return lambda b, h, q_idx, kv_idx: pick(dense, b, h, q_idx, kv_idx)
    if isinstance(visibility, StructuredMask):
        return structured_mod(visibility, q_len, kv_len)
    if isinstance(visibility, BothMod):
        return visibility.mod()
    return _boolean(visibility)


def _boolean(mod: MaskMod) -> MaskMod:
    def checked(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen: object = mod(b, h, q_idx, kv_idx)
        if not isinstance(seen, Tensor) or seen.dtype is not torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise LayoutError(
                f"mask_mod must return a Bool tensor with True = may attend, got {got}; a function that changes "
                "scores is no mask, give its values to attention as bias="
            )
        # A captured tensor of one element gives the scalar a dimension, which FlexAttention does not take.
        return seen.reshape(()) if q_idx.dim() == 0 and seen.dim() > 0 else seen

    return checked


def dense_rows(
    visibility: Visibility, sizes: tuple[int, int, int, int], start: int, stop: int, device: torch.device | None
) -> Tensor:
    """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, H, stop - start, K]``.

    Args:
        visibility: the description, with its tensors on ``device``.
        sizes: batch, heads, ``q_len`` and ``kv_len`` of the layout.
        start: first row.
        stop: row after the last one.
        device: where to compute; ``None`` for what holds no tensor: where a ``mask_mod`` keeps its own, else the CPU.

    Raises:
        LayoutError: a ``mask_mod`` raised an exception or returned something else than Bool.
    """
    batch, heads, q_len, kv_len = sizes
    if isinstance(visibility, Tensor):
        return visibility[:, :, start:stop]
    if isinstance(visibility, StructuredMask):
        return visible_rows(visibility, q_len, kv_len, start, stop, device or torch.device("cpu")).unsqueeze(1)
    device = device or _home(visibility)
    if 0 in (batch, heads, stop - start, kv_len):
        return torch.zeros(batch, heads, stop - start, kv_len, dtype=torch.bool, device=device)
    mod = to_mod(visibility, q_len, kv_len)
    for axis in (3, 2, 1, 0):  # as FlexAttention does: the function sees one element of each index
        mod = torch.vmap(mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    spans = ((0, batch), (0, heads), (start, stop), (0, kv_len))
    index = [torch.arange(first, last, device=device) for first, last in spans]
    try:
        return mod(*index)
    except LayoutError:
        raise
    except Exception as error:
        name = getattr(visibility, "__qualname__", type(visibility).__name__)
        raise LayoutError(
            f"mask_mod {name} raised {type(error).__name__} for indices on {device}: {error}; it is called with one "
            "element of each index (b, h, q_idx, kv_idx) under vmap, as FlexAttention calls it"
        ) from error


def _home(mod: MaskMod) -> torch.device:
    """Where a user's function keeps its data: the device of a non-scalar tensor that it captures, else the CPU."""
    todo: list[object] = [mod]
    known: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, Tensor):
            if value.dim() > 0:
                return value.device
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif inspect.isfunction(value):
            todo += inspect.getclosurevars(value).nonlocals.values()
        elif inspect.ismethod(value):
            todo.append(value.__self__)
        elif callable(value) and not isinstance(value, type):
            todo += vars(value).values() if hasattr(value, "__dict__") else ()
    return torch.device("cpu")


def fit(
    q_len: int,
    kv_len: int,
    batch: int | None,
    heads: int | None,
    visibility: object,
    active_queries: Tensor | None,
) -> tuple[int, int]:
    """Check that the parts of a layout fit each other; batch and heads, read off the tensors where not given.

    Raises:
        LayoutError: one message with every size or device that does not fit.
    """
    check_int("q_len", q_len)
    check_int("kv_len", kv_len)
    for name, given in (("batch", batch), ("heads", heads)):
        if given is not None:
            check_int(name, given)
    tensors: dict[str, Tensor] = {}
    if isinstance(visibility, Tensor):
        check_bool("visibility", visibility, "[B|1, H|1, Q, K]", (4,))
        tensors = {"visibility": visibility}
    elif isinstance(visibility, StructuredMask):
        tensors = visibility.tensors()
    elif not callable(visibility):
        got = type(visibility).__name__
        raise LayoutError(f"visibility must be a Bool tensor, a mask_mod function or a StructuredMask, got {got}")
    if active_queries is not None:
        check_bool("active_queries", active_queries, "[B|1, Q]", (2,))
        tensors = {**tensors, "active_queries": active_queries}
    problems = []
    for name, value in tensors.items():
        want = list(value.shape[:1])
        if name == "visibility":
            want = [*value.shape[:2], q_len, kv_len]
        elif name != "prefix_lengths":
            want.append(kv_len if name.startswith("kv_") else q_len)
        elif value.dim() == 2:
            want.append(value.shape[1])
        if list(value.shape) != want:
            problems.append(f"{name} must fit q_len={q_len} and kv_len={kv_len}: shape {want}, got {list(value.shape)}")
    rows = _one_size("batch", batch, {name: value.shape[0] for name, value in tensors.items()}, problems)
    per_head = {"visibility": visibility.shape[1]} if isinstance(visibility, Tensor) else {}
    if isinstance(visibility, StructuredMask) and heads not in (None, 1):
        problems.append(f"heads must be 1 with a StructuredMask, which is the same for all heads, got {heads}")
    count = _one_size("heads", heads, per_head, problems)
    devices = {name: value.device for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} {device}" for name, device in devices.items())
        problems.append(f"all tensors of a layout must be on one device, got {where}")
    if problems:
        raise LayoutError("; ".join(problems))
    return rows, count


def _one_size(name: str, given: int | None, found: dict[str, int], problems: list[str]) -> int:
    """The size that all agree on, where 1 broadcasts; a disagreement is added to ``problems``."""
    sizes = {**({} if given is None else {name: given}), **found}
    distinct = {size for size in sizes.values() if size != 1}
    # A given size is what the layout has: a tensor may broadcast to it, it does not broadcast to a tensor.
    if len(distinct) > 1 or (given == 1 and distinct):
        got = ", ".join(f"{key} {size}" for key, size in sizes.items())
        problems.append(f"{name} must be one number, where a tensor's 1 broadcasts, got {got}")
    return max(distinct, default=1) if given is None else given
