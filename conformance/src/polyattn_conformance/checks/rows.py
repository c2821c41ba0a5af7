"""Rows that see nothing, keys that nobody sees, documents and batch rows: nothing leaks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn import MaskLayout, PolyattnError
from polyattn_conformance.case import INFER, Case, Mode, evaluate
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS, WITH_DEAD
from polyattn_conformance.trial import Trial, raised
from polyattn_conformance.variants import poisoned


@check(WITH_DEAD)
def fully_masked_rows(trial: Trial, build: Callable[[], MaskLayout]) -> None:
    """A row that sees nothing gives exactly 0, LSE -inf, and exactly zero gradients, whatever comes in.

    NaN and Inf in keys and values that nobody sees, in queries that see nothing, and in the incoming gradients of
    their output and LSE reach nothing.
    """
    layout = build()
    for poison in (torch.nan, torch.inf, -torch.inf):
        trial.compare(poisoned(trial.case(layout, heads=4, kv_heads=2), poison))
        trial.compare(poisoned(trial.case(layout, heads=4, kv_heads=4, seed=1), poison))


@check()
def fully_masked_rows_bias(trial: Trial) -> None:
    """Mask and -inf bias together mask a row fully and hide a key just as well, and the bias gets zero gradients there.

    NaN and Inf in the queries of such rows, and in keys and values that mask and bias together hide from every query,
    reach nothing, nor do they from the incoming gradients.
    """
    case = trial.case(LAYOUTS["causal"](), heads=4, kv_heads=2, bias=(2, 4, 8, 8))
    bias = case.tensors()["bias"].clone()
    bias[0, 0, 3, :4] = -torch.inf
    bias[1, :, 7, :] = -torch.inf
    bias[0, :2, 6:, 6] = -torch.inf  # of the first group: no query sees the key
    case = case.change(bias=bias)
    for spoilt in (case, *(poisoned(case, poison) for poison in (torch.nan, torch.inf, -torch.inf))):
        trial.compare(spoilt, spoilt.change(leaves=("q", "k", "v")))


@check()
def fully_masked_rows_sinks(trial: Trial) -> None:
    """Sinks give a fully masked row nothing and take nothing from it."""
    for name in ("middle", "right_padding", "left_padding", "inactive"):
        trial.compare(poisoned(trial.case(WITH_DEAD[name](), sinks=True), torch.nan))


@check({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
def smallest_bias(trial: Trial, dtype: torch.dtype) -> None:
    """A row whose bias is finfo.min everywhere is live: all its visible keys weigh the same."""
    for name in ("full", "causal", "dense"):
        case = trial.case(LAYOUTS[name](), dtype=dtype)
        bias = case.q.new_zeros(case.q.shape[2], case.k.shape[2])
        bias[2] = torch.finfo(dtype).min
        trial.compare(case.change(bias=bias, leaves=("q", "k", "v")), case.change(bias=bias))


@check({"causal": {"causal": True}, "both_ways": {"causal": False}, "window": {"window": 2}})
def packed_is_separate(trial: Trial, rule: dict[str, object]) -> None:
    """Packed documents equal each document alone, and do not change by a bit when another document does."""
    for lengths in ([3, 1, 5], [[4, 2, 3], [1, 8]], [9]):
        layout = MaskLayout.packed(lengths, **rule)  # type: ignore[arg-type]
        case = trial.case(layout, heads=4, kv_heads=2)
        mode = trial.strongest(case)
        if not trial.compare_one(case, mode):
            continue
        together = _run(trial, case, mode)
        rows = lengths if isinstance(lengths[0], list) else [lengths] * case.q.shape[0]
        for row, documents in enumerate(rows):
            ends = torch.tensor(documents).cumsum(0).tolist()
            for start, end in zip([0, *ends], ends, strict=False):
                alone = _part(case, MaskLayout.packed([end - start], **rule), row, start, end)  # type: ignore[arg-type]
                trial.compare_one(alone, mode)
        first = rows[0][0]
        changed = case.change(q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
        for x in (changed.q, changed.k, changed.v):
            x[0, :, :first] *= -3
        after = _run(trial, changed, mode)
        for name, value in together.items():
            for had, has in ((value[0, :, first:], after[name][0, :, first:]), (value[1:], after[name][1:])):
                require(torch.equal(had, has), f"{name}: another document leaked in")


_INACTIVE = MaskLayout.causal(4, active_queries=torch.tensor([[True, False, True, True]]))
_OF_BATCH_1 = ("full", "causal", "packed", "prefix_lm", "chunked", "positions", "dense", "dense_heads", "mask_mod")


@check((*_OF_BATCH_1, "inactive_one"))
def batch_broadcast(trial: Trial, name: str) -> None:
    """A layout of batch 1 serves a batch of three as it serves each of the three."""
    layout = _INACTIVE if name == "inactive_one" else LAYOUTS[name]()
    case = trial.case(layout, batch=3, heads=4)
    mode = trial.strongest(case)
    trial.compare_one(case, mode)
    for row in range(3):
        trial.compare_one(_part(case, layout, row, 0, None), mode)


@check({"one": 1, "two": 2})
def batch_mismatch(trial: Trial, batch: int) -> None:
    """A layout of batch 3 serves only batch 3: another batch is refused before any kernel."""
    padded = MaskLayout.padded(torch.tensor([[True, True]] * 2 + [[True, False]]))
    for layout in (padded, MaskLayout.dense(torch.ones(3, 1, 2, 2, dtype=torch.bool))):
        case = trial.case(layout)
        request = case.request(INFER, batch=batch)
        if trial.backend.unsupported(case.layout, request):
            trial.prepare(case.layout, request)
            continue
        error = raised(PolyattnError, functools.partial(trial.backend.prepare, case.layout, request))
        require(error is not None, f"prepare accepts a layout of batch 3 for tensors of batch {batch}")
        for number in (3, batch):
            require(str(number) in str(error), f"the error must name both batches, 3 and {batch}: {error}")
        trial.honoured += 1


def _part(case: Case, layout: MaskLayout, row: int, start: int, end: int | None) -> Case:
    def cut(x: Tensor) -> Tensor:
        return x[row : row + 1, :, start:end]

    return case.change(
        layout=layout.to(case.q.device),
        q=cut(case.q), k=cut(case.k), v=cut(case.v), grad_output=cut(case.grad_output), grad_lse=cut(case.grad_lse),
    )  # fmt: skip


def _run(trial: Trial, case: Case, mode: Mode) -> dict[str, Tensor]:
    return evaluate(trial.must_prepare(case.layout, case.request(mode)), case, mode)
