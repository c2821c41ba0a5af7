"""Text from a trained model: the prompt goes through at once, then each byte by itself, from caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tiny_lm.train import Run


def sample(run: Run, prompt: bytes, count: int, *, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
    """The next ``count`` bytes after ``prompt``, one at a time.

    Args:
        run: whose model speaks.
        prompt: at least one byte.
        count: how many bytes.
        temperature: 0 takes the likeliest byte; above, bytes are drawn by the softmax of scores / temperature.
        seed: of the draws.
    """
    model, device = run.model.eval(), torch.device(run.config.device)
    draws = torch.Generator(device).manual_seed(seed)
    caches = model.caches(1, len(prompt) + count, run.dtype)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        with torch.no_grad(), torch.autocast(device.type, dtype=run.dtype, enabled=run.config.autocast != "off"):
            layout, positions = caches[0].layout(tokens.shape[1]), caches[0].positions(tokens.shape[1])
            scores = model(tokens, layout, positions, caches)[:, -1].float()
        tokens = _next(scores, temperature, draws)
        yield int(tokens)


def _next(scores: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
    """``Int[B, 1]`` by scores ``[B, 256]``."""
    if temperature == 0:
        return scores.argmax(-1, keepdim=True)
    return torch.multinomial((scores / temperature).softmax(-1), 1, generator=draws)
