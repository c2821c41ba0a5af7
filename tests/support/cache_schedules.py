"""Random schedules of decoding with a cache, each step compared with the full forward."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from typing import Any

import torch
from torch import Tensor

import fa_stand_in
from polyattn import AttentionScope, GroupedQueryAttention, KVCache, MaskLayout, RopeSpec, backends

BASE = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 1e4}
OLD = {"original_max_position_embeddings": 16}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **OLD},
}
KINDS = ("static", "growing", "sliding")
HIDDEN, HEADS, WIDTH = 32, 4, 8
#: Differences of a step and the full forward are below them; ``fa`` runs in BF16, by the stand-in for its kernels.
BOUNDS = {"eager": 1e-12, "sdpa": 1e-12, "flex_attention": 1e-12, "fa": 0.02}


def rope(name: str) -> RopeSpec:
    """A rotary rule of :data:`ROPES`."""
    scaling = ROPES[name]
    return RopeSpec.from_hf(BASE if scaling is None else {**BASE, "rope_scaling": scaling})


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is decoded how: a layer, a cache, and the random steps of a seed."""

    backend: str
    kind: str
    window: int | None
    group: int = 2
    rope: str = "default"
    seed: int = 0
    rows: int = 3
    tokens: int = 24
    most_new: int = 4
    most_back: int = 2
    dtype: torch.dtype = torch.float64

    @classmethod
    def drawn(cls, seed: int, among: tuple[str, ...]) -> Schedule:
        """A random one, on one of these backends."""
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        window = draw.choice((1, 4, 7) if kind == "sliding" else (None, None, 1, 4, 7))
        most_new, most_back = draw.randint(1, 6), draw.randint(0, 4)
        where = (draw.choice(among), kind, window, draw.choice((1, 2, 4)), draw.choice(list(ROPES)), seed)
        found = cls(*where, draw.randint(1, 4), draw.randint(10, 28), most_new, most_back)
        if found.backend != "fa":
            return found
        # Its kernel knows nothing of the order of a ring's slots: one token at a time sees all of them.
        rest = {"most_new": 1, "most_back": 0} if kind == "sliding" else {}
        return dataclasses.replace(found, dtype=torch.bfloat16, **rest)

    def layer(self) -> GroupedQueryAttention:
        """The layer."""
        return GroupedQueryAttention(
            HIDDEN,
            HEADS,
            HEADS // self.group,
            WIDTH,
            rope=rope(self.rope),
            window=self.window,
            backend=self._backend(),
            dtype=self.dtype,
        )

    def cache(self, layer: GroupedQueryAttention) -> KVCache:
        """Its cache."""
        slots = {"static": self.tokens, "growing": 3, "sliding": None}[self.kind]
        most = {"max_new": self.most_new, "max_rollback": self.most_back}
        return KVCache(layer.spec, self.rows, slots, kind=self.kind, dtype=self.dtype, **most)

    def _backend(self) -> Any:
        return backends.resolve(self.backend, {"compiled": False} if self.backend == "flex_attention" else None)

    def fits(self) -> bool:
        """Whether every step of the schedule gives the full forward's numbers."""
        with fa_stand_in.stand_in() if self.backend == "fa" else contextlib.nullcontext():
            return self.worst() < BOUNDS[self.backend]

    @torch.no_grad()
    def worst(self) -> float:
        """The largest difference of a step's output and the full forward's, over the whole schedule."""
        torch.manual_seed(self.seed)
        draw, layer = random.Random(self.seed), self.layer()
        cache, worst = self.cache(layer), 0.0
        hidden = torch.randn(self.rows, self.tokens, HIDDEN, dtype=self.dtype)
        full = layer(hidden, AttentionScope(MaskLayout.causal(self.tokens)), torch.arange(self.tokens)[None])
        lengths = furthest = torch.zeros(self.rows, dtype=torch.int64)
        while int(lengths.max()) <= self.tokens - self.most_new:
            count = draw.randint(1, self.most_new)
            at = lengths[:, None] + torch.arange(count)
            scope = AttentionScope(cache.layout(count))
            got = layer(_rows(hidden, at), scope, draw.choice((None, cache.positions(count))), cache=cache)
            difference = (got - _rows(full, at)).abs().max().item()
            worst = max(worst, torch.inf if math.isnan(difference) else difference)
            lengths = lengths + count
            furthest = torch.maximum(furthest, lengths)
            assert torch.equal(cache.lengths, lengths)
            if draw.random() < 0.4:
                back = torch.tensor([draw.randint(0, self.most_back) for _ in range(self.rows)])
                least = torch.minimum(lengths, furthest - self.most_back).clamp(min=0)
                lengths = torch.maximum(lengths - back, least)
                cache.rollback(lengths)
            if draw.random() < 0.2:
                index = torch.tensor([draw.randrange(self.rows) for _ in range(self.rows)])
                cache.reorder(index)
                hidden, full, lengths, furthest = (x[index] for x in (hidden, full, lengths, furthest))
        return worst


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """The tokens of each row at its positions, ``[B, N, X]``."""
    return x.gather(1, at[:, :, None].expand(-1, -1, x.shape[2]))
