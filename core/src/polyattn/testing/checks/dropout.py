"""Dropout acts on attention weights, only in training, and its gradient knows which weights it dropped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn._layout import MaskLayout
from polyattn.testing.case import INFER, TRAIN, Case, evaluate
from polyattn.testing.checks.registry import check
from polyattn.testing.failure import require
from polyattn.testing.layouts import LAYOUTS
from polyattn.testing.trial import Trial

_P = 0.25
_NAMES = ("full", "causal", "packed", "dense", "right_padding")


@check()
def dropout_outside_training(trial: Trial) -> None:
    """Outside training the probability is ignored."""
    for name in _NAMES:
        for mode in (INFER, TRAIN):
            trial.compare_one(trial.case(LAYOUTS[name]()), mode, dropout_p=_P, training=False)


@check()
def dropout_rate(trial: Trial) -> None:
    """A weight is dropped with probability p, else divided by 1 - p."""
    case = _revealing(trial, MaskLayout.full(48))
    weights = _run(trial, case, seed=0)["output"].double()
    kept = weights != 0
    share = 1 - kept.double().mean().item()
    spread = math.sqrt(_P * (1 - _P) / kept.numel())
    require(abs(share - _P) < 6 * spread, f"{share:.3f} of the weights were dropped, need {_P} +- {6 * spread:.3f}")
    need = 1 / (48 * (1 - _P))
    worst = (weights[kept] - need).abs().max().item()
    require(worst < need * 4 * torch.finfo(trial.dtype).eps, f"a kept weight is off by {worst:.3g}, need {need:.6g}")
    trial.honoured += 1


@check()
def dropout_seed(trial: Trial) -> None:
    """The same seed drops the same weights; another seed, others; no two heads or batch rows drop alike."""
    case = _revealing(trial, MaskLayout.causal(32))
    one, again, other = (_run(trial, case, seed=seed)["output"] for seed in (3, 3, 4))
    require(torch.equal(one, again), "two runs with one seed differ")
    require(not torch.equal(one, other), "two seeds give the same")
    require(not torch.equal(one[0], one[1]), "two batch rows drop the same weights")
    require(not torch.equal(one[:, 0], one[:, 1]), "two heads drop the same weights")
    trial.honoured += 1


@check()
def dropout_gradient(trial: Trial) -> None:
    """The gradient of v is the dropped weights, transposed, times the incoming gradient; that of q and k follows."""
    case = _revealing(trial, MaskLayout.causal(24))
    results = _run(trial, case, seed=1)
    dropped = results["output"].double()
    grad_weights = case.grad_output.double()  # v is the identity
    plain = torch.where(case.visible, 1.0, 0.0).double()
    plain = plain / plain.sum(-1, keepdim=True)
    grad_plain = torch.where(dropped != 0, grad_weights / (1 - _P), 0)
    grad_scores = plain * (grad_plain - (plain * grad_plain).sum(-1, keepdim=True))
    need = {
        "gradient of v": dropped.mT @ case.grad_output.double(),
        "gradient of k": grad_scores.mT @ case.q.double() * case.q.shape[-1] ** -0.5,
        "gradient of q": grad_scores @ case.k.double() * case.q.shape[-1] ** -0.5,
    }
    for name, want in need.items():
        error = (results[name].double() - want).abs().max().item()
        allowed = 64 * torch.finfo(trial.dtype).eps * (1 + want.abs().max().item())
        require(
            error <= allowed, f"{name}: error {error:.3g}, at most {allowed:.3g}; it does not know what was dropped"
        )
    trial.honoured += 1


@check()
def dropout_dead_rows(trial: Trial) -> None:
    """A row that sees nothing stays exactly zero while training with dropout."""
    case = trial.case(LAYOUTS["middle"]())
    results = _run(trial, case, seed=0)
    for name in ("output", "gradient of q"):
        require(not results[name][:, :, 3].any(), f"{name} of a row that sees nothing is not zero")
    trial.honoured += 1


def _revealing(trial: Trial, layout: MaskLayout) -> Case:
    """A case whose output shows the attention weights: q is zero and v the identity."""
    length = layout.kv_len
    case = trial.case(layout, v_head_dim=length, head_dim=length)
    identity = torch.eye(length, dtype=trial.dtype, device=trial.device)
    return case.change(q=torch.zeros_like(case.q), v=identity.expand_as(case.v))


def _run(trial: Trial, case: Case, seed: int) -> dict[str, Tensor]:
    request = case.request(TRAIN, dropout_p=_P, training=True)
    mode = TRAIN
    if trial.backend.unsupported(case.layout, request) and not trial.declares("grad"):
        mode = INFER
        request = case.request(INFER, dropout_p=_P, training=True)
    prepared = trial.must_prepare(case.layout, request)
    with torch.random.fork_rng(devices=[trial.device] if trial.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return evaluate(prepared, case, mode)
