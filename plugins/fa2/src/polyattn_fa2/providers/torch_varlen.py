"""The provider ``torch_varlen``: the FlashAttention-2 kernels inside torch, by ``torch.nn.attention.varlen``.

``varlen_attn`` picks a cuDNN kernel by itself for full attention on newer GPUs. This provider always runs
FlashAttention-2: it writes full attention as a window that reaches over all keys, which the kernels take for unbounded.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from polyattn import AttentionRequest, Reason
from polyattn_fa2.providers.base import Forward, Grads, KernelCall, Provider

#: Arguments of ``varlen_attn`` that came after its first release.
ARGUMENTS = ("scale", "window_size", "enable_gqa", "return_aux")


class TorchVarlen(Provider):
    """FlashAttention-2 inside torch."""

    name = "torch_varlen"
    package = "torch.nn.attention.varlen"
    module = "torch.nn.attention.varlen"
    needs = f"a torch whose varlen_attn takes {', '.join(ARGUMENTS)}"
    install = "update torch"
    abilities = frozenset(
        (
            *("bfloat16", "float16", "full", "causal", "window", "padded", "packed", "prefix_lm", "chunked"),
            *("tree", "sink_tokens", "two_sided_window", "union"),
            *("positions", "active_queries", "gqa", "unequal_width", "sinks", "lse", "lse_grad", "grad"),
            "deterministic",
        )
    )

    def version_problem(self, module: Any) -> str:
        """A torch whose function lacks arguments."""
        known = inspect.signature(module.varlen_attn).parameters
        missing = [name for name in ARGUMENTS if name not in known]
        return f"torch {torch.__version__}, whose varlen_attn lacks {', '.join(missing)}" if missing else ""

    def title(self) -> str:
        """Name and version."""
        return f"FlashAttention-2 inside torch {torch.__version__} (varlen_attn)"

    def limits(self, request: AttentionRequest, *, deterministic: bool) -> tuple[Reason, ...]:
        """A backward that is deterministic only when all of torch is."""
        if not deterministic or not request.needs_grad or _torch_is_deterministic():
            return ()
        return (
            Reason(
                "torch_varlen_not_deterministic",
                "deterministic",
                "a deterministic backward without torch.use_deterministic_algorithms(True)",
                "that mode, which is where torch's kernel looks",
                "call it, without warn_only, before the request is made",
            ),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Forward:
        """One call over sequences."""
        kernels = self.load()
        output, lse = kernels.varlen_attn(
            q,
            k,
            v,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            return_aux=kernels.AuxRequest(lse=True),
            scale=call.scale,
            window_size=_window(call),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return output, lse, torch.zeros(2, dtype=torch.int64, device=q.device)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        lse: Tensor,
        rng_state: Tensor,
        call: KernelCall,
    ) -> Grads:
        """One call over sequences."""
        window = _window(call)
        dq, dk, dv = self.load()._varlen_attn_backward(  # noqa: SLF001 - the public function drops the LSE's gradient
            grad,
            q,
            k,
            v,
            output,
            lse,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            window == (-1, 0),
            rng_state.view(torch.uint64),
            call.scale,
            list(window),
        )
        return dq, dk, dv


def _window(call: KernelCall) -> tuple[int, int]:
    if call.window_size == (-1, -1):
        return call.max_seqlen_k, call.max_seqlen_k
    return call.window_size


def _torch_is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
