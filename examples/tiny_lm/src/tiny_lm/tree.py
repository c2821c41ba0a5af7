"""Several responses to one prompt, trained as rows of their own and as one row of a tree: the same loss, less work.

The tokens of the prompt stand in every row, but once in the tree, where ``polyattn.pack_tree`` finds them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from polyattn import MaskLayout, pack_tree
from tiny_lm.config import RunConfig
from tiny_lm.data import python_documentation
from tiny_lm.model import TinyLM

Loss = Callable[[TinyLM], Tensor]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way of training.

    Attributes:
        name: ``"rows"`` or ``"tree"``.
        tokens: how many tokens go through the model in a step.
        losses: mean loss in nats of every step.
        seconds: of a step, the median.
        saved: bytes that a step keeps for its backward.
    """

    name: str
    tokens: int
    losses: list[float]
    seconds: float
    saved: int


def measure(config: RunConfig, *, prompt: int, response: int, responses: int, steps: int) -> list[Measured]:
    """Train a fresh model both ways on the same texts.

    Args:
        config: of the model and the optimiser.
        prompt: bytes of the prompt.
        response: bytes of each response.
        responses: how many go on from one prompt.
        steps: each with another prompt.
    """
    text = torch.tensor(list(b"".join(python_documentation())), dtype=torch.int64)
    draws = torch.Generator().manual_seed(config.seed)
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(text) - prompt - response, (responses + 1,), generator=draws).tolist()
        asked = text[starts[0] : starts[0] + prompt]
        batches.append([torch.cat([asked, text[start : start + response]]) for start in starts[1:]])
    return [_trained(config, name, [loss(batch) for batch in batches]) for name, loss in WAYS.items()]


def _of_rows(rows: list[Tensor]) -> tuple[int, Loss]:
    """The loss of rows behind each other, each a document of its own."""
    tokens, lengths = torch.cat(rows)[None], [len(row) for row in rows]
    layout = MaskLayout.packed(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor(lengths).cumsum(0) - 1
    source = torch.ones(tokens.shape[1], dtype=torch.bool).index_fill(0, ends, value=False).nonzero()[:, 0]

    def loss(model: TinyLM) -> Tensor:
        return F.cross_entropy(model(tokens, layout, positions)[0, source], tokens[0, source + 1])

    return tokens.shape[1], loss


def _of_tree(rows: list[Tensor]) -> tuple[int, Loss]:
    """The loss of the same rows as a tree, each prediction as often as rows make it."""
    tree = pack_tree(rows)
    source, target, weight = tree.next_tokens()

    def loss(model: TinyLM) -> Tensor:
        logits = model(tree.tokens, tree.layout, tree.positions)
        losses = F.cross_entropy(logits[0, source], target, reduction="none")
        return (losses * weight).sum() / weight.sum()

    return tree.tokens.shape[1], loss


WAYS: dict[str, Callable[[list[Tensor]], tuple[int, Loss]]] = {"rows": _of_rows, "tree": _of_tree}


def _trained(config: RunConfig, name: str, batches: list[tuple[int, Loss]]) -> Measured:
    torch.manual_seed(config.seed)
    model = TinyLM(config.model, config.attention)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.optimiser.learning_rate)
    losses, seconds = [], []
    for _, of in batches:
        start = time.perf_counter()
        loss = of(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return Measured(name, batches[0][0], losses, median(seconds), _saved(lambda: batches[0][1](model)))


def _saved(forward: Callable[[], Tensor]) -> int:
    """The bytes that a forward keeps for its backward, each piece of memory once."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = forward()
    del kept
    return sum(held.values())


def plot(found: list[Measured], path: Path) -> None:
    """Draw time and memory of both ways into a PNG file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, layout="constrained")
    names = [f"{one.name}\n{one.tokens} tokens" for one in found]
    left.bar(names, [one.seconds for one in found])
    left.set_ylabel("seconds a step")
    right.bar(names, [one.saved / 2**20 for one in found])
    right.set_ylabel("MiB kept for the backward")
    figure.suptitle("Responses to one prompt")
    figure.savefig(path)
    plt.close(figure)
