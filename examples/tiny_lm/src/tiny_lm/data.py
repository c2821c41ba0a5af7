"""The text that every CPython ships, packed into rows with explicit documents.

Each topic of ``pydoc`` is one document. An epoch shuffles the documents, lays them end to end and cuts the result into
rows of equal length, so no token is padding; a document that crosses the end of a row goes on in the next as a document
of its own. Which tokens may see each other is never guessed: every batch carries the lengths of its documents.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from polyattn import ConfigError

VOCABULARY = 256
NO_TARGET = -100


def python_documentation() -> list[bytes]:
    """The topics that ``help()`` knows, as UTF-8, ordered by name."""
    return [text.encode() for _, text in sorted(topics.items()) if text]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of packed documents.

    Attributes:
        tokens: ``Int[B, S]``, one byte a token.
        targets: ``Int[B, S]``, the next byte of the same document, or ``NO_TARGET`` at its last byte.
        positions: ``Int[B, S]``, counted from 0 in each document.
        lengths: lengths of the documents of each row; they add up to S.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    lengths: list[list[int]]


class PackedRows:
    """Batches as a pure function of the step: nothing of the data order has to be stored to resume a run."""

    def __init__(self, documents: Sequence[bytes], *, row_length: int, rows: int, seed: int) -> None:
        self.documents = documents
        self.row_length = row_length
        self.rows = rows
        self.seed = seed
        size = sum(map(len, documents))
        self.batches_per_epoch = size // (row_length * rows)
        if not self.batches_per_epoch:
            raise ConfigError(
                f"data: one batch must fit into the text, got rows * row_length = {rows * row_length} bytes "
                f"and a text of {size}; choose smaller rows"
            )
        self._epoch: tuple[int, Tensor, Tensor] | None = None

    def digest(self) -> str:
        """A fingerprint of the text: another Python release ships other documentation."""
        return hashlib.sha256(b"\0".join(self.documents)).hexdigest()

    def batch(self, step: int) -> Batch:
        """The batch of training step ``step``, counted from 0."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._shuffled(epoch))
        _, text, document = self._epoch
        here = slice(index * self.rows * self.row_length, (index + 1) * self.rows * self.row_length)
        tokens = text[here].view(self.rows, self.row_length)
        document = document[here].view(self.rows, self.row_length)
        lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in document]
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
        targets = tokens.roll(-1, dims=1)
        goes_on = torch.zeros_like(document, dtype=torch.bool)
        goes_on[:, :-1] = document[:, :-1] == document[:, 1:]
        return Batch(tokens, targets.masked_fill(~goes_on, NO_TARGET), positions, lengths)

    def _shuffled(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The text of an epoch and, for each byte, the number of its document."""
        order = list(self.documents)
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        text = torch.frombuffer(bytearray(b"".join(order)), dtype=torch.uint8).long()
        lengths = torch.tensor([len(document) for document in order])
        return text, torch.arange(len(order)).repeat_interleave(lengths)
