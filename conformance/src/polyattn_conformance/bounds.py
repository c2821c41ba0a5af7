"""How far from the FP64 reference a backend may be.

Not a constant tolerance: what the same formulas in the same dtype lose, twice, plus the rounding unit times the size of
the terms that were added up. That size is the formulas over absolute values, times ``1 + max|score|`` (of the score or
of its terms, whichever is larger), since the exponential turns the absolute error of a score into a relative error of
its weight. Whatever takes no part has the bound 0: a row that sees nothing, a key that nobody sees, a bias that touches
no visible score.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn_conformance.case import GRADIENT, Case, Mode
from polyattn_conformance.failure import require
from polyattn_conformance.reference import SoftmaxStep, plain_attention, reference_attention, softmax_step

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
    tensors = (*case.tensors().values(), case.grad_output, case.grad_lse)
    asked = {"output", *(["lse"] if mode.lse else [])}
    asked |= {GRADIENT.format(name) for name in case.tensors() if mode.grad and name in case.leaves}
    known = _known[0] if _known else None
    if known is None or not known.is_of(case, tensors):
        known = _Reference(case, tensors)
        _known[:] = [known]
    return {name: want for name, want in known.results(lse_grad=mode.lse_grad).items() if name in asked}


class _Reference:
    """The reference of a case, for all modes and leaves."""

    def __init__(self, case: Case, tensors: tuple[Tensor, ...]) -> None:
        self.case, self.tensors = case, tensors
        self.versions = _versions(tensors)
        self._results: dict[bool, dict[str, Expected]] = {}
        wide = _in_fp64(case)
        with torch.inference_mode(mode=False):
            self._exact, self._rounded = _Run(reference_attention, wide), _Run(plain_attention, case)
        arguments = {"scale": case.scale, "softcap": case.softcap, "bias": wide.bias}
        self._step = softmax_step(wide.q, wide.k, wide.v, case.visible, **arguments)  # type: ignore[arg-type]

    def is_of(self, case: Case, tensors: tuple[Tensor, ...]) -> bool:
        """Whether it is of these very tensors, unchanged, under the same layout and scalars."""
        ours = self.case
        alike = ours.layout is case.layout and (ours.scale, ours.softcap) == (case.scale, case.softcap)
        alike = alike and ours.tensors().keys() == case.tensors().keys()
        return alike and all(map(operator.is_, self.tensors, tensors)) and self.versions == _versions(tensors)

    def results(self, *, lse_grad: bool) -> dict[str, Expected]:
        """Every result, with the gradients through the output, and through the LSE as well or not."""
        if lse_grad not in self._results:
            with torch.inference_mode(mode=False):
                exact, rounded = self._exact.results(lse_grad), self._rounded.results(lse_grad)
            sizes = _sizes(self.case, self._step, lse_grad)
            unit = max(torch.finfo(x.dtype).eps for x in self.case.tensors().values())
            if self.case.q.dtype is torch.float64:
                unit *= 4  # the reference rounds as often, and cannot be told from the same maths in the dtype
            expected = {}
            for name, value in exact.items():
                lost = (rounded[name].double() - value).nan_to_num(0.0, 0.0, 0.0).abs()
                worst = lost.max() if lost.numel() else lost.new_zeros(())
                takes_part, size = sizes[name]
                bound = torch.where(takes_part, 2 * worst + unit * size, 0)
                expected[name] = Expected(value, bound, rounded[name].dtype)
            self._results[lse_grad] = expected
        return self._results[lse_grad]


#: The last reference: the same case comes in several modes, one after the other.
_known: list[_Reference] = []


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    """How often each tensor was written to; tensors of inference do not count that."""
    return [-1 if x.is_inference() else x._version for x in tensors]  # noqa: SLF001 - torch names it so


class _Run:
    """One forward of formulas on a case, and its gradients."""

    def __init__(self, formulas: Callable[..., tuple[Tensor, Tensor]], case: Case) -> None:
        self.case = case
        self.leaves = {name: x.detach().clone().requires_grad_() for name, x in case.tensors().items()}
        with torch.enable_grad():
            output, lse = formulas(**self.leaves, visible=case.visible, scale=case.scale, softcap=case.softcap)
        self.values = {"output": output, "lse": lse}

    def results(self, lse_grad: bool) -> dict[str, Tensor]:
        incoming = {"output": self.case.grad_output}
        if lse_grad:
            incoming["lse"] = self.case.grad_lse.to(self.values["lse"].dtype)
        gradients = torch.autograd.grad(
            [self.values[name] for name in incoming],
            list(self.leaves.values()),
            list(incoming.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        named = {GRADIENT.format(name): x for name, x in zip(self.leaves, gradients, strict=True)}
        return {name: x.detach() for name, x in {**self.values, **named}.items()}


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


def _in_fp64(case: Case) -> Case:
    wide = {name: x.double() for name, x in case.tensors().items()}
    return case.change(**wide, grad_output=case.grad_output.double(), grad_lse=case.grad_lse.double())


def _sizes(case: Case, step: SoftmaxStep, lse_grad: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """For each result, which elements take part, and the size of the terms that make them up."""
    wide = _in_fp64(case)
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
    grad_lse = torch.where(step.live, wide.grad_lse, 0).abs() * lse_grad
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
