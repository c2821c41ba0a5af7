"""From a pattern over absolute indices to a ``MaskLayout`` over the queries and keys of one attention call."""

from __future__ import annotations

import dataclasses
import functools
import operator

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout, StructuredMask
from polyattn._layout.segments import ranks
from polyattn_transformers._documents import readable
from polyattn_transformers._pattern import MaskFunction, Pattern

#: The conditions of a pattern that :func:`layout_of` can express.
_HANDLED = frozenset(("causal", "window", "chunk", "valid", "documents", "blocks", "opaque"))


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Which absolute indices one call covers.

    Attributes:
        batch: batch rows B.
        q_len: number of queries.
        kv_len: number of keys.
        q_offset: absolute index of the first query; a tensor (static caches) is never read on the host.
        kv_offset: absolute index of the first key.
        device: where tensors of the layout are made.
    """

    batch: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    kv_offset: int | Tensor
    device: torch.device

    def queries(self, name: str, value: Tensor) -> Tensor:
        """The part of ``value`` ``[B, L]`` at the queries."""
        return _part(name, value, self.q_offset, self.q_len)

    def keys(self, name: str, value: Tensor) -> Tensor:
        """The part of ``value`` ``[B, L]`` at the keys."""
        return _part(name, value, self.kv_offset, self.kv_len)

    def positions(self) -> Tensor | None:
        """Where the queries stand among the keys, ``Int[1, Q]``; ``None`` if they are the last ones."""
        ahead = self.q_offset - self.kv_offset
        if not isinstance(ahead, Tensor) and ahead == self.kv_len - self.q_len:
            return None
        return (torch.arange(self.q_len, device=self.device) + _scalar(ahead, self.device))[None]

    @property
    def syncs(self) -> bool:
        """Whether values on a device are worth one look: a single query gains nothing from structure."""
        return self.q_len != 1 and not isinstance(self.q_offset, Tensor) and not isinstance(self.kv_offset, Tensor)


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftedMask:
    """A mask function of transformers as a ``mask_mod`` over the queries and keys of one call."""

    function: MaskFunction
    q_offset: int | Tensor
    kv_offset: int | Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether the query sees the key."""
        seen: Tensor = self.function(b, h, q_idx + self.q_offset, kv_idx + self.kv_offset)
        return seen


def layout_of(pattern: Pattern, span: Span, padding: Tensor | None, places: Tensor | None = None) -> MaskLayout:
    """The layout of ``pattern`` and a padding mask.

    Args:
        pattern: what the mask function says.
        span: which indices the call covers.
        padding: ``Bool[B, K]`` over the keys of the call, True where a token is, or ``None``.
        places: ``Int[B, L]`` over absolute indices, by which distances and chunks are measured; ``None``: the indices.
    """
    blocks = None if pattern.blocks is None else _block_positions(pattern.blocks, pattern.documents)
    if not pattern.given() <= _HANDLED or (pattern.blocks is not None and blocks is None):
        # Blocks that are not runs, or whose values nobody may read here, have no structured form.
        pattern = Pattern.unread(pattern.function)
    q_positions, kv_positions = _positions(pattern, span, blocks, places)
    valid = [span.keys("padding mask", value.bool()) for value in pattern.valid]
    valid += [] if padding is None else [padding]
    documents = pattern.documents
    mask = StructuredMask(
        causal=pattern.causal,
        window=pattern.window,
        kv_valid=functools.reduce(operator.and_, valid) if valid else None,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segments=None if documents is None else span.queries("packed sequence mask", documents),
        kv_segments=None if documents is None else span.keys("packed sequence mask", documents),
        chunk_size=None if pattern.chunk is None else pattern.chunk[0],
    )
    layout = MaskLayout(span.q_len, span.kv_len, visibility=mask, validate=span.syncs)
    for function in pattern.opaque:
        layout = layout & MaskLayout.from_mod(
            ShiftedMask(function, _scalar(span.q_offset, span.device), _scalar(span.kv_offset, span.device)),
            q_len=span.q_len,
            kv_len=span.kv_len,
            batch=span.batch,
        )
    return layout


def _positions(
    pattern: Pattern, span: Span, blocks: Tensor | None, places: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if blocks is not None:
        return span.queries("block_sequence_ids", blocks), span.keys("block_sequence_ids", blocks)
    if pattern.chunk is not None and pattern.documents is not None and places is None:
        places = ranks(pattern.documents)  # in every document from its first token, as when it is alone
    if places is not None:
        return span.queries("packed sequence mask", places), span.keys("packed sequence mask", places)
    if pattern.chunk is not None:
        # Chunks are counted from the first token of a row, so the positions are absolute and shifted by its padding.
        start = pattern.chunk[1].to(span.device)[:, None]
        q = torch.arange(span.q_len, device=span.device) + _scalar(span.q_offset, span.device)
        k = torch.arange(span.kv_len, device=span.device) + _scalar(span.kv_offset, span.device)
        return q - start, k - start
    if pattern.causal or pattern.window is not None:
        return span.positions(), None
    return None, None


def _block_positions(ids: Tensor, documents: Tensor | None) -> Tensor | None:
    """Positions under which ``causal | same block`` is a plain causal rule: a block stands at its first token.

    Args:
        ids: ``Int[B, L]``, one number >= 0 for the tokens of a block, negative for all others.
        documents: ``Int[B, L]`` or ``None``.

    Returns:
        ``Int[B, L]``, or ``None`` where a block is not a run of tokens of one document, or values must not be read.
    """
    if not readable(ids):
        return None
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = (ids < 0) | torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids.diff(dim=1) != 0], 1)
    first = torch.where(starts, index, 0).cummax(1).values
    runs = (starts & (ids >= 0)).sum(1).tolist()
    if any(len(row[row >= 0].unique()) != count for row, count in zip(ids, runs, strict=True)):
        return None
    if documents is not None and not bool((documents.gather(1, first) == documents).all()):
        return None
    return first


def _part(name: str, value: Tensor, offset: int | Tensor, length: int) -> Tensor:
    if isinstance(offset, Tensor):
        return value.index_select(1, torch.arange(length, device=value.device) + _scalar(offset, value.device))
    if value.shape[1] < offset + length:
        raise LayoutError(
            f"{name} must cover tokens {offset} to {offset + length - 1}, got {value.shape[1]} tokens; "
            "make it as long as the cached and the new tokens together"
        )
    return value[:, offset : offset + length]


def _scalar(value: int | Tensor, device: torch.device) -> int | Tensor:
    # A tensor of shape [1] would add a dimension to every index.
    return value.to(device).reshape(()) if isinstance(value, Tensor) else value
