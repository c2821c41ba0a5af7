"""The provider ``flash_attn``: the kernels of the package of that name, version 2.

The kernels are called by the functions that ``flash_attn_func`` and ``flash_attn_varlen_func`` are made of
(``_flash_attn_forward``, ``_flash_attn_varlen_forward`` and their backwards): the public ones keep the state of the
dropout to themselves, allocate a quadratic tensor to return an LSE under dropout, and drop the LSE's gradient.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import Tensor

from polyattn import AttentionRequest, Reason
from polyattn_fa2.providers.base import FLASH_ATTN_INSTALL, Forward, Grads, KernelCall, Provider

#: From 2.7 on the four functions take ``window_size_left`` and ``window_size_right`` and return no padded copies.
VERSIONS = ((2, 7), (3, 0))
FUNCTIONS = (
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_backward",
    "flash_attn_with_kvcache",
)


class FlashAttn(Provider):
    """FlashAttention-2 by the package ``flash_attn``."""

    name = "flash_attn"
    package = "flash_attn"
    module = "flash_attn.flash_attn_interface"
    needs = "flash_attn >= 2.7, < 3"
    install = FLASH_ATTN_INSTALL
    fixed = True

    def version(self) -> str:
        """Of the installed package."""
        return str(importlib.import_module(self.package).__version__)

    def version_problem(self, module: Any) -> str:
        """Too old, too new, or without the functions that are called."""
        version = self.version()
        found = re.match(r"(\d+)\.(\d+)", version)
        least, below = VERSIONS
        if found is None or not least <= (int(found[1]), int(found[2])) < below:
            return f"flash_attn {version}"
        missing = [name for name in FUNCTIONS if not hasattr(module, name)]
        return f"flash_attn {version} without {', '.join(missing)}" if missing else ""

    def title(self) -> str:
        """Name and version."""
        return f"flash_attn {self.version()}"

    def limits(self, request: AttentionRequest, *, deterministic: bool) -> tuple[Reason, ...]:
        """The kernels have no dropout under a softcap."""
        if request.softcap is None or request.dropout == 0:
            return ()
        got = f"dropout_p {request.dropout} together with softcap {request.softcap}"
        return (Reason("softcap_with_dropout", "dropout", got, "one of the two", "use the backend 'eager' for both"),)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Forward:
        """One call, fixed or over sequences."""
        run = self._function("forward", call)
        output, lse, _, rng_state = run(q, k, v, **_lengths(call), **_settings(call), return_softmax=False)
        return output, lse, rng_state

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        """One call on the cache as it is."""
        output, lse = self.load().flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            block_table=block_table,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.window_size,
            softcap=call.softcap,
            return_softmax_lse=True,
        )
        return output, lse

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
        """One call, fixed or over sequences."""
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        settings = {**_lengths(call), **_settings(call), "deterministic": call.deterministic, "rng_state": rng_state}
        self._function("backward", call)(grad, q, k, v, output, lse, *grads, **settings)
        return grads

    def _function(self, direction: str, call: KernelCall) -> Any:
        kind = "" if call.cu_seqlens_q is None else "varlen_"
        return getattr(self.load(), f"_flash_attn_{kind}{direction}")


def _settings(call: KernelCall) -> dict[str, Any]:
    return {
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size_left": call.window_size[0],
        "window_size_right": call.window_size[1],
        "softcap": call.softcap,
        "alibi_slopes": None,
    }


def _lengths(call: KernelCall) -> dict[str, Any]:
    if call.cu_seqlens_q is None:
        return {}
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
    }
