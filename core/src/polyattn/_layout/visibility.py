"""The descriptions of visibility behind one set of functions.

A visibility is a ``Bool[B|1, H|1, Q, K]`` tensor, a ``mask_mod`` with FlexAttention's signature, or a
:class:`Structure`, such as a :class:`StructuredMask` or a union of several. Parts and intersections of a ``mask_mod``
are ``mask_mod`` objects of our own, so that they can be moved and pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyattn._errors import LayoutError
from polyattn._layout.checks import Index
from polyattn._layout.indexing import pick, take
from polyattn._layout.structure import MaskMod, Structure

Visibility = Tensor | MaskMod | Structure


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
class JoinedMod:
    """The intersection or the union of two visibilities of the same lengths."""

    left: Visibility
    right: Visibility
    q_len: int
    kv_len: int
    either: bool = False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether both, or one of them, let the query see the key."""
        return self.mod()(b, h, q_idx, kv_idx)

    def mod(self) -> MaskMod:
        """The same as a function whose parts are resolved once."""
        left, right = (to_mod(part, self.q_len, self.kv_len) for part in (self.left, self.right))
        if self.either:
            return lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx)
        return lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)


def _at(index: Index | None, i: Tensor) -> Tensor:
    if index is None:
        return i
    return i * index.step + index.start if isinstance(index, slice) else index[i]


def held(visibility: object) -> list[Tensor]:
    """The tensors that a description holds; what a user's ``mask_mod`` captures is not among them."""
    if isinstance(visibility, Tensor):
        return [visibility]
    if isinstance(visibility, Structure):
        return list(visibility.tensors().values())
    if isinstance(visibility, (SelectedMod, JoinedMod)):
        return [x for field in dataclasses.fields(visibility) for x in held(getattr(visibility, field.name))]
    return []


def moved(visibility: Visibility, device: torch.device) -> Visibility:
    """The description with its tensors on ``device``; a user's ``mask_mod`` stays as it is."""
    if isinstance(visibility, Tensor):
        return visibility.to(device)
    if isinstance(visibility, Structure):
        return visibility.replace(**{name: value.to(device) for name, value in visibility.tensors().items()})
    if isinstance(visibility, JoinedMod):
        return dataclasses.replace(
            visibility, left=moved(visibility.left, device), right=moved(visibility.right, device)
        )
    if isinstance(visibility, SelectedMod):
        axes = {name: getattr(visibility, name) for name in ("batch", "heads", "queries", "keys")}
        index = {name: value.to(device) for name, value in axes.items() if isinstance(value, Tensor)}
        return dataclasses.replace(visibility, whole=cast("MaskMod", moved(visibility.whole, device)), **index)
    return visibility


def selected(visibility: Tensor | MaskMod, axis: str, index: Index) -> Tensor | MaskMod:
    """The part of a tensor or ``mask_mod`` at ``index`` along ``axis``: ``batch``, ``heads``, ``queries``, ``keys``."""
    if isinstance(visibility, Tensor):
        return take(visibility, {"batch": 0, "heads": 1, "queries": 2, "keys": 3}[axis], index)
    return SelectedMod(visibility, **{axis: index})


def pinned(visibility: Visibility, batch: int, heads: int) -> Visibility:
    """A ``mask_mod`` of one batch row or head as one that serves all: called with index 0, whatever the index."""
    if isinstance(visibility, (Tensor, Structure)):
        return visibility
    first = slice(0, 1, 0)  # of step 0, so that every index selects element 0
    axes = {name: first for name, size in (("batch", batch), ("heads", heads)) if size == 1}
    return SelectedMod(visibility, **axes) if axes else visibility


def to_mod(visibility: Visibility, q_len: int, kv_len: int) -> MaskMod:
    """The description as a function for FlexAttention; nothing is read on the host."""
    if isinstance(visibility, Tensor):
        dense = visibility
        return lambda b, h, q_idx, kv_idx: pick(dense, b, h, q_idx, kv_idx)
    if isinstance(visibility, Structure):
        return visibility.mod(q_len, kv_len)
    if isinstance(visibility, JoinedMod):
        return visibility.mod()
    return _boolean(visibility)


def _boolean(mod: MaskMod) -> MaskMod:
    def checked(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen: object = mod(b, h, q_idx, kv_idx)
        if not isinstance(seen, Tensor) or seen.dtype is not torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise LayoutError(
                f"mask_mod must return a Bool tensor with True = may attend, got {got}; a function that changes "
                "scores is not a mask, give its values to attention as bias="
            )
        # A captured tensor of one element gives the scalar a dimension, which FlexAttention does not take.
        return seen.reshape(()) if q_idx.dim() == 0 and seen.dim() > 0 else seen

    return checked


def dense_rows(
    visibility: Visibility, sizes: tuple[int, int, int, int], start: int, stop: int, device: torch.device | None
) -> Tensor:
    """Rows ``start .. stop - 1`` of the dense mask: Bool, broadcastable to ``[B, H, stop - start, K]``.

    ``sizes`` are batch, heads, ``q_len`` and ``kv_len``. Tensors of the description are on ``device``; ``None`` for
    what holds none: it is computed where a ``mask_mod`` keeps its own, else on the CPU.

    Raises:
        LayoutError: a ``mask_mod`` raised an exception or returned something else than Bool.
    """
    batch, heads, q_len, kv_len = sizes
    if isinstance(visibility, Tensor):
        return visibility[:, :, start:stop]
    if isinstance(visibility, Structure):
        return visibility.rows(q_len, kv_len, start, stop, device or torch.device("cpu"))
    device = device or _home(visibility)
    if isinstance(visibility, JoinedMod):
        left, right = (dense_rows(part, sizes, start, stop, device) for part in (visibility.left, visibility.right))
        return left | right if visibility.either else left & right
    if 0 in (batch, heads, stop - start, kv_len):
        return torch.zeros(batch, heads, stop - start, kv_len, dtype=torch.bool, device=device)
    mod = to_mod(visibility, q_len, kv_len)
    for axis in (3, 2, 1, 0):  # as FlexAttention does: the function sees one element of each index
        mod = torch.vmap(mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    spans = ((0, batch), (0, heads), (start, stop), (0, kv_len))
    index = [torch.arange(first, last, device=device) for first, last in spans]
    try:
        with _SelectByTensors() if _ASKS_VALUES else contextlib.nullcontext():
            return mod(*index)
    except LayoutError:
        raise
    except Exception as error:
        name = getattr(visibility, "__qualname__", type(visibility).__name__)
        raise LayoutError(
            f"mask_mod {name} raised {type(error).__name__} for indices on {device}: {error}; it is called with one "
            "element of each index (b, h, q_idx, kv_idx) under vmap, as FlexAttention calls it"
        ) from error


#: Whether this torch asks index tensors under vmap for their values. A mode is a side effect to a strict exporter.
_ASKS_VALUES = torch.__version__ < "2.14"


class _SelectByTensors(TorchFunctionMode):
    """``x[i, j]`` with index tensors under vmap, where torch before 2.14 asks them for their values.

    FlexAttention does the same around such functions; its own mode costs a second to import.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = [isinstance(i, Tensor) for i in index]
            if any(tensors) and all(is_tensor or type(i) is int for is_tensor, i in zip(tensors, index, strict=True)):
                return torch.ops.aten.index(x, [torch.as_tensor(i, device=x.device) for i in index])
        return func(*args, **(kwargs or {}))


def _written(visibility: object) -> list[object]:
    """The functions of a user that a description is made of."""
    if isinstance(visibility, SelectedMod):
        return _written(visibility.whole)
    if isinstance(visibility, JoinedMod):
        return _written(visibility.left) + _written(visibility.right)
    return [] if isinstance(visibility, (Tensor, Structure)) else [visibility]


def _home(mod: MaskMod) -> torch.device:
    """Where a user's function keeps its data: the device of a non-scalar tensor that it captures, else the CPU."""
    todo: list[object] = _written(mod)
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
            names = inspect.getclosurevars(value)
            todo += [*names.nonlocals.values(), *(x for x in names.globals.values() if isinstance(x, Tensor))]
        elif inspect.ismethod(value):
            todo.append(value.__self__)
        elif callable(value) and not isinstance(value, type):
            todo += vars(value).values() if hasattr(value, "__dict__") else ()
    return torch.device("cpu")
