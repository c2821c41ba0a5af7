"""Online softmax (arXiv:1805.02867) over chunks, forward and backward.

Both functions walk the same steps: some queries, and the chunks of keys that at least one of them sees. Inside a step
everything is in the accumulation dtype, FP32 or, for FP64, FP64. With scores ``s``, the forward keeps for each query

    top = max s,   total = sum exp(s - top),   mixed = sum exp(s - top) v

and scales the last two by ``exp(old top - new top)`` whenever the maximum grows. ``lse = top + log total`` is all that
the backward needs to compute any chunk of weights again: ``p = exp(s - lse)``, and with ``g`` and ``h`` the gradients
of output and LSE

    dv = p^T g,   ds = p * (g v^T - rowsum(g * output) + h),   dq = scale ds k,   dk = scale ds^T q
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.kernels import accumulation_dtype

#: Rows of a batch, all heads, and a run of queries or of keys.
Where = tuple[slice, slice, slice]


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, per_row: bool, window: int, scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        blocks: CPU int64 ``[N, 7]``: batch, q_start, q_stop, k_start, k_stop, shift, causal. In a block query i sees
            key j where ``d = (i - q_start) - (j - k_start) + shift`` has ``d >= 0`` if causal, and ``|d| < window``.
        per_row: whether the batch of a block counts; otherwise it holds for every row.
        window: -1 for none.
        scale: factor of the scores.
        chunk: how many queries and keys a step takes.

    Returns:
        Output ``[B, Hq, Q, Dv]`` in the dtype of q and LSE ``[B, Hq, Q]`` in the accumulation dtype; 0 and ``-inf`` in
        rows that see nothing.
    """
    high, groups = accumulation_dtype(q.dtype), (k.shape[1], -1)
    output = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=high)
    for step in steps(blocks, per_row, window, chunk):
        queries = q[step.queries].to(high).unflatten(1, groups) * scale
        top = queries.new_full(queries.shape[:4], -torch.inf)
        total = torch.zeros_like(top)
        mixed = queries.new_zeros((*queries.shape[:4], v.shape[3]))
        for keys, hidden in step.keys(q.device):
            scores = _hide(queries @ k[keys].to(high).unsqueeze(2).mT, hidden)
            grown = torch.maximum(top, scores.amax(-1))
            base = torch.where(grown == -torch.inf, 0, grown)  # a query that has seen nothing yet
            weights = torch.exp(scores - base.unsqueeze(-1))
            shrink = torch.exp(top - base)
            total = total * shrink + weights.sum(-1)
            mixed = mixed * shrink.unsqueeze(-1) + weights @ v[keys].to(high).unsqueeze(2)
            top = grown
        alive = torch.where(total == 0, 1, total)
        output[step.queries] = (mixed / alive.unsqueeze(-1)).flatten(1, 2).to(q.dtype)
        lse[step.queries] = (top + torch.log(total)).flatten(1, 2)
    return output, lse


def backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: Tensor,
    per_row: bool,
    window: int,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from those of output and LSE; arguments as in :func:`forward`."""
    high, groups = accumulation_dtype(q.dtype), (k.shape[1], -1)
    dq, dk, dv = (torch.zeros_like(x, dtype=high) for x in (q, k, v))

    def part(x: Tensor, where: Where, masked: Tensor) -> Tensor:
        """Of fully masked rows no value counts, not even NaN."""
        grouped: Tensor = x[where].to(high).unflatten(1, groups)
        return grouped.masked_fill(masked, 0)

    for step in steps(blocks, per_row, window, chunk):
        log_total = lse[step.queries].unflatten(1, groups).unsqueeze(-1)
        masked = log_total == -torch.inf
        log_total = log_total.masked_fill(masked, 0)
        queries, g = part(q, step.queries, masked) * scale, part(grad, step.queries, masked)
        mean = (g * part(output, step.queries, masked)).sum(-1, keepdim=True)
        mean = mean - part(grad_lse.unsqueeze(-1), step.queries, masked)
        grown = torch.zeros_like(queries)
        for keys, hidden in step.keys(q.device):
            key, value = k[keys].to(high).unsqueeze(2), v[keys].to(high).unsqueeze(2)
            weights = torch.exp(_hide(queries @ key.mT, hidden) - log_total)
            scores = weights * (g @ value.mT - mean)
            grown += scores @ key
            dk[keys] += (scores.mT @ queries).sum(2)
            dv[keys] += (weights.mT @ g).sum(2)
        dq[step.queries] = grown.flatten(1, 2) * scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class Step(NamedTuple):
    """Some queries of one block.

    Attributes:
        rows: of the batch.
        start, stop: the queries.
        key_start, key_stop: the run of keys in which all lie that one of the queries sees.
        distance: of the first query to the first of these keys, see ``d`` in :func:`forward`.
        causal: whether ``d >= 0`` is asked for.
        window: -1 for none.
        chunk: how many keys are taken at once.
    """

    rows: slice
    start: int
    stop: int
    key_start: int
    key_stop: int
    distance: int
    causal: bool
    window: int
    chunk: int

    @property
    def queries(self) -> Where:
        """Where the queries lie."""
        return self.rows, slice(None), slice(self.start, self.stop)

    def keys(self, device: torch.device) -> Iterator[tuple[Where, Tensor | None]]:
        """Where each chunk of keys lies, and ``Bool[queries, keys]``, True where hidden; ``None`` hides nothing."""
        for start in range(self.key_start, self.key_stop, self.chunk):
            stop = min(self.key_stop, start + self.chunk)
            yield (self.rows, slice(None), slice(start, stop)), self._hidden(start, stop, device)

    def _hidden(self, start: int, stop: int, device: torch.device) -> Tensor | None:
        if not self.causal and self.window < 0:
            return None
        first = self.distance - (start - self.key_start)
        queries = torch.arange(first, first + self.stop - self.start, device=device)
        distance = queries[:, None] - torch.arange(stop - start, device=device)
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        return hidden if self.window < 0 else hidden | (distance.abs() >= self.window)


def steps(blocks: Tensor, per_row: bool, window: int, chunk: int) -> Iterator[Step]:
    """The steps through a table of blocks; each query that sees a key is in exactly one."""
    for row, q_start, q_stop, k_start, k_stop, shift, causal in blocks.tolist():
        rows = slice(row, row + 1) if per_row else slice(None)
        for start in range(q_start, q_stop, chunk):
            stop = min(q_stop, start + chunk)
            nearest, farthest = start - q_start + shift, stop - 1 - q_start + shift
            first = 0 if window < 0 else max(0, nearest - window + 1)
            last = farthest + 1 if causal else k_stop - k_start if window < 0 else farthest + window
            last = min(last, k_stop - k_start)
            if first < last:
                yield Step(
                    rows, start, stop, k_start + first, k_start + last, nearest - first, bool(causal), window, chunk
                )


def _hide(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
