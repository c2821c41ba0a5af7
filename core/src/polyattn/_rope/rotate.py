"""Applying rotary tables to queries and keys: FP32 arithmetic, one rounding, and a backward that keeps only the tables.

A pair ``(x, y)`` becomes ``(x cos - y sin, y cos + x sin)``. Products and sums are rounded separately everywhere, so the
result has the same bits on every path. The inverse rotation is the rotation by ``-sin``, and it is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn._rope.embedding import RotaryTables

#: Up to so many elements plain operations beat pieces: their overhead counts more than memory traffic.
_SMALL = 1 << 15
#: Elements of a piece: scratch that stays in a core's cache on the CPU, bounded memory elsewhere.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 25


def apply_rotary(q: Tensor, k: Tensor, tables: RotaryTables, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q: ``[B, Hq, S, D]``, any strides.
        k: ``[B, Hkv, S, D]``.
        tables: cosines and sines, FP32 ``[B|1, S, rotary_dim / 2]``; channels from ``rotary_dim`` on pass through.
        interleaved: pairing of the channels, as in the spec.

    Returns:
        The rotated q and k, each in its own dtype: computed in FP32 (FP64 for FP64) and rounded once.

    Raises:
        ValueError: the tables are not FP32, require grad, or do not fit q and k.
    """
    return rotate_heads(q, tables, interleaved=interleaved, name="q"), rotate_heads(
        k, tables, interleaved=interleaved, name="k"
    )


def rotate_heads(x: Tensor, tables: RotaryTables, *, interleaved: bool, name: str = "x") -> Tensor:
    """Rotate one tensor ``[B, H, S, D]``; see :func:`apply_rotary`. ``name`` is what messages call it."""
    cos, sin = tables.cos, tables.sin
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        raise ValueError(
            f"tables must be float32, got cos {cos.dtype} and sin {sin.dtype}; build them with RotaryEmbedding"
        )
    if not isinstance(interleaved, bool):
        raise ValueError(f"interleaved must be True or False, got {interleaved!r}; it stands in the spec")
    shape, table = x.shape, cos.shape
    if (
        len(shape) != 4
        or len(table) != 3
        or sin.shape != table
        or table[0] not in {1, shape[0]}
        or table[1] != shape[2]
        or not 0 < 2 * table[2] <= shape[3]
    ):
        raise ValueError(
            f"{name} must be [B, H, S, D] and both tables [B|1, S, rotary_dim/2] with rotary_dim <= D, "
            f"got {name} {list(shape)}, cos {list(table)} and sin {list(sin.shape)}"
        )
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating tensor, got {x.dtype}")
    if cos.device != x.device:
        raise ValueError(f"{name} and the tables must be on one device, got {x.device} and {cos.device}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("tables must not require grad: the rotation has no gradient into them; detach them")
    return _rotate(x, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate ``x [B, H, S, D]`` by ``cos, sin [B|1, 1, S, L]``."""
    if torch.compiler.is_compiling() or x.numel() <= _SMALL:
        return _plain(x, cos, sin, interleaved)
    rotated: Tensor = _Rotation.apply(x, cos, sin, interleaved)
    return rotated


def _plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    head = x if width == x.shape[-1] else x[..., :width]
    head = head.to(_dtype(x))
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    both = both.to(x.dtype)
    return both if width == x.shape[-1] else torch.cat((both, x[..., width:]), -1)


class _Rotation(torch.autograd.Function):
    """The rotation in pieces along the sequence."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        out = torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width, dtype = 2 * cos.shape[-1], _dtype(x)
        if width < x.shape[-1]:
            out[..., width:].copy_(x[..., width:])
        if interleaved:
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        piece = max(1, _PIECE.get(x.device.type, _PIECE_ELSEWHERE) // max(1, x.shape[0] * x.shape[1] * width))
        rotate_piece = _adjacent if interleaved else _halves
        for source, target, c, s in zip(
            x[..., :width].split(piece, 2), out[..., :width].split(piece, 2), cos.split(piece, 2), sin.split(piece, 2)
        ):
            rotate_piece(source.to(dtype), target, c, s)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:  # what a double backward hands on where nothing depends on the first gradient
            return None, None, None, None
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin.neg(), ctx.interleaved), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, cos_tangent: Tensor | None, sin_tangent: Tensor | None, _: None) -> Tensor:
        if cos_tangent is not None or sin_tangent is not None:
            raise NotImplementedError("the rotation has no derivative with respect to its tables")
        return _rotate(tangent, *ctx.saved_tensors, ctx.interleaved)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, int]:
        def front(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)

        x = front(x, in_dims[0]).expand(info.batch_size, *(-1,) * 4)
        batch = x.shape[:2]
        cos, sin = (front(t, dim).expand(*batch, -1, -1, -1).flatten(0, 1) for t, dim in zip((cos, sin), in_dims[1:3]))
        return _rotate(x.flatten(0, 1), cos, sin, interleaved).unflatten(0, batch), 0


def _halves(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs ``(i, i + L)`` of ``x`` into ``out``; ``x`` has the dtype of the arithmetic."""
    a, b = x.chunk(2, -1)
    first, second = out.chunk(2, -1)
    direct = out.dtype is x.dtype
    left = torch.mul(a, cos, out=first if direct else None).sub_(b * sin)
    right = torch.mul(b, cos, out=second if direct else None).add_(a * sin)
    if not direct:
        first.copy_(left)
        second.copy_(right)


def _adjacent(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs ``(2i, 2i+1)`` of ``x`` into ``out``; the tables hold every entry twice.

    A pair is a complex number: ``x * cos + 1j * (x * sin)``. Multiplying by ``1j`` is exact, so a vectorised kernel that
    fuses it into the sum rounds nothing else; a complex product ``x * (cos + 1j * sin)`` would be fused in some lanes.
    """
    direct = out.dtype is x.dtype and not any(stride % 2 for stride in out.stride()[:-1])
    product = torch.mul(x, cos, out=out if direct else None)
    torch.view_as_complex(product.unflatten(-1, (-1, 2))).add_(
        torch.view_as_complex((x * sin).unflatten(-1, (-1, 2))), alpha=1j
    )
    if not direct:
        out.copy_(product)


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: FP32, or FP64 for FP64."""
    return torch.promote_types(x.dtype, torch.float32)
