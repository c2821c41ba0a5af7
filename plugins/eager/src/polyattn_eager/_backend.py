"""Attention written down: scale, softcap, bias, mask, softmax in FP32, dropout, values, sinks."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyattn import AttentionRequest, AttentionResult, BackendBase, MaskLayout, PreparedAttention
from polyattn.kernels import CachedMask, accumulation_dtype, finished, without

ABILITIES = frozenset(
    (
        *("float64", "float32", "bfloat16", "float16", "full", "causal", "window", "padded", "packed", "prefix_lm"),
        *("chunked", "tree", "sink_tokens", "two_sided_window", "union", "positions", "dense", "mask_mod"),
        *("per_head_mask", "active_queries", "gqa", "unequal_width", "kv_lengths", "selected"),
        *("bias", "bias_grad", "softcap", "sinks", "lse", "lse_grad", "grad", "dropout", "deterministic"),
        "second_order",
    )
)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocked:
    """Which scores, queries and keys take no part.

    Attributes:
        scores: ``Bool[B|1, H|1, Q, K]``: become ``-inf``. False in fully masked rows, whose softmax has to stay finite.
        rows: ``Bool[B|1, H|1, Q, 1]``: fully masked rows, which see nothing; ``None`` when there can be none.
        keys: ``Bool[B|1, H|1, K, 1]``: keys that no row of the head sees; ``None`` when there can be none.
    """

    scores: Tensor
    rows: Tensor | None
    keys: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, *, rows: bool, keys: bool) -> Blocked:
        """Read off ``hidden`` (``Bool[B|1, H|1, Q, K]``, True = may not attend) what can be blocked at all."""
        masked = hidden.all(-1, keepdim=True) if rows else None
        unseen = hidden.all(-2).unsqueeze(-1) if keys else None
        return cls(hidden if masked is None else hidden & ~masked, masked, unseen)


@dataclasses.dataclass(frozen=True, eq=False)
class EagerState:
    """What ``prepare`` decides.

    Attributes:
        hidden: ``Bool[B|1, H|1, Q, K]``: True = may not attend.
        blocked: the same, taken apart; an attention without bias needs nothing else.
    """

    hidden: Tensor
    blocked: Blocked


class EagerBackend(BackendBase):
    """The backend ``eager``: on ordinary rows bit-equal to the eager attention of transformers.

    Beside a bias only where the CPU's products do not depend on where their operands lie in memory (with AVX-512).
    """

    name = "eager"
    abilities = ABILITIES

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> EagerState:
        """Materialise the mask."""
        hidden = ~layout.to_dense(request.device)
        rows = layout.may_have_fully_masked_rows and _some(hidden.all(-1))
        keys = layout.may_have_unseen_keys and _some(hidden.all(-2))
        return EagerState(hidden, Blocked.of(hidden, rows=rows, keys=keys))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: PreparedAttention,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionResult:
        """Attend; what takes no part is overwritten, never multiplied by zero, so that its NaN spreads nowhere."""
        request, state = prepared.request, prepared.state
        blocked: Blocked = state.blocked
        if bias is not None:
            # Only now is it known which rows mask and -inf bias block together.
            bias, hidden = torch.broadcast_tensors(bias, state.hidden)
            blocked = Blocked.of(hidden | bias.isneginf(), rows=True, keys=True)
        accumulator = accumulation_dtype(q.dtype)

        q = without(q, blocked.rows)
        # Keys of a cache are many for few queries: those of a KV head meet its query heads as rows of one.
        group = 1 if isinstance(prepared.layout.visibility, CachedMask) else request.group
        k, v = (_seen_and_repeated(x, blocked.keys, group) for x in (k, v))
        assert request.scale is not None
        scores = _product(q, k.transpose(-2, -1)) * request.scale
        if q.dtype is torch.float16:  # the product may overflow where the score does not
            scaled_first = _product(q * request.scale, k.transpose(-2, -1))
            scores = torch.where(scores.isfinite(), scores, scaled_first)
        if request.softcap is not None:
            scores = torch.tanh(scores / request.softcap) * request.softcap
        if bias is not None:
            # A finite bias never blocks, not even FP16's minimum plus a negative score, which overflows to -inf.
            scores = scores + without(bias, blocked.rows)
            scores = scores.masked_fill(scores.isneginf(), torch.finfo(scores.dtype).min)
        scores = scores.masked_fill(blocked.scores, -torch.inf)

        weights = F.softmax(scores, dim=-1, dtype=accumulator).to(q.dtype)
        weights = F.dropout(weights, p=request.dropout_p, training=request.training)
        output = _product(weights, v)
        lse = _logsumexp(scores.to(accumulator)) if request.needs_lse or sinks is not None else None
        return finished(output, lse, request, rows=blocked.rows, sinks=sinks)


def _some(found: Tensor) -> bool:
    """Whether any element is True; also True where nobody can say without waiting for a device."""
    on_host = found.device.type == "cpu" and type(found) is Tensor and not torch.compiler.is_compiling()
    return not on_host or bool(found.any())


def _product(x: Tensor, y: Tensor) -> Tensor:
    """``[B, Hq, Q, X]`` times ``[B, Hkv, X, Y]``; where heads of y are fewer, each serves its group in one product."""
    group = 1 if y.shape[1] == 0 else x.shape[1] // y.shape[1]
    if group == 1:
        return torch.matmul(x, y)
    rows = torch.matmul(x.unflatten(1, (-1, group)).flatten(2, 3), y)
    heads: Tensor = rows.unflatten(2, (group, -1)).flatten(1, 2)
    return heads


def _seen_and_repeated(x: Tensor, unseen: Tensor | None, group: int) -> Tensor:
    """``[B, Hkv, K, D]`` as ``[B, Hkv * group, K, D]``: each head ``group`` times in a row, without unseen keys."""
    per_head = unseen is not None and unseen.shape[1] > 1
    if not per_head:
        x = without(x, unseen)
    if group > 1:
        x = x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)
    # A key may be seen by some of the query heads that share it, and then only they may look at it.
    return without(x, unseen) if per_head else x


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last dimension; the gradient is the softmax.

    Not ``torch.logsumexp``: its gradient ``exp(score - result)`` is 1 for each of n equal scores near ``finfo.min``,
    where adding ``log n`` changes nothing.
    """
    if scores.shape[-1] == 0:
        return torch.logsumexp(scores, dim=-1)
    top = scores.detach().amax(-1, keepdim=True)
    return torch.log(torch.exp(scores - top).sum(-1)) + top.squeeze(-1)
