"""How far from the FP64 reference a backend may be.

Not a constant tolerance: what the same formulas in the same dtype lose, twice, plus the rounding unit times the size of
the terms that were added up. That size is the formulas over absolute values, times ``1 + max|score|`` (of the score or
of its terms, whichever is larger), since the exponential turns the absolute error of a score into a relative error of
its weight. Whatever takes no part has the bound 0: a row that sees nothing, a key that nobody sees, a bias that touches
no visible score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn import AttentionResult
from polyattn_conformance.case import GRADIENT, Call, Case, Mode, evaluate
from polyattn_conformance.failure import require
from polyattn_conformance.reference import plain_attention, reference_attention, softmax_step

#: A bias below this drowns every score: all that it touches weighs the same, so its size adds no rounding error.
_DROWNED = -1e9


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
    """One result of the reference.

    Attributes:
        value: FP64.
        bound: FP64, the largest error allowed, element by element.
        dtype: the dtype that the result must have.
    """

    value: Tensor
    bound: Tensor
    dtype: torch.dtype


def expected_results(case: Case, mode: Mode) -> dict[str, Expected]:
    """What ``evaluate`` must return for ``case`` in ``mode``, within which bounds."""
    exact = evaluate(_formulas(reference_attention, case), _in_fp64(case), mode)
    rounded = evaluate(_formulas(plain_attention, case), case, mode)
    sizes = _sizes(case, mode)
    unit = max(torch.finfo(x.dtype).eps for x in case.tensors().values())
    if case.q.dtype is torch.float64:
        unit *= 4  # the reference rounds as often, and cannot be told from the same maths in the dtype
    expected = {}
    for name, value in exact.items():
        lost = (rounded[name].double() - value).nan_to_num(0.0, 0.0, 0.0).abs()
        worst = lost.max() if lost.numel() else lost.new_zeros(())
        takes_part, size = sizes[name]
        bound = torch.where(takes_part, 2 * worst + unit * size, 0)
        expected[name] = Expected(value, bound, rounded[name].dtype)
    return expected


def assert_within(results: dict[str, Tensor], expected: dict[str, Expected]) -> None:
    """Compare results with the reference.

    Raises:
        AssertionError: names the first result that is missing, has another shape or dtype, or lies outside its bound,
            and where.
    """
    for name, want in expected.items():
        got = results[name]
        require(got.shape == want.value.shape, f"{name}: shape {list(got.shape)}, need {list(want.value.shape)}")
        require(got.dtype is want.dtype, f"{name}: {got.dtype}, need {want.dtype}")
        error = torch.where(got == want.value, 0, (got.double() - want.value).abs())
        wrong = ~(error <= want.bound)
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}{list(where)}: got {got[where].item():.6g}, need {want.value[where].item():.6g} "
                f"within {want.bound[where].item():.2g} ({int(wrong.sum())} of {wrong.numel()} elements are wrong)"
            )


def _formulas(formulas: Callable[..., tuple[Tensor, Tensor]], case: Case) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, sinks: Tensor | None) -> AttentionResult:
        return AttentionResult(
            *formulas(q, k, v, case.visible, scale=case.scale, softcap=case.softcap, bias=bias, sinks=sinks)
        )

    return call


def _in_fp64(case: Case) -> Case:
    wide = {name: x.double() for name, x in case.tensors().items()}
    return case.change(**wide, grad_output=case.grad_output.double(), grad_lse=case.grad_lse.double())


def _sizes(case: Case, mode: Mode) -> dict[str, tuple[Tensor, Tensor]]:
    """For each result, which elements take part, and the size of the terms that make them up."""
    wide = _in_fp64(case)
    step = softmax_step(wide.q, wide.k, wide.v, case.visible, scale=case.scale, softcap=case.softcap, bias=wide.bias)
    scale = abs(case.q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    q, k, v = step.q.abs(), step.k.abs(), step.v.abs()
    counted = step.visible if wide.bias is None else step.visible & (wide.bias > _DROWNED)
    terms = torch.where(counted, q @ k.mT * scale + (0 if wide.bias is None else wide.bias.abs()), 0)
    # A score may be small although its terms are not: they cancel in wide heads, and a softcap makes the sum small.
    scores = torch.maximum(torch.where(counted, step.scores.abs(), 0), terms)
    peak = 1 + (scores.max() if scores.numel() else scores.new_zeros(()))
    plain = step.weights @ v
    sizes = {
        "output": (step.live.unsqueeze(-1).expand_as(plain), plain),
        "lse": (step.live, step.lse.abs() + (step.weights * terms).sum(-1)),
    }
    grad_output = torch.where(step.live.unsqueeze(-1), wide.grad_output, 0).abs()
    grad_lse = torch.where(step.live, wide.grad_lse, 0).abs() * mode.lse_grad
    if wide.sinks is not None:
        gate = torch.sigmoid(step.lse - wide.sinks.unsqueeze(-1)) * step.live
        sizes["output"] = (sizes["output"][0], plain * gate.unsqueeze(-1))
        through = (grad_output * plain).sum(-1) * gate * (1 - gate)
        sizes["sinks"] = (step.live.any(-1).any(0), through.sum((0, 2)))
        grad_lse = grad_lse + through
        grad_output = grad_output * gate.unsqueeze(-1)
    grad_weights = grad_output @ v.mT
    mean = (step.weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = step.weights * (grad_weights + mean + grad_lse.unsqueeze(-1))
    sizes["q"] = (step.live.unsqueeze(-1).expand_as(q), grad_scores @ k * scale)
    sizes["k"] = _per_kv_head(case, step.visible, grad_scores.mT @ q * scale)
    sizes["v"] = _per_kv_head(case, step.visible, step.weights.mT @ grad_output)
    if wide.bias is not None:
        sizes["bias"] = (step.visible.sum_to_size(wide.bias.shape) > 0, grad_scores.sum_to_size(wide.bias.shape))
    return {
        name if name in {"output", "lse"} else GRADIENT.format(name): (takes_part, size * peak)
        for name, (takes_part, size) in sizes.items()
    }


def _per_kv_head(case: Case, visible: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the query heads that share a KV head: ``[B, Hq, K, X]`` to ``[B, Hkv, K, X]``."""
    shape = (case.k.shape[1], case.q.shape[1] // case.k.shape[1])
    summed = size.unflatten(1, shape).sum(2)
    seen = visible.any(-2).unflatten(1, shape).any(2)
    return seen.unsqueeze(-1).expand_as(summed), summed
