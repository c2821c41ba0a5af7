"""NaN in what a live row sees shows in that row; what nobody sees never shows (see :mod:`.rows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn import MaskLayout
from polyattn_conformance.case import INFER, INFER_LSE, Case
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.reference import softmax_step
from polyattn_conformance.trial import Trial

_NAMES = ("full", "causal", "causal_one_query", "causal_window", "packed", "right_padding", "inactive", "dense")


@check({"query": "q", "key": "k", "value": "v"})
def nan_stays_visible(trial: Trial, where: str) -> None:
    """NaN in a live query, or in a key or value that it sees, is NaN in that row's output.

    The LSE of the row is NaN too, unless only values are. Forward, the other rows of a NaN query stay as they are.
    It makes no difference that another head of the group does not see the key, or that a bias blocks it for other rows.
    """
    layouts = [LAYOUTS[name]() for name in trial.accepted(_NAMES)]
    # The kernels of a CPU treat the first keys of a row by vectors, and the rest one by one.
    layouts += [MaskLayout.causal(1), MaskLayout.causal(19), MaskLayout.full(3, 33)]
    of_one_head = torch.ones(1, 4, 8, 8, dtype=torch.bool)
    of_one_head[:, 2, :, 7] = False
    layouts.append(MaskLayout.dense(of_one_head))
    for layout in layouts:
        _assert_shows(trial, trial.case(layout, heads=4, kv_heads=2), where)
    blocks_for_some = torch.zeros(8, 8)
    blocks_for_some[:3, 7] = -torch.inf
    case = trial.case(MaskLayout.full(8), heads=4, kv_heads=2, bias=(8, 8))
    _assert_shows(trial, case.change(bias=blocks_for_some.to(case.q)), where)


def _assert_shows(trial: Trial, case: Case, where: str) -> None:
    mode = INFER if trial.backend.unsupported(case.layout, case.request(INFER_LSE)) else INFER_LSE
    prepared = trial.prepare(case.layout, case.request(mode))
    if prepared is None:
        return
    seen = softmax_step(case.q, case.k, case.v, case.visible, bias=case.bias).visible[0]
    sharing = [1] if where == "q" else [2, 3]  # the query heads that share KV head 1
    live = seen[sharing].any(0).any(-1).nonzero()[:, 0]
    row = int(live[len(live) // 2])
    key = int(seen[sharing, row].any(0).nonzero()[-1, 0])
    heads = [head for head in sharing if seen[head, row, key]]
    spoilt = getattr(case, where).clone()
    spoilt[0, 1, row if where == "q" else key] = torch.nan
    changed = case.change(**{where: spoilt})
    results = prepared(changed.q, changed.k, changed.v, **case.extras())
    shown: dict[str, Tensor] = {"output": results.output}
    if results.lse is not None and where != "v":
        shown["lse"] = results.lse
    for name, value in shown.items():
        got = value[0, heads, row]
        require(
            bool(got.isnan().all()),
            f"{name} of row {row} must be NaN, since its {where} is, got {got.flatten()[0].item():.6g}: {case}",
        )
    if where == "q":
        others = torch.ones(results.output.shape[:3], dtype=torch.bool, device=case.q.device)
        others[0, 1, row] = False
        want = prepared(case.q, case.k, case.v, **case.extras()).output
        same = torch.equal(results.output[others], want[others])
        require(same, f"NaN in query {row} reached another row: {case}")
    trial.honoured += 1
