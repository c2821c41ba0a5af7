"""Real text that is always there: the documentation which every CPython ships."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor


def page(topic: str = "objects", characters: int = 1800) -> str:
    """About one page: the beginning of a topic of ``help()``."""
    return str(topics[topic])[:characters].strip()


def documents(tokenizer: Any, seed: int) -> Iterator[Tensor]:
    """Every topic as tokens ``Int[N]``, in an order that the seed decides."""
    names = sorted(topics)
    for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist():
        tokens: Tensor = tokenizer(str(topics[names[i]]), return_tensors="pt").input_ids[0]
        if len(tokens) > 1:
            yield tokens


def rows(documents: Iterable[Tensor], length: int, count: int) -> list[tuple[Tensor, list[int]]]:
    """The first ``count`` rows of documents laid end to end.

    Returns:
        For each row its tokens ``Int[1, length]`` and the lengths of the documents in it; a document that crosses the
        end of a row goes on in the next as one of its own.
    """
    parts: list[Tensor] = []
    for document in documents:
        parts.append(document)
        if sum(map(len, parts)) >= length * count:
            break
    text = torch.cat(parts)
    number = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
    found = []
    for start in range(0, min(length * count, len(text) // length * length), length):
        here = slice(start, start + length)
        lengths = torch.unique_consecutive(number[here], return_counts=True)[1].tolist()
        found.append((text[here][None], lengths))
    return found
