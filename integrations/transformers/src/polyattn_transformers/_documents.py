"""Documents packed into one row: where they come from, and whether two descriptions of them agree.

Explicit descriptions (a packed mask, segment ids, cumulative lengths) are taken at their word. Position ids are
evidence only: they are read as documents where they restart, after a check that nothing else explains them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout, StructuredMask
from polyattn._layout.segments import together
from polyattn_transformers._inputs import as_numbers

#: Keyword arguments that say outright where documents lie.
SEGMENTS = ("segment_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
#: What the keyword arguments ``segment_ids``, ``seq_idx``, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` hold.
Segments = dict[str, Tensor | None]


def explicit(segments: Segments, batch: int, q_len: int, kv_len: int) -> tuple[str, Tensor, Tensor] | None:
    """Where documents lie according to a layer's keyword arguments.

    Args:
        segments: ``segment_ids`` or ``seq_idx`` ``Int[B|1, Q]``, ``cu_seq_lens_q`` and ``cu_seq_lens_k``
            ``Int[N + 1]``, or ``None`` for each.
        batch: B.
        q_len: number of queries.
        kv_len: number of keys.

    Returns:
        The name of what said it, the documents of the queries and those of the keys; ``None`` if nothing did.

    Raises:
        LayoutError: no tensor, a wrong dtype or shape, or two that differ.
    """
    for name, given in segments.items():
        if given is not None and not isinstance(given, Tensor):
            raise LayoutError(
                f"{name} must be an integer tensor, got {type(given).__name__}; make one with torch.tensor(...)"
            )
    found: list[tuple[str, Tensor, Tensor]] = []
    for name in ("segment_ids", "seq_idx"):
        ids = segments[name]
        if ids is None:
            continue
        ids = as_numbers(name, ids)
        if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != q_len or q_len != kv_len:
            raise LayoutError(
                f"{name} must be Int[B, K] with one document per token of the call, got {list(ids.shape)} for "
                f"{batch} rows of {q_len} queries and {kv_len} keys"
            )
        found.append((name, ids, ids))
    q_offsets, kv_offsets = segments["cu_seq_lens_q"], segments["cu_seq_lens_k"]
    if (q_offsets is None) != (kv_offsets is None):
        raise LayoutError("cu_seq_lens_q and cu_seq_lens_k must be given together, got one of them")
    if q_offsets is not None and kv_offsets is not None:
        q_ids = from_cu_seqlens("cu_seq_lens_q", q_offsets, batch, q_len)
        found.append(("cu_seq_lens_q", q_ids, from_cu_seqlens("cu_seq_lens_k", kv_offsets, batch, kv_len)))
    for other in found[1:]:
        check_agree((found[0][0], other[0]), found[0][1], other[1], None)
    return found[0] if found else None


def from_mask(mask: Tensor, length: int) -> tuple[Tensor | None, Tensor | None]:
    """What a two-dimensional attention mask of the caller says about the tokens of a call.

    Args:
        mask: ``[B, K]`` with 1 where a token is and 0 for padding; integers may also number documents from 1.
        length: number of tokens of the call, the last ones of K.

    Returns:
        ``Bool[B, Q]``, which tokens are not padding, or ``None`` where all are or nobody may look; and ``Int[B, K]``,
        the documents, if there is more than one number.

    Raises:
        LayoutError: other values, which transformers would read as a token where padding is meant, or the reverse.
    """
    if not mask.numel():
        return None, None
    if not (mask.dtype is torch.bool or mask.dtype.is_floating_point):
        mask = as_numbers("attention_mask", mask)
    live = mask[:, -length:].bool() if mask.shape[1] >= length else None
    if mask.dtype is torch.bool:
        return live, None
    if not readable(mask):
        if torch.compiler.is_compiling():
            plain = ((mask == 0) | (mask == 1)).all()
            text = (
                "attention_mask [B, K] must hold 0 and 1 in a compiled model; documents go into segment_ids or packed"
            )
            torch._assert_async(plain, text)  # noqa: SLF001
        return live, None
    if length == 1 and mask.device.type != "cpu":
        return live, None  # a wait for each token would cost more than the rest
    if mask.dtype.is_floating_point:
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
            low, high = (float(value) for value in mask.aminmax())
            raise LayoutError(
                f"attention_mask [B, K] must hold 1 where a token is and 0 for padding, got {mask.dtype} with values "
                f"from {low:g} to {high:g}; of a mask that is added to the scores pass (mask == 0)"
            )
        return live, None
    low, high = (int(value) for value in mask.aminmax())
    if low < 0:
        raise LayoutError(
            f"attention_mask [B, K] must hold 0 for padding and 1, or the number of its document, where a token is, "
            f"got {low}; say where documents lie with segment_ids= or polyattn_transformers.packed(...)"
        )
    if high <= 1:
        return live, None
    if mask.shape[1] != length:
        raise LayoutError(
            f"attention_mask numbers several documents over {mask.shape[1]} tokens, but the call has {length}; pack "
            "into a forward without earlier tokens"
        )
    return (None if low > 0 else live), mask


def check_together(name: str, documents: Tensor, live: Tensor | None) -> None:
    """Refuse documents in several pieces where distances are counted over the row; traced, the graph checks it.

    Raises:
        LayoutError: calls what described the documents ``name``.
    """
    text = (
        f"{name} must keep the tokens of each document together in a model that counts distances over the whole row; "
        "sort the tokens by document, or give each document a row of its own, with padding"
    )
    if not readable(documents):
        if torch.compiler.is_compiling():
            torch._assert_async(together(documents, live), text)  # noqa: SLF001
    elif not bool(together(documents, live)):
        raise LayoutError(text)


def segmented(q_ids: Tensor, kv_ids: Tensor) -> MaskLayout:
    """The layout that keeps documents apart and restricts nothing else."""
    mask = StructuredMask(q_segments=q_ids, kv_segments=kv_ids)
    return MaskLayout(q_ids.shape[1], kv_ids.shape[1], visibility=mask)


def from_positions(position_ids: Tensor, live: Tensor | None, batch: int) -> Tensor | None:
    """The documents that position ids describe.

    Between two live tokens of a row, positions may go on by 1 or by the distance of the tokens (a hole in the
    padding mask); where they do not increase, a new document starts. Padding is skipped.

    Args:
        position_ids: ``Int[B|1, Q]``.
        live: ``Bool[B|1, Q]``, the queries that are not padding; ``None``: all.
        batch: B.

    Returns:
        ``Int[B, Q]`` with one number per document, or ``None`` when every row is one document; while tracing, where no
        value is read, never ``None``.

    Raises:
        LayoutError: positions jump ahead, or documents start at different positions.
    """
    positions = position_ids.expand(batch, -1)
    alive, before = _alive(positions, live), _previous(positions, live)
    index = torch.arange(positions.shape[1], device=positions.device)
    earlier = positions.gather(1, before.clamp(min=0))
    follows = alive & (before >= 0)
    restart = follows & (positions <= earlier)
    jump = follows & ~restart & (positions != earlier + 1) & (positions - earlier != index - before)
    if readable(positions):
        restarts, jumps = torch.stack([restart.any(), jump.any()]).tolist()
        if jumps:
            row, column = jump.nonzero()[0].tolist()
            raise LayoutError(
                "position_ids must go on by 1 inside a document and restart with each document, got "
                f"{int(earlier[row, column])} followed by {int(positions[row, column])} in row {row}, column {column}; "
                "say where documents lie with segment_ids= or polyattn_transformers.packed(...)"
            )
        if not restarts:
            return None
        _check_starts(positions, restart, alive & (before < 0))
    return restart.cumsum(1)


def _check_starts(positions: Tensor, restart: Tensor, first: Tensor) -> None:
    """Refuse documents of one row that start at different numbers; the first may be the rest of a longer one."""
    for row in restart.any(1).nonzero()[:, 0].tolist():
        starts = positions[row, restart[row]].unique().tolist()
        begin = int(positions[row, first[row]])
        if len(starts) > 1 or begin < starts[0]:
            raise LayoutError(
                f"position_ids must restart at one number with each document, got restarts at {starts} in row {row}, "
                f"which begins at {begin}; say where documents lie with segment_ids= or "
                "polyattn_transformers.packed(...)"
            )


def from_cu_seqlens(name: str, cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Documents ``Int[B, L]`` from their offsets in the batch written out as one row of ``B * L`` tokens.

    Raises:
        LayoutError: the offsets are not those of that many tokens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise LayoutError(f"{name} must be Int[N + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if readable(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[:1] != [0] or offsets != sorted(offsets) or offsets[-1] != batch * length:
            raise LayoutError(
                f"{name} must rise from 0 to the number of tokens, {batch * length} ({batch} rows of {length}), "
                f"got {offsets}"
            )
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).reshape(batch, length)


def check_agree(names: tuple[str, str], one: Tensor, other: Tensor, live: Tensor | None) -> None:
    """Refuse two descriptions that draw a border between different live tokens; nothing is checked while tracing.

    Args:
        names: how the two are called.
        one: ``Int[B|1, Q]``.
        other: ``Int[B|1, Q]``.
        live: ``Bool[B|1, Q]`` or ``None``.

    Raises:
        LayoutError: they differ.
    """
    if not readable(one):
        return
    differ = _borders(one, live) != _borders(other, live)
    if bool(differ.any()):
        row, column = differ.nonzero()[0].tolist()
        raise LayoutError(
            f"{names[0]} and {names[1]} must describe the same documents, got a border before column {column} of "
            f"row {row} in one of them only; give one of the two"
        )


def check_whole(name: str, documents: Tensor, live: Tensor | None) -> None:
    """Refuse a padding mask with a hole inside a document; nothing is checked while tracing.

    Raises:
        LayoutError: a padded token lies between two live tokens of one document.
    """
    if live is None or not readable(documents):
        return
    before = _previous(documents, live)
    index = torch.arange(documents.shape[1], device=documents.device)
    hole = live & (before >= 0) & (index - before > 1) & ~_borders(documents, live)
    if bool(hole.any()):
        row, column = hole.nonzero()[0].tolist()
        rule = "attention_mask must be whole" if name == "attention_mask" else f"{name} and attention_mask must agree"
        raise LayoutError(
            f"{rule}, got a masked token inside a document in row {row}, column {column - 1}; "
            "padding belongs before or after a document"
        )


def readable(value: Tensor) -> bool:
    """Whether there are values to look at: not while tracing, and not in tensors without data."""
    return not torch.compiler.is_compiling() and type(value) is Tensor and not value.is_meta


def _alive(ids: Tensor, live: Tensor | None) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if live is None else live.expand(max(len(ids), len(live)), -1)


def _previous(ids: Tensor, live: Tensor | None) -> Tensor:
    """The column of the last live token before each token ``Int[B, Q]``, -1 where there is none."""
    alive = _alive(ids, live)
    index = torch.arange(alive.shape[1], device=alive.device)
    last = torch.where(alive, index, -1).cummax(1).values
    return torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)


def _borders(ids: Tensor, live: Tensor | None) -> Tensor:
    """Which live tokens belong to another document than the live token before them, ``Bool[B, Q]``."""
    before = _previous(ids, live)
    ids = ids.expand_as(before)
    return _alive(ids, live) & (before >= 0) & (ids != ids.gather(1, before.clamp(min=0)))
