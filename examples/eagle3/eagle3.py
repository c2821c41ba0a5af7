"""A draft model of EAGLE-3, trained over several steps, each of which reads what the one before predicted.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test". At step 0
the draft reads the target's features; at step s it reads its own output of step s - 1 in their place, as it will when
it drafts. Query i of step s sees the keys of step 0 up to i, and those of its own place of the steps since: a union of
a causal part and diagonals. Each step projects its keys once, and later steps take them as they are.

    python eagle3.py [--steps 60] [--backend sdpa]

trains a small byte-level target on Python's documentation, then its draft, and prints the loss and, for each step, how
often draft and target agree on the likeliest byte.
"""

# ruff: noqa: INP001 - a script, run by its path

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyattn import AttentionScope, AttentionSpec, GroupedQueryAttention, MaskLayout, RopeSpec, StructuredMask

VOCABULARY, HIDDEN, HEADS, KV_HEADS, STEPS = 256, 64, 4, 2, 7
LENGTH, ROWS = 96, 4
ROPE = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=HIDDEN // HEADS,
    rotary_dim=HIDDEN // HEADS,
    interleaved=False,
    max_position=4096,
    original_max_position=None,
    parameters={},
)
#: Widths of the draft's attention: it reads the next token's embedding beside a hidden state, and gives a hidden state.
SPEC = AttentionSpec.of(
    {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "rope": ROPE, "input_size": 2 * HIDDEN}
)
#: What each later step counts.
DECAY = 0.8

Form = Callable[[MaskLayout], MaskLayout]


def step_layout(length: int, step: int, valid: Tensor | None = None) -> MaskLayout:
    """What the queries of ``step`` see of the keys of all steps so far, ``[Q, (step + 1) * Q]``.

    Args:
        length: tokens of a row, Q.
        step: 0 for the first.
        valid: ``Bool[B, Q]``, the tokens that are no padding.
    """
    place = torch.arange(length)[None]
    places = place.repeat(1, step + 1)  # a token has one place in all steps, which are segments to each other
    number = torch.arange(step + 1).repeat_interleave(length)[None]
    every = None if valid is None else valid.repeat(1, step + 1)

    def part(of: int, window: int | None) -> MaskLayout:
        mask = StructuredMask(
            causal=True,
            window=window,
            kv_valid=every,
            q_positions=place,
            kv_positions=places,
            q_segments=torch.full_like(place, of),
            kv_segments=number,
        )
        return MaskLayout(length, places.shape[1], visibility=mask, active_queries=valid)

    return functools.reduce(operator.or_, [part(0, None), *[part(of, 1) for of in range(1, step + 1)]])


class MLP(nn.Module):
    """A gated MLP behind a norm, beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, HIDDEN]`` to the same shape."""
        gate, up = self.up(self.norm(hidden)).chunk(2, -1)
        mixed: Tensor = hidden + self.down(F.silu(gate) * up)
        return mixed


class Target(nn.Module):
    """A causal decoder, whose hidden states after each of three layers are the draft's features."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embedding.weight, std=HIDDEN**-0.5)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(4))
        self.attention = nn.ModuleList(
            GroupedQueryAttention(HIDDEN, HEADS, KV_HEADS, rope=ROPE, backend=backend) for _ in range(3)
        )
        self.mlps = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the next byte ``[B, S, 256]``, and features ``[B, S, 3 * HIDDEN]``."""
        hidden, features = self.embedding(tokens), []
        scope, positions = AttentionScope(MaskLayout.causal(tokens.shape[1])), torch.arange(tokens.shape[1])[None]
        for norm, attend, mlp in zip(self.norms, self.attention, self.mlps, strict=False):
            hidden = mlp(hidden + attend(norm(hidden), scope, positions))
            features.append(hidden)
        return F.linear(self.norms[3](hidden), self.embedding.weight), torch.cat(features, -1)


class Draft(nn.Module):
    """One layer that reads 2 * HIDDEN and gives HIDDEN."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.fuse = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.token_norm, self.hidden_norm, self.norm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(3))
        self.attention = GroupedQueryAttention.from_spec(SPEC, backend=backend)
        self.mlp = MLP()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        steps: int = STEPS,
        *,
        valid: Tensor | None = None,
        form: Form | None = None,
    ) -> Iterator[Tensor]:
        """The scores of each step, ``[B, S, 256]``: at place i of step s, of the byte ``tokens[i + s + 2]``.

        Args:
            tokens: ``Int[B, S]``.
            features: ``[B, S, 3 * HIDDEN]``, of the target.
            steps: how many.
            valid: ``Bool[B, S]``, the tokens that are no padding.
            form: what to make of each layout, to compare forms of it.
        """
        length = tokens.shape[1]
        hidden = self.fuse(features)
        keys: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            following = self.embedding(tokens.roll(-step - 1, 1))
            read = torch.cat([self.token_norm(following), self.hidden_norm(hidden)], -1)
            layout = step_layout(length, step, valid)
            scope, positions = (
                AttentionScope(layout if form is None else form(layout)),
                torch.arange(length)[None] + step,
            )
            keys.append(self.attention.keys_values(read, positions, scope=scope))
            k, v = (torch.cat(parts, 2) for parts in zip(*keys, strict=True))
            hidden = self.mlp(hidden + self.attention(read, scope, positions, keys_values=(k, v)))
            yield self.head(self.norm(hidden))


def draft_loss(scores: list[Tensor], target: Tensor, valid: Tensor | None = None) -> tuple[Tensor, list[float]]:
    """The cross-entropy of each step against the target's distributions, and how often the likeliest bytes agree.

    Args:
        scores: of the draft, a step each.
        target: scores ``[B, S, 256]`` of the target.
        valid: ``Bool[B, S]``.
    """
    loss, agreed = target.new_zeros(()), []
    for step, whole in enumerate(scores):
        ahead = step + 1
        wanted, drafted = target[:, ahead:], whole[:, :-ahead]
        there = torch.ones_like(wanted[..., 0]) if valid is None else valid[:, ahead:].to(wanted.dtype)
        each = -(wanted.softmax(-1) * drafted.log_softmax(-1)).sum(-1)
        loss = loss + DECAY**step * (each * there).sum() / there.sum()
        agreed.append(float(((wanted.argmax(-1) == drafted.argmax(-1)) * there).sum() / there.sum()))
    return loss / sum(DECAY**step for step in range(len(scores))), agreed


def batches(seed: int) -> Iterator[Tensor]:
    """Rows of Python's documentation, ``Int[ROWS, LENGTH]``."""
    text = torch.tensor(list("\n".join(text for _, text in sorted(topics.items())).encode()))
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=draw)
        yield text[starts[:, None] + torch.arange(LENGTH)]


def trained_target(steps: int, backend: str) -> Target:
    """A target after ``steps`` of training."""
    torch.manual_seed(0)
    target = Target(backend)
    optimiser = torch.optim.AdamW(target.parameters(), lr=3e-3)
    for _, tokens in zip(range(steps), batches(0), strict=False):
        scores, _ = target(tokens)
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target.requires_grad_(False)


def train(steps: int, target: Target, backend: str) -> Iterator[tuple[float, list[float]]]:
    """Train a draft; gives the loss and the agreement of each step of training."""
    torch.manual_seed(1)
    draft = Draft(backend)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _, tokens in zip(range(steps), batches(1), strict=False):
        wanted, features = target(tokens)
        loss, agreed = draft_loss(list(draft(tokens, features)), wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield loss.item(), agreed


@click.command()
@click.option("--steps", default=60, show_default=True, help="Of training, for the target and for the draft.")
@click.option("--backend", default="sdpa", show_default=True)
def main(steps: int, backend: str) -> None:
    """Train a target and its draft."""
    target = trained_target(steps, backend)
    for number, (loss, agreed) in enumerate(train(steps, target, backend), 1):
        if number % max(1, steps // 12) == 0:
            shares = " ".join(f"{share:.2f}" for share in agreed)
            click.echo(f"step {number:3} of {steps}  loss {loss:.3f}  draft and target agree, step by step: {shares}")
    click.echo(f"As a draft for SGLang: {SPEC.to_hf('llama', serving_target='sglang_eagle')['architectures']}")


if __name__ == "__main__":
    main()
