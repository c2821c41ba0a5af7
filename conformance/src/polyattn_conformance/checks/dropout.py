"""Dropout acts on attention weights, only in training, and its gradient knows which weights it dropped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn import MaskLayout
from polyattn_conformance.bounds import expected_results
from polyattn_conformance.case import GRADIENT, INFER, TRAIN, TRAIN_LSE, Case, Mode, evaluate
from polyattn_conformance.checks.execution import compiled_call
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.reference import reference_attention
from polyattn_conformance.trial import Trial

_P = 0.25
#: Longer than the tiles of 128 keys in which kernels draw their random numbers, and not a multiple of them.
_LENGTH = 136
_HALF = _LENGTH // 2
_NAMES = ("full", "causal", "packed", "dense", "right_padding")
_USES: dict[str, tuple[MaskLayout, dict[str, Any]]] = {
    "plain": (MaskLayout.full(_LENGTH), {}),
    "grouped_heads": (MaskLayout.causal(_LENGTH), {"kv_heads": 2}),
    "window": (MaskLayout.causal(_LENGTH, window=_HALF), {}),
    "packed": (MaskLayout.packed([_HALF, _HALF]), {}),
    "dense": (MaskLayout.dense(torch.ones(_LENGTH, _LENGTH).tril(3).bool()), {}),
    "bias": (MaskLayout.full(_LENGTH), {"bias": (2, 1, _LENGTH, _LENGTH)}),
    "softcap": (MaskLayout.full(_LENGTH), {"softcap": 1.0}),
    "sinks": (MaskLayout.full(_LENGTH), {"sinks": True}),
}


@check()
def dropout_outside_training(trial: Trial) -> None:
    """Outside training the probability is ignored."""
    for name in _NAMES:
        for mode in (INFER, TRAIN):
            trial.compare_one(trial.case(LAYOUTS[name]()), mode, dropout_p=_P, training=False)


@check(_USES)
def dropout(trial: Trial, use: tuple[MaskLayout, dict[str, Any]]) -> None:
    """A weight is dropped with probability p, else divided by 1 - p, also in gradients; the LSE ignores dropout."""
    layout, features = use
    case = _revealing(trial, layout, **features)
    mode, results = _run(trial, case, seed=1)
    expected = expected_results(case, mode)
    weights, visible = results["output"].double(), case.visible.expand(*case.q.shape[:3], layout.kv_len)
    kept = weights != 0
    dropped = 1 - kept[visible].double().mean().item()
    spread = math.sqrt(_P * (1 - _P) / int(visible.sum()))
    require(abs(dropped - _P) < 6 * spread, f"{dropped:.3f} of the weights were dropped, need {_P} +- {6 * spread:.3f}")
    want, bound = expected["output"].value / (1 - _P), 2 * expected["output"].bound / (1 - _P)
    wrong = (weights - want).abs().where(kept, 0) - bound
    require((wrong <= 0).all(), f"a weight that was kept must be divided by {1 - _P}, one is off by {wrong.max():.3g}")
    _assert_independent(kept, visible)
    if "lse" in results:
        error = (results["lse"] - expected["lse"].value).abs()
        require((error <= expected["lse"].bound).all(), "the LSE must be that of all weights, dropped or not")
    for name, gradient in _gradients(case, kept, mode).items():
        error = (results[name].double() - gradient).abs().max()
        allowed = 64 * torch.finfo(trial.dtype).eps * (1 + gradient.abs().max())
        require(error <= allowed, f"{name}: error {error:.3g}, at most {allowed:.3g}; it knows not what was dropped")
    trial.honoured += 1


@check({"p_0.1": 0.1, "p_0.3": 0.3})
def dropout_probability(trial: Trial, p: float) -> None:
    """The probability is the one asked for; a kernel that draws bytes may be off by 1/256."""
    case = _revealing(trial, MaskLayout.full(_LENGTH))
    dropped = (_run(trial, case, seed=2, p=p)[1]["output"] == 0).double().mean().item()
    most = 1 / 256 + 6 * math.sqrt(p * (1 - p) / (case.q.shape[0] * case.q.shape[1] * _LENGTH**2))
    require(abs(dropped - p) < most, f"{dropped:.3f} of the weights were dropped, need {p} +- {most:.3f}")
    trial.honoured += 1


@check()
def dropout_seed(trial: Trial) -> None:
    """The same seed drops the same weights; another seed, or a second call, drops others."""
    case = _revealing(trial, MaskLayout.causal(32))
    one, again, other = (_run(trial, case, seed=seed)[1]["output"] for seed in (3, 3, 4))
    require(torch.equal(one, again), "two runs with one seed differ")
    require(not torch.equal(one, other), "two seeds give the same")
    mode = _mode(trial, case)
    prepared = trial.must_prepare(case.layout, case.request(mode, dropout_p=_P, training=True))
    with _seeded(trial, 3):
        first, second = (evaluate(prepared, case, mode)["output"] for _ in range(2))
    require(not torch.equal(first, second), "two calls one after another drop the same weights")
    trial.honoured += 1


@check()
def dropout_fully_masked_rows(trial: Trial) -> None:
    """A row that sees nothing stays exactly zero while training with dropout."""
    case = trial.case(LAYOUTS["middle"]())
    _, results = _run(trial, case, seed=0)
    for name in ("output", "gradient of q"):
        if name in results:
            require(not results[name][:, :, 3].any(), f"{name} of a row that sees nothing is not zero")
    trial.honoured += 1


@check()
def dropout_compiled(trial: Trial) -> None:
    """Weights are dropped in a compiled function as well."""
    case = _revealing(trial, MaskLayout.full(32))
    mode = _mode(trial, case)
    prepared = trial.must_prepare(case.layout, case.request(mode, dropout_p=_P, training=True))
    with compiled_call() as (call, _), _seeded(trial, 0):
        output = call(prepared, *(x.detach().requires_grad_(mode.grad) for x in (case.q, case.k, case.v)))[0]
    dropped = (output == 0).double().mean().item()
    require(abs(dropped - _P) < _P / 2, f"{dropped:.3f} of the weights were dropped, need {_P}")
    trial.honoured += 1


def _revealing(trial: Trial, layout: MaskLayout, **features: Any) -> Case:
    """A case whose output shows the attention weights: v is the identity."""
    length = layout.kv_len
    case = trial.case(layout, **{"heads": 4, "v_head_dim": length, "head_dim": length, **features})
    identity = torch.eye(length, dtype=trial.dtype, device=trial.device)
    return case.change(q=case.q / 2, v=identity.expand_as(case.v).contiguous())


def _assert_independent(kept: Tensor, visible: Tensor) -> None:
    """No two queries, keys, heads or batch rows drop alike, where enough of them is visible to tell."""
    require(not torch.equal(kept[0], kept[1]), "two batch rows drop the same weights")
    for h in range(1, kept.shape[1]):
        require(not torch.equal(kept[:, 0], kept[:, h]), f"heads 0 and {h} drop the same weights")
    corner, last = kept[..., :_HALF, :_HALF], kept[..., _HALF:, _HALF:]
    require(not torch.equal(corner, last), "the same weights are dropped again later in the sequence")
    if visible.all():
        for name, rows in (("queries", kept), ("keys", kept.mT)):
            distinct = torch.unique(rows.flatten(0, 2), dim=0).shape[0]
            require(distinct == rows[..., 0].numel(), f"two {name} drop the same weights")


def _gradients(case: Case, kept: Tensor, mode: Mode) -> dict[str, Tensor]:
    """Of the formulas in FP64, with the weights dropped that were."""
    if not mode.grad:
        return {}
    leaves = {name: x.detach().double().requires_grad_() for name, x in case.tensors().items()}
    weights, lse = reference_attention(
        leaves["q"],
        leaves["k"],
        case.v,
        case.visible,
        scale=case.scale,
        softcap=case.softcap,
        bias=leaves.get("bias"),
        sinks=leaves.get("sinks"),
    )
    output = (weights / (1 - _P)).where(kept, 0) @ leaves["v"].repeat_interleave(kept.shape[1] // case.v.shape[1], 1)
    loss = (output * case.grad_output).sum()
    if mode.lse_grad:
        loss = loss + (lse * case.grad_lse).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {GRADIENT.format(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _mode(trial: Trial, case: Case) -> Mode:
    for mode in (TRAIN_LSE, TRAIN):
        if not trial.backend.unsupported(case.layout, case.request(mode, dropout_p=_P, training=True)):
            return mode
    return TRAIN if trial.declares("grad") else INFER


@contextlib.contextmanager
def _seeded(trial: Trial, seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[trial.device] if trial.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _run(trial: Trial, case: Case, seed: int, p: float = _P) -> tuple[Mode, dict[str, Tensor]]:
    mode = _mode(trial, case)
    prepared = trial.must_prepare(case.layout, case.request(mode, dropout_p=p, training=True))
    with _seeded(trial, seed):
        return mode, evaluate(prepared, case, mode)
