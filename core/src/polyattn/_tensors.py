"""The conventions of q, k and v that hold for every backend, checked without a layout; and tensors to save.

``Hq % Hkv == 0``; one device; one dtype after the autocast rule. B, Q and K may be 0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from polyattn._errors import AttentionInputError

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the LSE: FP64 for FP64, FP32 for everything narrower."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def knows_autocast(kind: str) -> bool:
    """Whether torch answers questions about autocast on devices of type ``kind``, which raise for ``meta``.

    Dynamo of torch 2.10 to 2.13 cannot trace this question; what is compiled runs on a device that has autocast.
    """
    if kind in {"cpu", "cuda"}:  # in every build of torch
        return True
    return kind != "meta" and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on ``device``, or ``None`` when it is off or unknown there."""
    kind = device.type
    if not knows_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def compute_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The one dtype in which q, k and v are attended.

    Under autocast it is the autocast dtype, whatever the three are; only FP64 stays as it is, as torch leaves it.
    """
    low = autocast_dtype(q.device)
    dtypes = [low if low is not None and x.dtype is not torch.float64 else x.dtype for x in (q, k, v)]
    if dtypes[0] is not dtypes[1] or dtypes[0] is not dtypes[2]:
        raise AttentionInputError(
            f"q, k and v must share one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; "
            "cast them to one dtype, or run under torch.autocast, which casts all three (FP64 excepted)"
        )
    if dtypes[0] not in FLOATING:
        raise AttentionInputError(
            f"q, k and v must be float64, float32, bfloat16 or float16, got {dtypes[0]}; cast them before the call"
        )
    return dtypes[0]


def cast_for_autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that the autocast rule gives it."""
    low = autocast_dtype(x.device)
    return x if low is None or x.dtype is torch.float64 else x.to(low)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k and v whose types, ranks, sizes or devices contradict each other; one message names every fault."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise AttentionInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise AttentionInputError(
                f"{name} must be an ordinary dense tensor, got {got}; call .to_dense() on a sparse tensor, and pack or "
                "pad sequences of different lengths (MaskLayout.packed, padded)"
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise AttentionInputError(f"q, k and v must be [B, Hq, Q, D], [B, Hkv, K, D] and [B, Hkv, K, Dv], got {shapes}")
    problems = []
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        problems.append(f"batch sizes must be equal, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}")
    if k.shape[1] != v.shape[1]:
        problems.append(f"k and v must have the same number of heads, got {k.shape[1]} and {v.shape[1]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        problems.append(
            f"query heads must be a positive multiple of key/value heads, got Hq={heads} and Hkv={kv_heads}; "
            "query head h reads KV head h // (Hq // Hkv)"
        )
    if q.shape[3] != k.shape[3]:
        problems.append(f"q and k must have the same width, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[3] < 1 or v.shape[3] < 1:
        problems.append(f"widths must be at least 1, got D={q.shape[3]} and Dv={v.shape[3]}")
    if k.shape[2] != v.shape[2]:
        problems.append(f"k and v must have the same length, got {k.shape[2]} and {v.shape[2]}")
    if not q.device == k.device == v.device:
        problems.append(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if problems:
        raise AttentionInputError("; ".join(problems) + f" ({shapes})")


def saveable(value: Any) -> Any:
    """``value`` (tensors, tuples, dataclasses) with ordinary copies of inference tensors: autograd saves no others."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, tuple):
        old = list(value)
    elif hasattr(type(value), "__dataclass_fields__"):
        old = list(vars(value).values())
    else:
        return value
    new: list[Any] = [x if x is None or isinstance(x, int) else saveable(x) for x in old]
    if all(map(operator.is_, old, new)):
        return value
    if isinstance(value, tuple):
        return type(value)(new) if type(value) is tuple else type(value)(*new)
    twin = object.__new__(type(value))
    vars(twin).update(zip(vars(value), new, strict=True))
    return twin
