"""Multi-head latent attention: keys and values of all heads from one small latent for each token.

Shape letters: B batch, S query length, H heads, R channels of the latent of keys and values, N channels of a head that
stay, T those that rotate, V value width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import (
    AttentionBackend,
    AttentionInputError,
    AttentionResult,
    AttentionScope,
    RopeSpec,
    RotaryEmbedding,
    RotaryTables,
)
from polyattn.registry import AUTO
from polyattn.rope import rotate_heads
from polyattn.select import resolve_backend
from polyattn_modules.base_layer import AttentionLayer
from polyattn_modules.cache import KVCache
from polyattn_modules.inputs import check_dtype, check_making
from polyattn_modules.kind import LayerKind
from polyattn_modules.latent_spec import LatentSpec
from polyattn_modules.norm import RMSNorm
from polyattn_modules.reading import Read, read_scope
from polyattn_modules.sources import NOTHING, KeySource

_FIELDS = tuple(field.name for field in dataclasses.fields(LatentSpec))


class LatentAttention(AttentionLayer[LatentSpec]):
    """Multi-head latent attention (MLA) on any backend.

    DeepSeek-V2 (arXiv:2405.04434, section 2.1) describes it. Names of parameters are those of transformers.

    Args:
        hidden_size, num_heads, q_rank, kv_rank, nope_dim, rope_dim, v_head_dim, rope, norm_eps, scale, window, dropout,
            bias, output_bias, layout: the fields of :class:`LatentSpec`.
        backend, backend_options, device, dtype: as of :class:`GroupedQueryAttention`.

    Raises:
        ConfigError: the structure contradicts itself; every fault in one message. Or ``device`` or ``dtype`` is not
            valid.
        UnsupportedAttentionError: see :class:`GroupedQueryAttention`.
    """

    READER = "hf_latent"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_rank: int | None = None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_head_dim: int,
        rope: RopeSpec,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        layout: str | None = None,
        backend: str | AttentionBackend = AUTO,
        backend_options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        spec = LatentSpec(**{name: value for name, value in locals().items() if name in _FIELDS})
        super().__init__()
        check_making(False, device, dtype)
        kind = LayerKind(resolve_backend(backend, backend_options), spec)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        queries = num_heads * spec.head_dim
        if q_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_rank, bias=spec.bias, **made)
            self.q_a_layernorm = RMSNorm(q_rank, eps=spec.norm_eps, **made)
            self.q_b_proj = nn.Linear(q_rank, queries, bias=False, **made)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_rank + rope_dim, bias=spec.bias, **made)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=spec.norm_eps, **made)
        self.kv_b_proj = nn.Linear(kv_rank, num_heads * (nope_dim + v_head_dim), bias=False, **made)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=spec.output_bias, **made)
        self.rotary = RotaryEmbedding(spec.rope)
        self.kind = self._able(kind, placed=device is not None)

    @classmethod
    def from_spec(cls, spec: LatentSpec, **rest: Any) -> LatentAttention:
        """Build the layer that ``spec`` describes.

        Args:
            spec: the structure.
            rest: ``backend``, ``backend_options``, ``device``, ``dtype``.
        """
        return cls(**{name: getattr(spec, name) for name in _FIELDS}, **rest)

    @classmethod
    def from_hf(cls, config: Any, *, layer: int = 0, convention: str = "serving", **rest: Any) -> LatentAttention:
        """Build the layer that a transformers configuration describes; see :meth:`LatentSpec.from_hf`."""
        return cls.from_spec(LatentSpec.from_hf(config, layer=layer, convention=convention), **rest)

    def fill(
        self,
        scope: AttentionScope,
        hidden: Tensor,
        positions: Tensor | None,
        *,
        cache: KVCache | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        """Put into ``scope`` what :meth:`forward` with the same arguments will read from it."""
        self._read(scope, hidden, positions, cache, attention_bias, return_lse)

    def forward(
        self,
        hidden: Tensor,
        scope: AttentionScope,
        positions: Tensor | None,
        *,
        cache: KVCache | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | AttentionResult:
        """Attend.

        Args:
            hidden: ``[B, S, hidden_size]``.
            scope: the forward's scope; its layout has ``q_len == S``, and ``kv_len == S`` without a cache.
            positions: Int ``[B|1, S]``; ``None`` will do with a cache, which has them.
            cache: of this layer, ``KVCache(layer.spec, ...)``, which keeps latents and rotated keys only. Queries are
                then taken through the key projection and attend to the latents themselves (the absorbed form), which is
                equal in value. Only without gradients.
            attention_bias: floating, broadcastable to ``[B, H, S, K]``.
            return_lse: return ``AttentionResult(output, lse)`` with the projected output instead of the output alone.

        Returns:
            ``[B, S, hidden_size]``.

        Raises:
            AttentionInputError: a shape, dtype or device does not fit; raised before any matrix product.
            LayoutError, UnsupportedAttentionError: see :meth:`AttentionBackend.prepare`; likewise.
        """
        spec = self.spec
        read = self._read(scope, hidden, positions, cache, attention_bias, return_lse)
        if read.low is None:
            check_dtype(hidden, self.kv_a_proj_with_mqa)
        stay, turn = self._queries(hidden).split((spec.nope_dim, spec.rope_dim), -1)
        latent, key = self.kv_a_proj_with_mqa(hidden).split((spec.kv_rank, spec.rope_dim), -1)
        latent = self.kv_a_layernorm(latent)
        turn, key = self._turned(turn.transpose(1, 2), read.tables), self._turned(key[:, None], read.tables)
        if cache is None:
            result = self._attend(stay, turn, latent, key, read, attention_bias)
            output = result.output.transpose(1, 2).flatten(2)
        else:
            result = self._attend_absorbed(stay, turn, latent, key, read, cache, attention_bias)
            values = self._weights()[:, spec.nope_dim :]
            output = torch.einsum("bhsr,hvr->bshv", result.output, values).flatten(2)
        projected: Tensor = self.o_proj(output)
        return AttentionResult(projected, result.lse) if return_lse else projected

    def _read(
        self,
        scope: AttentionScope,
        hidden: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        bias: Tensor | None,
        return_lse: bool,
    ) -> Read:
        kind, source = self.kind, NOTHING
        if cache is not None:
            if type(self.kv_b_proj) is not nn.Linear:
                raise AttentionInputError(
                    "kv_b_proj must be a plain nn.Linear for a cache, which attends to latents through its weight, got "
                    f"{type(self.kv_b_proj).__name__}; merge the adapter or quantised layer into the weight first"
                )
            kind, source = kind.absorbed, KeySource(cache=cache)
        return read_scope(self, kind, scope, hidden, positions, source, bias, return_lse)

    def _queries(self, hidden: Tensor) -> Tensor:
        """``[B, S, H, N + T]``."""
        if self.spec.q_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        found: Tensor = q.view(*q.shape[:2], -1, self.spec.head_dim)
        return found

    def _turned(self, x: Tensor, tables: RotaryTables | None) -> Tensor:
        """``[B, H, S, T]``, rotated; as it is where the rotary module was taken out of the layer."""
        rotary = self.rotary
        return x if rotary is None or tables is None else rotate_heads(x, tables, interleaved=rotary.spec.interleaved)

    def _attend(
        self, stay: Tensor, turn: Tensor, latent: Tensor, key: Tensor, read: Read, bias: Tensor | None
    ) -> AttentionResult:
        """Attention with a key and a value of each head, projected from the latent."""
        spec = self.spec
        both = self.kv_b_proj(latent)
        both = both.view(*both.shape[:2], -1, spec.nope_dim + spec.v_head_dim).transpose(1, 2)
        k, v = both.split((spec.nope_dim, spec.v_head_dim), -1)
        q = torch.cat((stay.transpose(1, 2), turn), -1)
        k = torch.cat((k, key.expand(-1, k.shape[1], -1, -1)), -1)
        return read.prepared(q, k, v, bias=bias)

    def _attend_absorbed(
        self, stay: Tensor, turn: Tensor, latent: Tensor, key: Tensor, read: Read, cache: KVCache, bias: Tensor | None
    ) -> AttentionResult:
        """Attention over cached latents: ``q (W k) = (q W) k``; the output is of latents, ``[B, H, S, R]``."""
        within = torch.einsum("bshn,hnr->bhsr", stay, self._weights()[:, : self.spec.nope_dim])
        q, k = torch.cat((within, turn), -1), torch.cat((latent[:, None], key), -1)
        if read.low is not None:
            k = k.to(read.low)
        keys, values = cache.append(k, k[..., : self.spec.kv_rank])
        return read.prepared(q, keys, values, bias=bias)

    def _weights(self) -> Tensor:
        """How a head's key and value come from the latent, ``[H, N + V, R]``."""
        weight = self.kv_b_proj.weight
        return weight.view(-1, self.spec.nope_dim + self.spec.v_head_dim, weight.shape[1])
