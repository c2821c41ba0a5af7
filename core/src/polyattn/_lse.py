"""What the log-sum-exp is for: combining partial attention.

With parts ``(o_i, l_i)`` the whole is ``l = log(sum_i exp(l_i))`` and ``o = sum_i exp(l_i - l) o_i``: the identity
behind blockwise and ring attention. Sinks are applied after a merge, since no part's LSE includes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from polyattn._backend import AttentionResult
from polyattn._errors import AttentionInputError


def merge(results: Sequence[AttentionResult]) -> AttentionResult:
    """The attention over the union of disjoint key sets, from the attention over each.

    Args:
        results: parts with ``output`` ``[B, Hq, Q, Dv]`` and ``lse`` ``[B, Hq, Q]``, all of the same queries. A part
            whose row saw no key (output 0, LSE ``-inf``) is inert there; a row fully masked in every part stays so.

    Returns:
        The merged result in the output dtype of the parts; differentiable in every output and LSE. Weights are
        computed in the LSE's dtype and cast once.
    """
    outputs, lses = _parts(results)
    dtype = outputs[0].dtype
    stacked = torch.stack(lses)
    peak = stacked.detach().amax(dim=0)
    masked = peak == -torch.inf
    weights = torch.exp(stacked - torch.where(masked, 0.0, peak))
    total = torch.where(masked, 1.0, weights.sum(dim=0))
    merged = sum((w / total).unsqueeze(-1) * o.to(w.dtype) for w, o in zip(weights.unbind(), outputs, strict=True))
    assert isinstance(merged, Tensor)
    output = torch.where(masked.unsqueeze(-1), 0.0, merged).to(dtype)
    lse = torch.where(masked, -torch.inf, torch.log(total) + peak)
    return AttentionResult(output, lse)


def _parts(results: object) -> tuple[list[Tensor], list[Tensor]]:
    if not isinstance(results, Iterable):
        raise AttentionInputError(f"results must be a sequence of AttentionResult, got {type(results).__name__}")
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    for index, result in enumerate(results):
        if not isinstance(result, AttentionResult):
            raise AttentionInputError(f"results[{index}] must be an AttentionResult, got {type(result).__name__}")
        output, lse = result.output, result.lse
        if lse is None:
            raise AttentionInputError(
                f"results[{index}].lse must be a tensor, got None; run the part with return_lse=True (needs_lse)"
            )
        outputs.append(output)
        lses.append(lse)
        first = outputs[0]
        if output.shape != first.shape or output.dtype != first.dtype or output.device != first.device:
            raise AttentionInputError(
                "results must be parts of the same queries: "
                f"results[0].output is {first.dtype} {tuple(first.shape)} on {first.device}, "
                f"results[{index}].output is {output.dtype} {tuple(output.shape)} on {output.device}"
            )
        if lse.shape != output.shape[:-1] or lse.dtype != lses[0].dtype:
            raise AttentionInputError(
                f"results[{index}].lse must be {lses[0].dtype} {tuple(output.shape[:-1])}, "
                f"got {lse.dtype} {tuple(lse.shape)}"
            )
    if not outputs:
        raise AttentionInputError("results must hold at least one AttentionResult, got none")
    return outputs, lses
