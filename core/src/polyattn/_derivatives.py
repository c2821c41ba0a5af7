"""Derivatives that a fused kernel cannot give: refused by name, never a zero.

Kernels with a backward of their own know first derivatives in reverse mode only. ``torch.func`` transforms, forward
mode and differentiating twice go to a backend with the ability ``second_order`` (``eager``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(backend: str) -> None:
    """Raise inside ``torch.func`` transforms and forward-mode differentiation."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        raise NotImplementedError(
            f"backend '{backend}' does not work inside torch.func transforms (grad, vmap, jvp) or forward-mode "
            "differentiation; use the backend 'eager' there"
        )


def refuse_second_order(backend: str, *outputs: Tensor | None) -> None:
    """Make a backward through ``outputs`` with ``create_graph=True`` raise."""
    for output in outputs:
        if output is not None and output.grad_fn is not None:
            # On the node, not on the tensor: Tensor.register_hook costs five times as much.
            output.grad_fn.register_prehook(_refusal(backend))


@functools.lru_cache(maxsize=64)
def _refusal(backend: str) -> Callable[[tuple[Tensor, ...]], None]:
    def refuse(grads: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # backward runs its hooks in grad mode only when a graph of the gradient is wanted
            raise NotImplementedError(
                f"backend '{backend}' has no second derivatives (create_graph=True); use the backend 'eager'"
            )

    return refuse
