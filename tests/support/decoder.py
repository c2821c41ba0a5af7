"""A decoder as small as one can be: four layers, two of them with a window, a rope of their own and a norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyattn import AttentionConfig, AttentionScope, MaskLayout
from polyattn_modules import RMSNorm

VOCABULARY, WIDTH, LENGTH = 50, 32, 16
NORM = {"position": "before", "scope": "head", "weighted": True, "eps": 1e-6}


def rope_of(theta: float = 10000.0, variant: str = "default", **changes: Any) -> dict[str, Any]:
    plain = {
        "schema_version": 1,
        "variant": variant,
        "theta": theta,
        "head_dim": 8,
        "rotary_dim": 8,
        "interleaved": False,
        "max_position": 64,
        "original_max_position": None,
        "parameters": {},
        "axes": None,
    }
    return {**plain, **changes}


def config_of(backend: Any = "sdpa", **changes: Any) -> AttentionConfig:
    fields = {
        "attn_backend": backend,
        "rope": rope_of(),
        "qk_norm": NORM,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "num_kv_heads": 2,
        "groups": [{"layers": "1::2", "window": 4, "rope": rope_of(500.0)}],
        **changes,
    }
    return AttentionConfig.from_dict(fields)


class Block(nn.Module):
    def __init__(self, config: AttentionConfig, index: int, **made: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(WIDTH, eps=1e-6, **made)
        self.attention = config.layer(index).build(**made)
        self.up = nn.Linear(WIDTH, 48, **made)
        self.down = nn.Linear(48, WIDTH, **made)

    def forward(self, hidden: Tensor, scope: AttentionScope, positions: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), scope, positions)
        return hidden + self.down(F.silu(self.up(hidden)))


class Decoder(nn.Module):
    """``tokens Int[B, S], layout or scope, positions Int[B|1, S]`` to logits ``[B, S, VOCABULARY]``.

    Attributes:
        builds: what the scope of the last forward built.
    """

    def __init__(
        self, config: AttentionConfig, layers: int = 4, *, checkpoint: bool | None = None, **made: Any
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, **made)
        self.layers = nn.ModuleList(Block(config, index, **made) for index in range(layers))
        self.norm = RMSNorm(WIDTH, eps=1e-6, **made)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, **made)
        self.checkpoint: bool | None = None  # or whether reentrant
        self.builds: dict[str, int] = {}

    def forward(self, tokens: Tensor, layout: MaskLayout | AttentionScope, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        scope = layout if isinstance(layout, AttentionScope) else AttentionScope(layout)
        for layer in self.layers:
            layer.attention.fill(scope, hidden, positions)
        for layer in self.layers:
            if self.checkpoint is None:
                hidden = layer(hidden, scope, positions)
            else:
                hidden = torch.utils.checkpoint.checkpoint(
                    layer, hidden, scope, positions, use_reentrant=self.checkpoint
                )
        if not torch.compiler.is_compiling():
            self.builds = scope.builds
        return self.head(self.norm(hidden))


def batch_of(lengths: list[list[int]], seed: int = 0) -> tuple[Tensor, MaskLayout, Tensor]:
    """Tokens, layout and positions of packed rows."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    tokens = torch.randint(0, VOCABULARY, positions.shape, generator=torch.Generator().manual_seed(seed))
    return tokens, MaskLayout.packed(lengths), positions


#: Eight ways to cut two rows of 16 tokens into documents.
SEGMENTATIONS = [
    [[16], [4, 12]],
    [[5, 5, 6], [16]],
    [[1, 15], [8, 8]],
    [[2, 2, 2, 2, 8], [3, 13]],
    [[10, 6], [6, 10]],
    [[16], [16]],
    [[7, 9], [1, 1, 14]],
    [[4, 4, 4, 4], [15, 1]],
]
