"""Derivatives that a fused kernel cannot give: refused by name, never a zero.

Kernels with a backward of their own know first derivatives in reverse mode only. ``torch.func`` transforms, forward
mode, batched gradients and differentiating twice go to a backend with the ability ``second_order`` (``eager``).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforming() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # noqa: SLF001


def refuse_transforms(backend: str) -> NoReturn:
    """Raise what is said inside ``torch.func`` transforms and forward-mode differentiation (:func:`transforming`)."""
    raise NotImplementedError(
        f"backend '{backend}' does not work inside torch.func transforms (grad, vmap, jvp) or forward-mode "
        "differentiation; use the backend 'eager' there"
    )


def refuse_others(backend: str, result: Tensor) -> None:
    """Let the backward of ``result`` raise where the gradient gets a graph (``create_graph=True``) or is batched."""
    node = result.grad_fn
    if node is not None:
        node._register_hook_dict(refusal(backend, result.output_nr))  # noqa: SLF001


@functools.lru_cache(maxsize=256)
def refusal(backend: str, place: int) -> Tensor:
    """A tensor that carries the hook of :func:`refuse_others` for the output ``place`` of a node.

    A node takes over a tensor's hooks by one call; ``Node.register_prehook`` makes a dictionary and a handle each time.
    """

    def refuse(grad: Tensor | None) -> None:
        if torch.is_grad_enabled():  # backward runs its hooks in grad mode only then
            raise NotImplementedError(
                f"backend '{backend}' has no second derivatives (create_graph=True); use the backend 'eager'"
            )
        if torch.compiler.is_compiling():  # compiled autograd traces the hook, and knows no batched tensors
            return
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):  # noqa: SLF001
            raise NotImplementedError(
                f"backend '{backend}' takes no batched gradients (is_grads_batched=True, vectorize=True); ask for one "
                "after the other, or use the backend 'eager'"
            )

    with torch.inference_mode(False), torch.enable_grad():
        carrier = torch.zeros(place + 1, device="meta", requires_grad=True).unbind()[place]
    carrier._backward_hooks = OrderedDict({0: refuse})  # noqa: SLF001
    return carrier
