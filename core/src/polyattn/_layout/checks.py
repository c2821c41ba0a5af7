"""Checks of layout arguments, and the one rule about which tensor values the host may read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn._errors import LayoutError
from polyattn.messages import shown

#: What a selection is made with: a slice with ints for start, stop and a positive step, or an integer tensor ``[N]``.
Index = slice | Tensor
#: A tensor and its values on the host: itself on the CPU, ``None`` where they were not read.
Read = tuple[Tensor, Tensor | None]
INTEGERS = (torch.int32, torch.int64)
#: Of lengths, offsets and sizes: what fits an int64 with room for sums, and for the bytes of a tensor.
LARGEST = 2**56


def check_int(name: str, value: object, least: int = 0, *, most: int | None = LARGEST) -> None:
    """Refuse anything but an int from ``least`` to ``most``; a symbolic size of a traced graph passes."""
    if isinstance(value, torch.SymInt):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(f"{name} must be an int >= {least}, got {shown(value)}")
    if most is not None and value > most:
        raise LayoutError(f"{name} must be at most {most}, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise LayoutError(f"{name} must be True or False, got {shown(value)}")


def check_bool(name: str, value: object, shape: str, ranks: Sequence[int], true: str = "may attend") -> None:
    """Refuse anything but a Bool tensor of one of the ``ranks``; messages say ``shape`` and what ``true`` means."""
    _check_tensor(name, value, f"Bool{shape}")
    assert isinstance(value, Tensor)
    if value.dtype.is_floating_point:
        raise LayoutError(
            f"{name} must be Bool{shape} with True = {true}, got {value.dtype}; additive float masks are given "
            "to attention as bias=, where -inf blocks a key"
        )
    if value.dtype is not torch.bool:
        raise LayoutError(
            f"{name} must be Bool{shape} with True = {true}, got {value.dtype}; "
            "call .bool() on a mask of ones and zeros"
        )
    _check_rank(name, value, f"Bool{shape}", ranks)


def check_ints(name: str, value: object, shape: str, ranks: Sequence[int]) -> None:
    """Refuse anything but an int32 or int64 tensor of one of the ``ranks``."""
    _check_tensor(name, value, f"Int{shape}")
    assert isinstance(value, Tensor)
    if value.dtype not in INTEGERS:
        raise LayoutError(f"{name} must be Int{shape} of dtype int32 or int64, got {value.dtype}; cast it first")
    _check_rank(name, value, f"Int{shape}", ranks)


def as_device(device: object) -> torch.device:
    """A device by itself or by its name.

    Raises:
        LayoutError: it is neither.
    """
    if isinstance(device, torch.device):
        return device
    text = f"device must be a device of torch, such as 'cuda' or torch.device('cuda'), got {shown(device)}"
    if not isinstance(device, str):
        raise LayoutError(text)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise LayoutError(text) from error


def check_positions(q: Tensor | None, k: Tensor | None) -> None:
    """Refuse positions of keys without those of queries, and two dtypes."""
    if q is None and k is not None:
        raise LayoutError("kv_positions must come with q_positions, got kv_positions alone; give both")
    if q is not None and k is not None and q.dtype is not k.dtype:
        raise LayoutError(
            f"q_positions and kv_positions must share one dtype, got {q.dtype} and {k.dtype}; cast one of them"
        )


def _check_tensor(name: str, value: object, wanted: str) -> None:
    if not isinstance(value, Tensor):
        raise LayoutError(f"{name} must be a tensor {wanted}, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise LayoutError(
            f"{name} must be an ordinary dense tensor {wanted}, got {got}; call .to_dense() on a sparse tensor, and "
            "pad a nested one"
        )


def _check_rank(name: str, value: Tensor, wanted: str, ranks: Sequence[int]) -> None:
    if value.dim() not in ranks:
        raise LayoutError(
            f"{name} must be {wanted}, got shape {list(value.shape)}; reshape it with unsqueeze or [None]"
        )


def on_host(value: Tensor, *, sync: bool) -> Tensor | None:
    """The tensor's values on the host, or ``None`` where they must not or cannot be read.

    Tensors of a traced graph, meta tensors and tensor subclasses (fake tensors among them) have no values to
    read. A CPU tensor is returned as it is; one on a device is copied, which waits for it, only with ``sync``.
    """
    if torch.compiler.is_compiling() or type(value) is not Tensor or value.is_meta:
        return None
    if value.device.type == "cpu":
        return value
    return value.cpu() if sync else None


def both(function: Callable[[Tensor], Tensor], read: Read) -> Read:
    """``function`` of a tensor and of its values on the host, called once where they are one."""
    tensor, values = read
    result = function(tensor)
    return result, result if values is tensor else None if values is None else function(values)


def read(name: str, value: Tensor, *, validate: bool) -> Read:
    """A tensor whose values need a check, with its values on the host, which must be readable with ``validate``.

    Raises:
        LayoutError: ``validate`` is True and the tensor has no values to read.
    """
    values = on_host(value, sync=validate)
    if values is None and validate:
        raise LayoutError(
            f"{name} cannot be checked because its values cannot be read here (tracing, meta or a tensor subclass); "
            "check it outside, and pass validate=False"
        )
    return value, values


def ints(name: str, values: object) -> list[int]:
    """A sequence of ints as a list; anything that counts as an int but a bool is one.

    Raises:
        LayoutError: something in it is not an int, or an int that does not fit int64.
    """
    items: list[Any] = list(values) if isinstance(values, Iterable) else [None]
    # torch.compile neither traces nor looks for an __index__ of an int that it keeps symbolic.
    whole = [x for x in items if not isinstance(x, bool) and (isinstance(x, int) or hasattr(x, "__index__"))]
    numbers = [x if isinstance(x, int) else x.__index__() for x in whole]
    if len(numbers) != len(items):
        raise LayoutError(f"{name} must be ints or an integer tensor, got {shown(values)}")
    for number in numbers:
        if not -(2**63) <= number < 2**63:
            raise LayoutError(f"{name} must be ints that fit int64, got {shown(number)}")
    return numbers


def as_index(index: slice | Sequence[int] | Tensor, size: int, *, validate: bool) -> tuple[Index, Index | None, int]:
    """A selection of ``size`` elements in normal form, its values on the host if known, and how many it selects.

    Raises:
        LayoutError: the index has a wrong type or rank, or leaves ``0 .. size - 1``.
    """
    if isinstance(index, slice):
        try:
            chosen = range(size)[index]  # not index.indices(size), which Dynamo of torch 2.10 cannot trace
        except (TypeError, ValueError) as error:
            raise LayoutError(f"index must be a slice of ints whose step is not 0, got {index}: {error}") from error
        if chosen.step > 0:
            part = slice(chosen.start, max(chosen.start, chosen.stop), chosen.step)
            return part, part, len(chosen)
        index = list(chosen)
    if isinstance(index, Tensor):
        check_ints("index", index, "[N]", (1,))
        values = read("index", index, validate=validate)[1]
        ends = [] if values is None or values.numel() == 0 else [int(values.min()), int(values.max())]
    else:
        ends = ints("index", index)
        index = values = torch.tensor(ends, dtype=torch.int64, device="cpu")
    if ends and not 0 <= min(ends) <= max(ends) < size:
        raise LayoutError(
            f"index must lie in 0 .. {size - 1}, got {min(ends)} .. {max(ends)}; "
            "negative numbers do not count from the end"
        )
    return index, values, index.shape[0]
