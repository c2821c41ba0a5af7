"""Attention over tokens that are shared out to ranks: the methods, the agreement on one, and the one-shot form."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyattn import AttentionBackend, AttentionInputError, AttentionRequest, AttentionResult, MaskLayout, PolyattnError
from polyattn.messages import shown
from polyattn.select import resolve_backend
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.gather import Gather
from polyattn_context_parallel.handshake import agree
from polyattn_context_parallel.ring import Ring
from polyattn_context_parallel.shard import Shard
from polyattn_context_parallel.ulysses import Ulysses

METHODS: dict[str, type[Gather | Ulysses | Ring]] = {"gather": Gather, "ulysses": Ulysses, "ring": Ring}
CHECKS = ("once", "always", "never")


class ContextParallelAttention:
    """Attention of this rank's queries under the mask of the whole sequences, made ready; call it as any other.

    Attributes:
        backend: who attends on each rank.
        layout: the mask of the whole sequences.
        request: what one rank's call asks for.
        method: the method that runs.

    Raises:
        ContextParallelError: the ranks disagree, or the method cannot do this.
        UnsupportedAttentionError: the backend refuses its part on this rank.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        shard: Shard,
        layout: MaskLayout,
        request: AttentionRequest,
        *,
        method: str = "auto",
        check: str = "once",
        timeout: float = 30.0,
    ) -> None:
        check_choice("method", method, ("auto", *METHODS))
        check_choice("check", check, CHECKS)
        self.backend, self.layout, self.request = backend, layout, request
        self._shard, self._check, self._timeout = shard, check, timeout
        self.method = chosen(layout, request, shard.ranks) if method == "auto" else method
        self._asked = {
            "layout": layout.fingerprint() or f"a mask_mod of {layout.q_len} tokens",
            "tokens": f"{shard.layout.q_len}, {shard.balance}",
            "backend": shown(backend),
            "method": self.method,
            **{f.name: str(getattr(request, f.name)) for f in dataclasses.fields(request) if f.name != "device"},
            "device": request.device.type,
        }
        fault: PolyattnError | None = None
        try:
            if request.dropout:
                raise ContextParallelError(
                    f"dropout_p must be 0 under context parallelism, got {request.dropout_p:g}: which weights are "
                    "dropped would depend on the number of ranks"
                )
            self._run = METHODS[self.method](backend, shard, layout, request)
        except PolyattnError as error:
            fault = error
        if check != "never":
            try:
                agree(shard.group, self._asked, "" if fault is None else str(fault), timeout)
            except ContextParallelError as error:
                if fault is None or "differ" in str(error):
                    raise
        if fault is not None:
            raise fault

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, sinks: Tensor | None = None
    ) -> AttentionResult:
        """Attend.

        Args:
            q: ``[B, Hq, n, D]`` of this rank's ``n`` tokens (``shard.take``).
            k: ``[B, Hkv, n, D]``.
            v: ``[B, Hkv, n, Dv]``.
            bias: ``[B|1, Hq|1, n|1, S|1]``: this rank's rows, the columns of the whole sequences; method gather only.
            sinks: ``[Hq]``.

        Raises:
            AttentionInputError: a tensor has another shape, dtype or device; nothing was sent.
        """
        q, k, v = self._checked(q, k, v)
        if self._check == "always":
            agree(self._shard.group, self._asked, "", self._timeout)
        return self._run(q, k, v, bias, sinks)

    def _checked(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        request, count = self.request, len(self._shard.mine)
        kind = request.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        sizes = (
            (request.heads, request.head_dim),
            (request.kv_heads, request.head_dim),
            (request.kv_heads, request.v_head_dim),
        )
        for name, x, (heads, width) in zip("qkv", tensors, sizes, strict=True):
            shape = [request.batch, heads, count, width]
            if list(x.shape) != shape or x.device != request.device or (x.dtype is not request.dtype and not cast):
                raise AttentionInputError(
                    f"{name} must be {shape}, {request.dtype} on {request.device}: the {count} tokens of rank "
                    f"{self._shard.rank}, got {list(x.shape)}, {x.dtype} on {x.device}; take this rank's part of whole "
                    "sequences by shard.take"
                )
        return tuple(x.to(request.dtype) for x in tensors)


def chosen(layout: MaskLayout, request: AttentionRequest, ranks: int) -> str:
    """The method that ``auto`` is: heads where the mask has no structure to gather by, else the needed keys."""
    by_heads = layout.to_bands() is None and request.heads >= ranks and not request.has_bias
    return "ulysses" if by_heads else "gather"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ContextParallelError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ContextParallelError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {shown(value)}")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    *,
    backend: str | AttentionBackend,
    method: str = "auto",
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    check: str = "once",
    timeout: float = 30.0,
    **asked: Any,
) -> AttentionResult:
    """``polyattn.attention`` of this rank's tokens under the mask of the whole sequences; every rank calls it.

    Args:
        q: ``[B, Hq, n, D]`` of this rank's tokens.
        k: ``[B, Hkv, n, D]``.
        v: ``[B, Hkv, n, Dv]``.
        shard: who holds which tokens, and the layout.
        backend: a name or an object, the same on all ranks.
        method: ``"auto"``, ``"gather"``, ``"ulysses"`` or ``"ring"``.
        bias: see :class:`ContextParallelAttention`.
        sinks: ``[Hq]``.
        return_lse: whether the log-sum-exp is returned.
        check: ``"once"`` or ``"always"``: the ranks agree before anything is sent; ``"never"``: they do not ask.
        timeout: seconds until a rank that has not come is given up.
        asked: ``scale``, ``softcap``, ``dropout_p``, ``training`` as ``polyattn.attention`` takes them.

    Raises:
        ContextParallelError, AttentionInputError, UnsupportedAttentionError: see :class:`ContextParallelAttention`.
    """
    request = AttentionRequest.of(q, k, v, bias=bias, sinks=sinks, needs_lse=return_lse, needs_lse_grad=None, **asked)
    prepared = ContextParallelAttention(
        resolve_backend(backend), shard, shard.layout, request, method=method, check=check, timeout=timeout
    )
    return prepared(q, k, v, bias=bias, sinks=sinks)
