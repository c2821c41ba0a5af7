"""NaN in what a live row sees shows in that row; what nobody sees never shows (see :mod:`.rows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn._layout import MaskLayout
from polyattn.testing.case import INFER, INFER_LSE, Case
from polyattn.testing.checks.registry import check
from polyattn.testing.failure import require
from polyattn.testing.layouts import LAYOUTS
from polyattn.testing.trial import Trial

_NAMES = ("full", "causal", "causal_one_query", "causal_window", "packed", "right_padding", "inactive", "dense")


@check({"query": "q", "key": "k", "value": "v"})
def nan_stays_visible(trial: Trial, where: str) -> None:
    """NaN in a live query, or in a key or value that it sees, is NaN in that row's output.

    The LSE of the row is NaN too, unless only values are. Forward, the other rows of a NaN query stay as they are.
    """
    layouts = [LAYOUTS[name]() for name in trial.accepted(_NAMES)]
    # The kernels of a CPU treat the first keys of a row by vectors, and the rest one by one.
    layouts += [MaskLayout.causal(1), MaskLayout.causal(19), MaskLayout.full(3, 33)]
    for layout in layouts:
        case = trial.case(layout, heads=4, kv_heads=2)
        live = case.visible.any(-1)[0, 0].nonzero()[:, 0]
        row = int(live[len(live) // 2])
        key = int(case.visible[0, 0, row].nonzero()[-1, 0])
        spoilt = getattr(case, where).clone()
        spoilt[0, 1, row if where == "q" else key] = torch.nan
        _assert_shows(trial, case, case.change(**{where: spoilt}), where, row)


def _assert_shows(trial: Trial, case: Case, spoilt: Case, where: str, row: int) -> None:
    mode = INFER if trial.backend.unsupported(case.layout, case.request(INFER_LSE)) else INFER_LSE
    prepared = trial.prepare(case.layout, case.request(mode))
    if prepared is None:
        return
    results = prepared(spoilt.q, spoilt.k, spoilt.v)
    heads = [1] if where == "q" else [2, 3]  # the query heads that share KV head 1
    shown: dict[str, Tensor] = {"output": results.output}
    if results.lse is not None and where != "v":
        shown["lse"] = results.lse
    for name, value in shown.items():
        got = value[0, heads, row]
        require(
            got.isnan().all(),
            f"{name} of row {row} must be NaN, since its {where} is, got {got.flatten()[0].item():.6g}: {case}",
        )
    if where == "q":
        others = torch.ones(results.output.shape[:3], dtype=torch.bool, device=case.q.device)
        others[0, 1, row] = False
        want = prepared(case.q, case.k, case.v).output
        same = torch.equal(results.output[others], want[others])
        require(same, f"NaN in query {row} reached another row: {case}")
    trial.honoured += 1
