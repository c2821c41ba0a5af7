"""Applying rotary tables to queries and keys: FP32 arithmetic, one rounding, and a backward that keeps only the tables.

A pair ``(x, y)`` becomes ``(x cos - y sin, y cos + x sin)``. Products and sums are rounded separately everywhere, so
every path gives the same bits. The inverse rotation is the rotation by ``-sin``, and it is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn._errors import AttentionInputError
from polyattn.messages import shown
from polyattn.rope.embedding import RotaryTables, joined

#: Elements of a piece. On the CPU its scratch stays in a core's cache, elsewhere it bounds memory. A tensor that fits
#: into one piece is rotated at once, which costs less to start.
_PIECE = {"cpu": 1 << 17}
_PIECE_ELSEWHERE = 1 << 25


def apply_rotary(q: Tensor, k: Tensor, tables: RotaryTables, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q: ``[B, Hq, S, D]``, any strides.
        k: ``[B, Hkv, S, D]``.
        tables: cosines and sines, FP32 ``[B|1, S, rotary_dim / 2]``; channels from ``rotary_dim`` on pass through.
        interleaved: pairing of the channels, as in the spec that the tables were made from.

    Returns:
        The rotated q and k, each in its own dtype: computed in FP32 (FP64 for FP64) and rounded once.
    """
    rotated_q, rotated_k = _apply({"q": q, "k": k}, tables, interleaved)
    return rotated_q, rotated_k


def rotate_heads(x: Tensor, tables: RotaryTables, *, interleaved: bool) -> Tensor:
    """Rotate one tensor ``[B, H, S, D]``; see :func:`apply_rotary`."""
    return _apply({"x": x}, tables, interleaved)[0]


def _apply(named: dict[str, Tensor], tables: RotaryTables, interleaved: bool) -> list[Tensor]:
    if not isinstance(tables, RotaryTables):
        raise AttentionInputError(
            f"tables must be RotaryTables, got {type(tables).__name__}; RotaryEmbedding(spec)(positions) makes them"
        )
    cos, sin = tables.cos, tables.sin
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        raise AttentionInputError(
            f"tables must be float32, got cos {cos.dtype} and sin {sin.dtype}; RotaryEmbedding builds them"
        )
    if cos.requires_grad or sin.requires_grad:
        raise AttentionInputError(
            "tables must not require grad, got some that do; the rotation has no gradient into them"
        )
    if interleaved is not True and interleaved is not False:
        raise AttentionInputError(f"interleaved must be True or False, got {shown(interleaved)}; the spec says which")
    if interleaved is not tables.interleaved and tables.interleaved is not None:
        raise AttentionInputError(
            f"interleaved must be {tables.interleaved}, the pairing that the tables were made for, got {interleaved}; "
            "pass the interleaved of their spec"
        )
    table = cos.shape
    for name, x in named.items():
        shape = x.shape
        fits = len(shape) == 4 and len(table) == 3 and sin.shape == table and x.is_floating_point()
        fits = fits and (table[0] == 1 or table[0] == shape[0]) and table[1] == shape[2]
        if not fits or not 0 < 2 * table[2] <= shape[3]:
            raise AttentionInputError(
                f"{name} must be a floating tensor [B, H, S, D] and tables [B|1, S, rotary_dim/2], rotary_dim <= D, "
                f"got {name} {x.dtype} {list(shape)}, cos {list(table)} and sin {list(sin.shape)}"
            )
        if cos.device != x.device:
            raise AttentionInputError(f"{name} and the tables must be on one device, got {x.device} and {cos.device}")
    if torch.compiler.is_compiling():
        return [_traced(x, tables, interleaved) for x in named.values()]
    own, partner = tables.per_channel(interleaved=interleaved)
    return [rotate_channels(x, own, partner, interleaved) for x in named.values()]


def rotate_channels(x: Tensor, own: Tensor, partner: Tensor, interleaved: bool) -> Tensor:
    """Rotate ``[B, H, S, D]`` by :meth:`RotaryTables.per_channel`; unchecked, and not for a compiler."""
    if x.numel() > _piece(x):
        rotated: Tensor = _Rotation.apply(x, own, partner, interleaved)
        return rotated
    return _short(x, own, partner, interleaved)


def _traced(x: Tensor, tables: RotaryTables, interleaved: bool) -> Tensor:
    """For a compiler, which fuses it into one pass."""
    cos, sin = tables.cos.unsqueeze(1), tables.sin.unsqueeze(1)
    width = 2 * cos.shape[-1]
    head = x[..., :width].to(_dtype(x))
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    # Rounded before they are joined: inductor would store what is joined in FP32 otherwise.
    both = joined((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), interleaved)
    return both if width == x.shape[-1] else torch.cat((both, x[..., width:]), -1)


def _short(x: Tensor, own: Tensor, partner: Tensor, interleaved: bool) -> Tensor:
    """With few operations, for tensors so small that their number counts."""
    width = own.shape[-1]
    head = (x if width == x.shape[-1] else x[..., :width]).to(_dtype(x))
    other = head.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else head.roll(width // 2, -1)
    both, turned = head * own.unsqueeze(1), other * partner.unsqueeze(1)
    # In place, since fresh memory costs more than the sum; under nested transforms a tangent may be immutable.
    both = both + turned if torch._C._functorch.is_functorch_wrapped_tensor(x) else both.add_(turned)  # noqa: SLF001
    both = both.to(x.dtype)
    return both if width == x.shape[-1] else torch.cat((both, x[..., width:]), -1)


class _Rotation(torch.autograd.Function):
    """The rotation in pieces along the sequence."""

    @staticmethod
    def forward(x: Tensor, own: Tensor, partner: Tensor, interleaved: bool) -> Tensor:
        out = torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = own.shape[-1]
        if width < x.shape[-1]:
            out[..., width:].copy_(x[..., width:])
        _rotate_into(out[..., :width], x[..., :width], own.unsqueeze(1), partner.unsqueeze(1), interleaved)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, own, partner, ctx.interleaved = inputs
        ctx.save_for_backward(own, partner)
        ctx.save_for_forward(own, partner)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:  # what a double backward hands on where nothing depends on the first gradient
            return None, None, None, None
        own, partner = ctx.saved_tensors
        return rotate_channels(grad, own, -partner, ctx.interleaved), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, own_tangent: Tensor | None, partner_tangent: Tensor | None, _: None) -> Tensor:
        if own_tangent is not None or partner_tangent is not None:
            raise NotImplementedError("the rotation has no derivative with respect to its tables")
        own, partner = ctx.saved_tensors
        return rotate_channels(tangent, own, partner, ctx.interleaved)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, own: Tensor, partner: Tensor, interleaved: bool
    ) -> tuple[Tensor, int]:
        """Fold the mapped dimension into the batch; tables that all of it shares stay as they are."""

        def front(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)

        x = front(x, in_dims[0]).expand(info.batch_size, *(-1,) * 4)
        batch = x.shape[:2]
        if in_dims[1] is not None or in_dims[2] is not None or own.shape[0] > 1:
            own = front(own, in_dims[1]).expand(*batch, -1, -1).flatten(0, 1)
            partner = front(partner, in_dims[2]).expand(*batch, -1, -1).flatten(0, 1)
        return rotate_channels(x.flatten(0, 1), own, partner, interleaved).unflatten(0, batch), 0


def _rotate_into(out: Tensor, x: Tensor, own: Tensor, partner: Tensor, interleaved: bool) -> None:
    """Rotate ``x`` into ``out`` in pieces, in memory that all of them share: fresh memory costs more than arithmetic.

    For halves the factors of partners in the first are negated, then both halves subtract. Adjacent channels are
    complex numbers: ``x * cos + 1j * (x * sin)``. Multiplying by ``1j`` is exact, so a kernel that fuses it into the
    sum changes no rounding; a product ``x * (cos + 1j * sin)`` would round some lanes otherwise.
    """
    batch, heads, length, width = x.shape
    piece = max(1, _piece(x) // (batch * heads * width))

    def scratch() -> Tensor:
        return torch.empty((batch, heads, min(piece, length), width), dtype=_dtype(x), device=x.device)

    turned_space = scratch()
    wide_space = None if x.dtype is turned_space.dtype else scratch()
    direct = wide_space is None and not (interleaved and any(stride % 2 for stride in out.stride()[:-1]))
    product_space = None if direct else scratch()
    if interleaved:
        partner = joined(partner[..., 1::2], partner[..., 1::2], interleaved)
    pieces = (tensor.split(piece, 2) for tensor in (x, out, own, partner))
    for source, target, cos, sin in zip(*pieces, strict=True):
        size = source.shape[2]
        wide = source if wide_space is None else wide_space[:, :, :size].copy_(source)
        product = torch.mul(wide, cos, out=target if product_space is None else product_space[:, :, :size])
        turned = torch.mul(wide, sin, out=turned_space[:, :, :size])
        if interleaved:
            pairs, turned_pairs = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) for y in (product, turned))
            pairs.add_(turned_pairs, alpha=1j)
        else:
            product[..., : width // 2].sub_(turned[..., width // 2 :])
            product[..., width // 2 :].sub_(turned[..., : width // 2])
        if product_space is not None:
            target.copy_(product)


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: FP32, or FP64 for FP64."""
    return x.dtype if x.dtype is torch.float64 else torch.float32


def _piece(x: Tensor) -> int:
    return _PIECE.get(x.device.type, _PIECE_ELSEWHERE)
