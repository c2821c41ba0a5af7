"""A decoder as a model author writes it: no mask anywhere, and attention named by the config.

``forward`` takes a ``MaskLayout``, which says what may see what, and puts it into one ``AttentionScope``. The scope is
filled once at the top and shared by all layers, so masks and rotary tables are built once per forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyattn import AttentionConfig, AttentionScope, KVCache, MaskLayout
from tiny_lm.config import ModelConfig
from tiny_lm.data import VOCABULARY


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, hidden_size]`` to the same shape."""
        down: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return down


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=1e-6)
        self.attention = attention.layer(index).build()
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=1e-6)
        self.mlp = SwiGLU(model.hidden_size, model.mlp_size)

    def forward(self, hidden: Tensor, scope: AttentionScope, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """``[B, S, hidden_size]`` to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), scope, positions, cache=cache)
        mixed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return mixed


class TinyLM(nn.Module):
    """A decoder over bytes; the embedding is also the output projection."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, model.hidden_size)
        nn.init.normal_(self.embedding.weight, std=model.hidden_size**-0.5)
        self.layers = nn.ModuleList(Layer(model, attention, index) for index in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=1e-6)

    def caches(self, batch: int, capacity: int, dtype: torch.dtype) -> tuple[KVCache, ...]:
        """Caches for sequences of up to ``capacity`` bytes."""
        specs = [layer.attention.spec for layer in cast("Iterable[Layer]", self.layers)]
        return KVCache.for_layers(specs, batch, capacity, device=self.embedding.weight.device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        layout: MaskLayout | AttentionScope,
        positions: Tensor,
        caches: Sequence[KVCache | None] = (),
    ) -> Tensor:
        """Scores of the next byte.

        Args:
            tokens: ``Int[B, S]``.
            layout: what each token may see, or a scope that knows it.
            positions: ``Int[B, S]``, for RoPE.
            caches: of the layers, in decoding; they give layout and positions.

        Returns:
            ``[B, S, 256]``, before the softmax.
        """
        hidden = self.embedding(tokens)
        scope = layout if isinstance(layout, AttentionScope) else AttentionScope(layout)
        layers = list(zip(cast("Iterable[Layer]", self.layers), caches or [None] * len(self.layers), strict=True))
        for layer, cache in layers:
            layer.attention.fill(scope, hidden, positions, cache=cache)
        for layer, cache in layers:
            hidden = layer(hidden, scope, positions, cache)
        return F.linear(self.norm(hidden), self.embedding.weight)
