"""Bias, softcap and sinks, alone and together."""

from __future__ import annotations

import torch

from polyattn_conformance.case import TRAIN, TRAIN_LSE
from polyattn_conformance.checks.registry import check
from polyattn_conformance.layouts import LONG, ORDINARY
from polyattn_conformance.trial import Trial

_NAMES = ("full", "causal", "causal_window", "packed", "dense", "dense_heads")


def _sizes(name: str) -> tuple[int, int]:
    layout = ORDINARY[name]()
    return layout.q_len, layout.kv_len


@check(("whole", "heads", "as_many_heads_as_rows", "shared", "keys", "matrix", "vector"))
def bias(trial: Trial, form: str) -> None:
    """A bias of any shape that broadcasts is added to the scaled scores; its gradient is summed to its shape."""
    for layout in (*(ORDINARY[name]() for name in _NAMES), LONG["causal"]()):
        q_len, kv_len = layout.q_len, layout.kv_len
        shape = {
            "whole": (2, 4, q_len, kv_len),
            "heads": (1, 4, q_len, kv_len),
            "as_many_heads_as_rows": (4, q_len, kv_len),  # per head, and not per batch row
            "shared": (1, 1, q_len, kv_len),
            "keys": (2, 1, 1, kv_len),
            "matrix": (q_len, kv_len),
            "vector": (kv_len,),
        }[form]
        batch = 4 if form == "as_many_heads_as_rows" else 2
        case = trial.case(layout, batch=batch, heads=4, kv_heads=2, bias=shape)
        trial.compare(case)
        trial.compare(case.change(leaves=("q", "k", "v")), modes=(TRAIN, TRAIN_LSE))


@check()
def bias_blocks(trial: Trial) -> None:
    """A bias of -inf blocks a key as the mask does, and gets no gradient there; finite negatives only add."""
    for name in _NAMES:
        q_len, kv_len = _sizes(name)
        case = trial.case(ORDINARY[name](), heads=4, bias=(2, 1, q_len, kv_len))
        bias = case.tensors()["bias"].clone()
        bias[..., -1] = -torch.inf
        bias[0, 0, q_len // 2, 0] = -20
        trial.compare(case.change(bias=bias))
        trial.compare(case.change(bias=bias, leaves=("q", "k", "v")), modes=(TRAIN, TRAIN_LSE))


@check({"cap_1": 1.0, "cap_5": 5.0, "cap_50": 50.0})
def softcap(trial: Trial, cap: float) -> None:
    """Scaled scores s become cap * tanh(s / cap), before the bias."""
    for name in _NAMES:
        q_len, kv_len = _sizes(name)
        case = trial.case(ORDINARY[name](), heads=4, softcap=cap)
        with_bias = trial.case(ORDINARY[name](), heads=4, softcap=cap, bias=(q_len, kv_len))
        trial.compare(case.change(q=case.q * 8), with_bias)


@check({"ordinary": 0.0, "large": 8.0, "small": -8.0, "far_above": 30.0})
def sinks(trial: Trial, offset: float) -> None:
    """The output is multiplied by sigmoid(lse - sink); the LSE itself does not include sinks."""
    for name in (*_NAMES, "chunked"):
        case = trial.case(ORDINARY[name](), heads=4, kv_heads=2, sinks=True)
        trial.compare(case.change(sinks=case.tensors()["sinks"] + offset))


@check()
def together(trial: Trial) -> None:
    """Window, scale, softcap, bias and sinks in one call keep their order."""
    for name in ("causal_window", "packed_window", "dense_heads"):
        q_len, kv_len = _sizes(name)
        case = trial.case(
            ORDINARY[name](), heads=4, kv_heads=2, scale=0.9, softcap=3.0, bias=(4, q_len, kv_len), sinks=True
        )
        trial.compare(case)
        trial.compare(case.change(leaves=("q", "k", "v", "sinks")), modes=(TRAIN, TRAIN_LSE))
