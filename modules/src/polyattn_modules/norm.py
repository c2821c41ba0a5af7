"""RMS normalisation that computes in FP32 and rounds once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyattn.kernels import transforming
from polyattn_modules.dtensors import summed


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    The mean, the quotient and the product with the weight are FP32 (FP64 for FP64 input) and the result is cast once
    to the dtype of ``x``, as serving engines do; transformers rounds before it multiplies.

    Args:
        width: size of the last dimension.
        eps: added to the mean of squares; stated, never defaulted, because model families differ.
        weighted: whether a learned weight multiplies the result.
        device, dtype: of the weight.

    Attributes:
        parted: whether each rank of a mesh normalises other heads by one weight, a DTensor, whose gradient then is the
            sum over the ranks; :meth:`GroupedQueryAttention.parallelize` sets it.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        weighted: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.parted = False
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if weighted else None
        )
        self.weight: Tensor | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., width]``; the dtype stays."""
        weight = self.weight
        if self.parted and weight is not None:
            weight = summed(weight)
        if x.dtype in {torch.float32, torch.float64} or torch.compiler.is_compiling() or transforming():
            return _normalised(x, weight, self.eps)
        normalised: Tensor = _Low.apply(x, weight, self.eps)
        return normalised

    def extra_repr(self) -> str:
        """Width, eps and whether there is a weight, for ``print(model)``."""
        return f"{self.width}, eps={self.eps}, weighted={self.weight is not None}"


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    high = torch.promote_types(x.dtype, torch.float32)
    weight = None if weight is None else weight.to(high)
    return functional.rms_norm(x.to(high), x.shape[-1:], weight, eps).to(x.dtype)


class _Low(torch.autograd.Function):
    """The norm of a narrow dtype, which keeps its input for the backward instead of two FP32 copies of it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return _normalised(x, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide, wide_grad = x.float(), grad.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        unit = wide * scale
        grad_weight = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                grad_weight = (wide_grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
            wide_grad = wide_grad * weight.float()
        grad_x = scale * (wide_grad - unit * (wide_grad * unit).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None
