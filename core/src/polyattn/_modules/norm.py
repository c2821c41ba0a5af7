"""RMS normalisation that computes in FP32 and rounds once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    The mean, the quotient and the product with the weight are FP32 (FP64 for FP64 input) and the result is cast once
    to the dtype of ``x``, as serving engines do; transformers rounds before it multiplies.

    Args:
        width: size of the last dimension.
        eps: added to the mean of squares; stated, never defaulted, because model families differ.
        weighted: whether a learned weight multiplies the result.
        device, dtype: of the weight.
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
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if weighted else None
        )
        self.weight: nn.Parameter | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., width]``; the dtype stays."""
        high = torch.float64 if x.dtype is torch.float64 else torch.float32
        weight = None if self.weight is None else self.weight.to(high)
        return functional.rms_norm(x.to(high), (self.width,), weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, weighted={self.weight is not None}"
