"""Does a backend give what transformers' eager attention gives? Three questions with numbers for answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import polyattn_transformers

PROMPT = "What does a Python function return when it has no return statement?"
NEW_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """What one attention implementation gave.

    Attributes:
        tokens: greedy continuation of a chat prompt.
        perplexity: of a page of text.
    """

    tokens: list[int]
    perplexity: float


def answer(model: Any, tokenizer: Any, page: str, *, cache: str | None = None) -> Answer:
    """Generate and measure with the implementation that the model is on.

    Args:
        model: on any implementation.
        tokenizer: of the model.
        page: text for the perplexity.
        cache: ``"static"`` keeps sizes fixed from token to token, which spares a compiled kernel one compilation each.
    """
    chat = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    extra = {"cache_implementation": cache, "disable_compile": True} if cache else {}
    output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **extra)
    return Answer(output[0, prompt.input_ids.shape[1] :].tolist(), perplexity(model, tokenizer, page))


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, page: str) -> float:
    """Exponential of the mean loss in nats of each token of ``page`` but the first."""
    tokens = tokenizer(page, return_tensors="pt").input_ids
    return math.exp(model(tokens, labels=tokens, use_cache=False).loss.item())


@torch.no_grad()
def leak(model: Any, first: Tensor, second: Tensor) -> dict[str, float]:
    """By how much logits of two documents change at most when they are packed into one row.

    Args:
        model: on a polyattn implementation.
        first: tokens ``Int[N]``.
        second: tokens ``Int[M]``.

    Returns:
        The largest difference for each way of packing: positions alone, beside a mask of ones, with a cache, and
        described explicitly.
    """
    alone = torch.cat([model(part[None], use_cache=False).logits for part in (first, second)], 1)
    row = torch.cat([first, second])[None]
    described = polyattn_transformers.packed([len(first), len(second)])
    positions = {"position_ids": described["position_ids"]}
    ways: dict[str, dict[str, Any]] = {
        "position_ids": {**positions, "use_cache": False},
        "position_ids and a mask of ones": {**positions, "attention_mask": torch.ones_like(row), "use_cache": False},
        "position_ids and a cache": {**positions, "use_cache": True},
        "packed(...)": {**described, "use_cache": True},
    }
    return {name: float((model(row, **inputs).logits - alone).abs().max()) for name, inputs in ways.items()}
