"""A draft model in the manner of DFlash: it fills a whole block of tokens at once, from the target's hidden states.

A block starts with a token that is known, its anchor; the others are masks. Every layer of the draft sees, as keys, the
target's features of all tokens before the anchor (projected by that layer, never again afterwards) and the block, in
both directions. Training draws many anchors of a text and fills their blocks in one forward; the mask of that is the
tree of ``examples/block_diffusion``. Some layers see a window of it, others all: two named layouts in one scope.

    python dflash.py [--steps 150] [--backend sdpa]

trains the small byte-level target of ``examples/eagle3`` on Python's documentation, then its draft, prints the loss and
how many bytes of a block the target would accept, and lets both write a line.
"""

# ruff: noqa: INP001 - a script, run by its path

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyattn import AttentionConfig, AttentionScope, GroupedQueryAttention, MaskLayout, QKNorm

# Its neighbours are scripts too: the mask, and a target with its text.
sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("block_diffusion", "eagle3")]

from block_diffusion import block_diffusion, draft_positions
from eagle3 import HEADS, HIDDEN, KV_HEADS, LENGTH, MLP, ROPE, Target, batches, trained_target

#: Tokens of a block, its anchor among them; blocks of a row in training.
BLOCK, BLOCKS = 8, 6
#: Layers of the draft, all but the last under a window.
LAYERS, WINDOW = 3, 24
#: How fast the places of a block count less: a wrong byte makes those behind it worthless.
GAMMA = 4.0
CONFIG = AttentionConfig(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HIDDEN // HEADS,
    rope=ROPE,
    qk_norm=QKNorm(position="before", scope="head", weighted=True, eps=1e-6),
    layout="full",
    groups=[{"layers": list(range(LAYERS - 1)), "window": WINDOW, "layout": "sliding"}],
    serving_target="sglang_dflash",
)

#: Keys and values of the context, of one layer.
Pair = tuple[Tensor, Tensor]
Form = Callable[[MaskLayout], MaskLayout]


class DraftLayer(nn.Module):
    """Attention over the context and the block, and an MLP."""

    def __init__(self, index: int, backend: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.attention = GroupedQueryAttention.from_spec(CONFIG.layer(index).spec, backend=backend)
        self.mlp = MLP()

    def forward(
        self, hidden: Tensor, scope: AttentionScope, positions: Tensor, context: Pair, places: Tensor
    ) -> Tensor:
        """``[B, S, HIDDEN]`` to the same shape; ``places`` are the positions of the context."""
        attended = self.attention(self.norm(hidden), scope, positions, past=context, kv_positions=places)
        mixed: Tensor = self.mlp(hidden + attended)
        return mixed


class Draft(nn.Module):
    """Fills blocks. Embeddings and head are the target's, and stay as they are."""

    def __init__(self, target: Target, backend: str) -> None:
        super().__init__()
        self.register_buffer("vocabulary", target.embedding.weight.detach(), persistent=False)
        self.mask = nn.Parameter(torch.zeros(HIDDEN))
        self.fuse = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.context_norm, self.norm = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.layers = nn.ModuleList(DraftLayer(index, backend) for index in range(LAYERS))

    def context(self, features: Tensor, start: int = 0) -> list[Pair]:
        """The keys and values of each layer.

        Args:
            features: ``[B, C, 3 * HIDDEN]``, the target's.
            start: position of the first.
        """
        hidden = self.context_norm(self.fuse(features))
        positions = torch.arange(start, start + features.shape[1])[None]
        return [layer.attention.keys_values(hidden, positions) for layer in self.layers]

    def forward(self, first: Tensor, anchors: Tensor, context: list[Pair], *, form: Form | None = None) -> Tensor:
        """The scores of the bytes after each anchor, ``[B, N, BLOCK - 1, 256]``.

        Args:
            first: ``Int[B, N]``, the bytes at the anchors.
            anchors: ``Int[B, N]``, their positions; a block sees the context before its own.
            context: see :meth:`context`.
            form: what to make of each layout, to compare forms of it.
        """
        length = context[0][0].shape[2]
        whole = block_diffusion(anchors, BLOCK, length)
        layouts = {"full": whole, "sliding": whole.with_window(WINDOW)}
        scope = AttentionScope({name: layout if form is None else form(layout) for name, layout in layouts.items()})
        positions, places = draft_positions(anchors, BLOCK), torch.arange(length)[None]
        known = F.embedding(first, self.vocabulary)[:, :, None]
        hidden = torch.cat([known, self.mask.expand(*first.shape, BLOCK - 1, HIDDEN)], 2).flatten(1, 2)
        for layer, pair in zip(self.layers, context, strict=True):
            hidden = layer(hidden, scope, positions, pair, places)
        return F.linear(self.norm(hidden), self.vocabulary).unflatten(1, (-1, BLOCK))[:, :, 1:]


def draft_loss(scores: Tensor, tokens: Tensor, anchors: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """The cross-entropy of the blocks, and how many bytes of one the target would accept, on average.

    Args:
        scores: of the draft, ``[B, N, BLOCK - 1, 256]``.
        tokens: ``Int[B, S]``, the text.
        anchors: ``Int[B, N]``.
        target: the target's scores, ``[B, S, 256]``.
    """
    places = anchors[:, :, None] + torch.arange(1, BLOCK)
    rows = torch.arange(len(tokens))[:, None, None]
    each = F.cross_entropy(scores.flatten(0, 2), tokens[rows, places].flatten(), reduction="none")
    weights = torch.exp(-torch.arange(BLOCK - 1) / GAMMA).to(each.dtype)
    loss = (each.view(-1, BLOCK - 1) * weights).mean(0).sum() / weights.sum()
    agreed = scores.argmax(-1) == target.argmax(-1)[rows, places - 1]
    return loss, float(agreed.int().cumprod(-1).sum(-1).float().mean())


def train(steps: int, draft: Draft, target: Target) -> Iterator[tuple[float, float]]:
    """Train a draft; gives the loss and the accepted bytes of each step."""
    optimiser = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(2)
    for _, tokens in zip(range(steps), batches(1), strict=False):
        wanted, features = target(tokens)
        anchors = torch.randint(1, LENGTH - BLOCK, (len(tokens), BLOCKS), generator=draw)
        scores = draft(tokens.gather(1, anchors), anchors, draft.context(features))
        loss, accepted = draft_loss(scores, tokens, anchors, wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield loss.item(), accepted


@torch.no_grad()
def speculate(target: Target, draft: Draft, text: Tensor, count: int) -> tuple[Tensor, int]:
    """What the target writes behind ``text`` by itself, greedily, drafted in blocks; and in how many of its forwards.

    Args:
        target: the model.
        draft: its draft. The keys of its context are kept from one block to the next.
        text: ``Int[1, S]``, of two bytes at least.
        count: how many bytes to write.
    """
    start, forwards = text.shape[1], 0
    kept = draft.context(target(text[:, :-1])[1])
    while text.shape[1] < start + count:
        anchor = text.shape[1] - 1
        block = draft(text[:, -1:], torch.tensor([[anchor]]), kept).argmax(-1)[:, 0]
        scores, features = target(torch.cat([text, block], 1))
        forwards += 1
        wanted = scores[:, anchor:].argmax(-1)
        accepted = int((block == wanted[:, :-1]).int().cumprod(1).sum())
        text = torch.cat([text, wanted[:, : accepted + 1]], 1)
        more = draft.context(features[:, anchor : anchor + accepted + 1], anchor)
        kept = [
            tuple(torch.cat(both, 2) for both in zip(*pairs, strict=True)) for pairs in zip(kept, more, strict=True)
        ]
    return text[:, : start + count], forwards


@click.command()
@click.option("--steps", default=150, show_default=True, help="Of training, for the target and for the draft.")
@click.option("--backend", default="sdpa", show_default=True)
def main(steps: int, backend: str) -> None:
    """Train a target and its draft, and let them write."""
    target = trained_target(steps, backend)
    torch.manual_seed(1)
    draft = Draft(target, backend)
    curve, every = [], max(1, steps // 10)
    for point in train(steps, draft, target):
        curve.append(point)
        if len(curve) % every == 0:
            loss, accepted = torch.tensor(curve[-every:]).mean(0).tolist()
            click.echo(f"step {len(curve):3} of {steps}  loss {loss:.3f}  accepted {accepted:.2f} of {BLOCK - 1} bytes")
    prompt = torch.tensor([list(b"The statement ")])
    text, forwards = speculate(target, draft, prompt, 40)
    click.echo(f"{bytes(text[0].tolist()).decode(errors='replace')!r}: 40 bytes in {forwards} forwards of the target")
    written = CONFIG.to_hf("qwen3", layers=LAYERS)
    click.echo(f"As a draft for SGLang: {written['layer_types']}, sliding_window {written['sliding_window']}")


if __name__ == "__main__":
    main()
