"""Fine-tuning on packed documents, on the backend that a YAML file names."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import polyattn_transformers
from polyattn import ConfigError, read_yaml
from smollm2 import text


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything about one run.

    Attributes:
        attn_backend: name of a polyattn backend, or ``auto``.
        backend_options: options of that backend.
        steps: number of steps.
        row_length: tokens of a step.
        learning_rate: of AdamW.
        seed: decides the order of the documents.
    """

    attn_backend: str = "auto"
    backend_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 10
    row_length: int = 256
    learning_rate: float = 2e-5
    seed: int = 0

    @classmethod
    def read(cls, path: Path) -> FinetuneConfig:
        """The config in a YAML file.

        Raises:
            ConfigError: the file cannot be read, or a key is unknown or holds a value of another type.
        """
        content = read_yaml(path)
        kinds = {name: typing.get_origin(kind) or kind for name, kind in typing.get_type_hints(cls).items()}
        problems = [f"{name} is unknown; known are {', '.join(kinds)}" for name in content if name not in kinds]
        problems += [
            f"{name} must be of type {kinds[name].__name__}, got {reprlib.repr(value)[:80]}"
            for name, value in content.items()
            if name in kinds and type(value) is not kinds[name]
        ]
        problems += [
            f"{name} must be positive and finite, got {reprlib.repr(content[name])}"
            for name in ("steps", "row_length", "learning_rate")
            if not problems and not 0 < content.get(name, 1) < math.inf
        ]
        if problems:
            raise ConfigError(f"config file {path}: {'; '.join(problems)}")
        return cls(**content)


def finetune(model: Any, tokenizer: Any, config: FinetuneConfig) -> Iterator[float]:
    """Train ``model`` in place; yields the loss in nats of each step.

    Raises:
        UnknownBackendError, UnsupportedAttentionError: the backend does not exist or cannot train the model.
    """
    polyattn_transformers.use(model, config.attn_backend, config.backend_options)
    rows = text.rows(text.documents(tokenizer, config.seed), config.row_length, config.steps)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    model.train()
    for tokens, lengths in rows:
        labels = tokens.clone()
        labels[0, [sum(lengths[:i]) for i in range(len(lengths))]] = -100  # nothing before a document foretells it
        loss = model(tokens, **polyattn_transformers.packed(lengths), labels=labels, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield loss.item()
    model.eval()
