"""What can be configured about the sdpa backend."""

from __future__ import annotations

import dataclasses

import torch

from polyattn import AttentionRequest

#: Half precisions that this CPU multiplies in tiles (AMX); the fused backward emulates the others or widens them.
_FAST = {
    dtype
    for dtype, has in (
        (torch.bfloat16, torch.cpu._is_amx_tile_supported()),  # noqa: SLF001
        (torch.float16, torch.cpu._is_amx_fp16_supported()),  # noqa: SLF001
    )
    if has
}


@dataclasses.dataclass(frozen=True)
class SdpaOptions:
    """Options of the backend ``sdpa``.

    Attributes:
        upcast_backward: compute the gradients of BF16 and FP16 tensors in FP32, on the CPU: each tile is cast once, and
            its gradients are rounded once. The forward, and what it saves, stay as they are. ``None`` does so where the
            CPU has no matrix instructions (AMX) for the dtype, which is where it is faster; a bias under gradients and
            dropout are not concerned.
    """

    upcast_backward: bool | None = None

    def upcasts(self, request: AttentionRequest) -> bool:
        """Whether the backward of ``request`` casts its tiles to FP32."""
        low = request.dtype in (torch.bfloat16, torch.float16)
        if not (low and request.needs_grad and request.device.type == "cpu"):
            return False
        return request.dtype not in _FAST if self.upcast_backward is None else self.upcast_backward
