"""The mask of a block-diffusion draft model (as DFlash trains them) as a layout.

A draft model completes blocks of tokens at once. Training drafts many blocks of a text in one forward: the keys are C
tokens of context, whose hidden states come from the target model, and then the tokens of N blocks; the queries are the
tokens of the blocks. A query of block n sees

* the context before the block's anchor, the position where the block starts, and
* its own block, in both directions,

and nothing of other blocks. ``python block_diffusion.py`` draws one and attends to it on every installed backend.
"""

# ruff: noqa: INP001 - a script, run by its path
from __future__ import annotations

import dataclasses

import click
import torch
from torch import Tensor

import polyattn
from polyattn import AttentionRequest, MaskLayout


@dataclasses.dataclass(frozen=True, eq=False)
class BlockDiffusionMask:
    """A ``mask_mod``, which pickles, as a nested function would not: whether query ``q`` of row ``b`` sees key ``k``.

    Attributes:
        anchors: Int ``[B, N]``.
        block_size: tokens of a block.
        context_len: C.
        context_valid: Bool ``[B, C]``, where a context token exists, or ``None``.
    """

    anchors: Tensor
    block_size: int
    context_len: int
    context_valid: Tensor | None = None

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Indices of any shapes that broadcast to one Bool tensor."""
        block = q // self.block_size
        in_context = k < torch.minimum(self.anchors[b, block], k.new_tensor(self.context_len))
        if self.context_valid is not None and self.context_len:
            in_context = in_context & self.context_valid[b, k.clamp(max=self.context_len - 1)]
        in_block = (k >= self.context_len) & ((k - self.context_len) // self.block_size == block)
        return in_context | in_block


def block_diffusion(
    anchors: Tensor,
    block_size: int,
    context_len: int,
    *,
    context_valid: Tensor | None = None,
    block_valid: Tensor | None = None,
    dense: bool = False,
) -> MaskLayout:
    """The layout of N blocks behind C context tokens.

    Args:
        anchors: Int ``[B, N]``, how many context tokens come before each block; those of padding blocks do not matter.
        block_size: tokens of a block.
        context_len: C.
        context_valid: Bool ``[B, C]``, where a context token exists.
        block_valid: Bool ``[B, N]``, False for blocks that only pad the row: their queries see nothing.
        dense: whether to write the mask out, ``[B, 1, N * block_size, C + N * block_size]``, for backends that take no
            ``mask_mod``.

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
    queries, keys = blocks * block_size, context_len + blocks * block_size
    active = None if block_valid is None else block_valid.repeat_interleave(block_size, 1)
    mask = BlockDiffusionMask(anchors, block_size, context_len, context_valid)
    if not dense:
        return MaskLayout.from_mod(mask, q_len=queries, kv_len=keys, batch=batch, active_queries=active)
    row, q, k = (torch.arange(n, device=anchors.device) for n in (batch, queries, keys))
    visible = mask(row[:, None, None], row.new_zeros(()), q[:, None], k)
    return MaskLayout.dense(visible[:, None], active_queries=active)


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
