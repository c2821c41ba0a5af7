"""The log-sum-exp: returned only when asked for, and its gradient right or refused, never dropped."""

from __future__ import annotations

import math

import torch

from polyattn import MaskLayout
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import GRADIENT, INFER, INFER_LSE, TRAIN_LSE, Case, Mode
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import CheckFailed, require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.trial import DTYPES_BY_NAME, Trial

_VALUE_ONLY = Mode(grad=True, lse=True)
_NAMES = ("full", "causal", "causal_window", "packed", "dense", "right_padding")


@check()
def lse_when_asked(trial: Trial) -> None:
    """Without ``needs_lse`` the LSE is None."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name]())
        result = trial.must_prepare(case.layout, case.request(INFER))(case.q, case.k, case.v)
        require(result.lse is None, "lse must be None when it was not asked for")
        trial.honoured += 1


@check(DTYPES_BY_NAME)
def lse_natural(trial: Trial, dtype: torch.dtype) -> None:
    """The LSE is a natural logarithm, not rounded to the dtype of q: n keys of equal score zero give log n."""
    case = trial.case(MaskLayout.causal(300), dtype=dtype)
    case = case.change(q=torch.zeros_like(case.q))
    prepared = trial.prepare(case.layout, case.request(INFER_LSE))
    if prepared is None:
        return
    lse = prepared(case.q, case.k, case.v).lse
    if lse is None:
        raise CheckFailed("needs_lse was asked for, and lse is None")
    # Torch's fused CPU op loses 5e-5 in the low dtypes; rounding to them loses 1e-3 and more of these logarithms.
    most = 2e-4 if dtype in (torch.bfloat16, torch.float16) else 1e-6
    for row in (0, 1, 2, 6, 99, 299):
        got, need = lse[0, 0, row].item(), math.log(row + 1)
        require(
            math.isclose(got, need, rel_tol=1e-5, abs_tol=most),
            f"LSE over {row + 1} keys of score 0: {got}, need {need}",
        )
    trial.honoured += 1


@check(_NAMES)
def lse_gradient(trial: Trial, name: str) -> None:
    """Gradients through the LSE alone, and through LSE and output together, are those of the reference."""
    case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2)
    trial.compare(case, case.change(grad_output=torch.zeros_like(case.grad_output)), modes=(TRAIN_LSE,))


@check({"of_output": "output", "of_lse": "lse", "of_both": "both"})
def lse_gradient_not_asked(trial: Trial, loss: str) -> None:
    """A gradient of the LSE that was not asked for is right or raises; it is never dropped silently.

    The error names the backend and ``needs_lse_grad``. A loss on the output alone is unaffected.
    """
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name]())
        if loss == "output":
            trial.compare(case, modes=(_VALUE_ONLY,))
        elif trial.prepare(case.layout, case.request(_VALUE_ONLY)) is not None:
            _assert_not_dropped(trial, case, alone=loss == "lse")
            trial.honoured += 1


def _assert_not_dropped(trial: Trial, case: Case, *, alone: bool) -> None:
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    prepared = trial.must_prepare(case.layout, case.request(_VALUE_ONLY))
    result = prepared(**leaves)
    if result.lse is None:
        raise CheckFailed("needs_lse was asked for, and lse is None")
    on_lse = torch.where(result.lse.isneginf(), 0, result.lse * case.grad_lse).sum()
    loss = on_lse if alone else on_lse + (result.output * case.grad_output).sum()
    try:
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    except RuntimeError as error:
        missing = [word for word in (trial.backend.name, "needs_lse_grad") if word not in str(error)]
        if missing:
            raise AssertionError(
                f"an error of backward through the LSE must name {' and '.join(missing)}: {error}"
            ) from error
        return
    named = {GRADIENT.format(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}
    if alone:
        case = case.change(grad_output=torch.zeros_like(case.grad_output))
    expected = {name: want for name, want in expected_results(case, TRAIN_LSE).items() if name in named}
    try:
        assert_within(named, expected)
    except AssertionError as error:
        raise AssertionError(f"the gradient of the LSE was dropped without a word: {error}") from error
