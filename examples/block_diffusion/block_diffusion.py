"""The mask of a block-diffusion draft model (as DFlash trains them) as a layout.

A draft model completes blocks of tokens at once. Training drafts many blocks of a text in one forward: the keys are C
tokens of context, whose hidden states come from the target model, and then the tokens of N blocks; the queries are the
tokens of the blocks. A query of block n sees

* the context before the block's anchor, the position where the block starts, and
* its own block, in both directions,

and nothing of other blocks. That is a tree: the context, split at the anchors into a chain of nodes, and each block
on the node that ends at its anchor. Nodes are seen whole, both ways, and the context's own queries are left out.
``python block_diffusion.py`` draws one and attends to it on every installed backend.
"""

# ruff: noqa: INP001 - a script, run by its path
from __future__ import annotations

import itertools

import click
import torch
from torch import Tensor

import polyattn
from polyattn import AttentionRequest, MaskLayout


def block_diffusion(
    anchors: Tensor,
    block_size: int,
    context_len: int,
    *,
    context_valid: Tensor | None = None,
    block_valid: Tensor | None = None,
) -> MaskLayout:
    """The layout of N blocks behind C context tokens; the values of ``anchors`` are read on the host.

    Args:
        anchors: Int ``[B, N]``, how many context tokens come before each block; those of padding blocks do not matter.
        block_size: tokens of a block.
        context_len: C.
        context_valid: Bool ``[B, C]``, where a context token exists.
        block_valid: Bool ``[B, N]``, False for blocks that only pad the row: their queries see nothing.

    Raises:
        ValueError: ``anchors`` is not an integer matrix, a size is too small, or a mask of validity has another form.
    """
    if anchors.dim() != 2 or anchors.is_floating_point() or anchors.dtype is torch.bool:
        raise ValueError(f"anchors must be Int[B, N], got {anchors.dtype} {tuple(anchors.shape)}")
    if block_size < 1 or context_len < 0:
        raise ValueError(
            f"block_size must be >= 1 and context_len >= 0, got block_size={block_size} and context_len={context_len}"
        )
    batch, blocks = anchors.shape
    for name, valid, shape in (
        ("context_valid", context_valid, (batch, context_len)),
        ("block_valid", block_valid, (batch, blocks)),
    ):
        if valid is not None and (valid.dtype is not torch.bool or tuple(valid.shape) != shape):
            raise ValueError(f"{name} must be Bool{list(shape)}, got {valid.dtype} {tuple(valid.shape)}")
    rows = [_nodes(row, block_size, context_len) for row in anchors.clamp(0, context_len).tolist()]
    tree = MaskLayout.tree([parents for parents, _ in rows], [lengths for _, lengths in rows], causal=False)
    layout = tree.select_queries(slice(context_len, None)).to(anchors.device)
    if context_valid is None and block_valid is None:
        return layout
    active = None if block_valid is None else block_valid.repeat_interleave(block_size, 1)
    own = torch.ones(batch, blocks * block_size, dtype=torch.bool, device=anchors.device)
    before = own.new_ones(batch, context_len) if context_valid is None else context_valid
    keys = torch.cat((before, own), 1)
    return layout & MaskLayout.padded(keys, q_len=own.shape[1], causal=False, active_queries=active)


def _nodes(anchors: list[int], block_size: int, context_len: int) -> tuple[list[int], list[int]]:
    """The parents and lengths of the nodes of one row: the pieces of its context, then its blocks."""
    ends = sorted({0, context_len, *anchors})
    ending_at = {end: node for node, end in enumerate(ends, -1)}  # no piece ends at 0: a block there is a root
    pieces = [stop - start for start, stop in itertools.pairwise(ends)]
    parents = [*range(-1, len(pieces) - 1), *(ending_at[anchor] for anchor in anchors)]
    return parents, pieces + [block_size] * len(anchors)


def draft_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Positions of the queries, Int ``[B, N * block_size]``: a block goes on where its context ends."""
    return (anchors[:, :, None] + torch.arange(block_size, device=anchors.device)).flatten(1)


def main() -> None:
    """Draw a mask of three blocks, then attend to it."""
    layout = block_diffusion(torch.tensor([[2, 5, 8]]), block_size=3, context_len=8)
    click.echo(layout.describe())
    click.echo(layout.draw())
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 17, 16), torch.randn(1, 2, 17, 16)
    want = polyattn.attention(q, k, v, layout, backend="eager").output
    for name, reasons in polyattn.explain(layout, AttentionRequest.of(q, k, v)).candidates.items():
        if reasons:
            click.echo(f"{name} cannot: {reasons[0]}")
            continue
        got = polyattn.attention(q, k, v, layout, backend=name).output
        click.echo(f"{name} differs from eager by at most {(got - want).abs().max():.1e}")


if __name__ == "__main__":
    main()
