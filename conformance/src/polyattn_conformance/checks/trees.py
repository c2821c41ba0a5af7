"""Trees, sink tokens and unions: a branch is a row of its own, and what two parts show counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn import MaskLayout
from polyattn_conformance.bounds import Expected, assert_within, expected_results
from polyattn_conformance.case import GRADIENT, Case, evaluate
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LENGTHS, PARENTS
from polyattn_conformance.trial import Trial

#: What the tokens of one branch decide alone; gradients of keys and values that branches share are sums over them.
_OF_QUERIES = ("output", "lse", GRADIENT.format("q"))


@check({"causal": None, "window": 3, "one_key": 1})
def branch_is_a_row(trial: Trial, window: int | None) -> None:
    """A branch of a tree equals its path as a row of its own, and does not change by a bit when another branch does."""
    case = trial.case(MaskLayout.tree(PARENTS, LENGTHS, window=window), heads=4, kv_heads=2)
    mode = trial.strongest(case)
    if not trial.compare_one(case, mode):
        return
    together = _run(trial, case)
    names = [name for name in _OF_QUERIES if name in together]
    for path in _paths():
        alone = _tokens(case, MaskLayout.causal(len(path), window=window), path)
        expected = expected_results(alone, mode)
        assert_within({name: together[name][:, :, path] for name in names}, {name: expected[name] for name in names})
        changed = case.change(q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
        others = sorted({*range(sum(LENGTHS))} - {*path})
        for x in (changed.q, changed.k, changed.v):
            x[:, :, others] *= -3
        after = _run(trial, changed)
        for name in names:
            require(
                torch.equal(together[name][:, :, path], after[name][:, :, path]), f"{name}: another branch leaked in"
            )


@check({"causal": None, "window": 3})
def branches_share_gradients(trial: Trial, window: int | None) -> None:
    """Gradients of keys and values in a tree are the sums over its paths alone, each query counted in one of them."""
    case = trial.case(MaskLayout.tree(PARENTS, LENGTHS, window=window), heads=4, kv_heads=2)
    mode = trial.strongest(case)
    if not mode.grad or not trial.compare_one(case, mode):
        return
    total: dict[str, Expected] = {}
    counted: set[int] = set()
    for path in _paths():
        alone = _tokens(case, MaskLayout.causal(len(path), window=window), path)
        again = [at for at, token in enumerate(path) if token in counted]
        alone.grad_output[:, :, again] = 0
        alone.grad_lse[:, :, again] = 0
        counted.update(path)
        expected = expected_results(alone, mode)
        for name in map(GRADIENT.format, ("k", "v")):
            part = expected[name]
            if name not in total:
                zeros = part.value.new_zeros(*part.value.shape[:2], sum(LENGTHS), part.value.shape[-1])
                total[name] = Expected(zeros, zeros.clone(), part.dtype)
            total[name].value[:, :, path] += part.value
            total[name].bound[:, :, path] += part.bound
    assert_within(_run(trial, case), total)


@check({"one_row": ([11],), "documents": ([6, 2, 5],), "rows": ([4, 7], [9, 2])})
def sink_tokens_survive(trial: Trial, rows: tuple[list[int], ...]) -> None:
    """The first tokens of a document stay visible to its later tokens behind every window, and to no other document."""
    for sinks, window in ((1, 2), (3, 1), (9, 2)):
        visible = []
        for lengths in rows:
            document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            at = torch.cat([torch.arange(length) for length in lengths])
            seen = (at[:, None] - at < window) | (at < sinks)
            visible.append((seen & (document[:, None] == document)).tril())
        layout = MaskLayout.packed([*rows], window=window, sink_tokens=sinks)
        _compare_with(trial, layout, torch.stack(visible)[:, None])


@check(("causal", "both_ways"))
def tree_is_a_mask(trial: Trial, rule: str) -> None:
    """A tree equals the dense mask that shows a key where its node is the query's or stands above it."""
    node = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    above = torch.zeros(len(LENGTHS), len(LENGTHS), dtype=torch.bool)
    for of, parent in enumerate(PARENTS):
        above[of] = above[parent] if parent >= 0 else False
        above[of, of] = True
    visible = above[node][:, node]
    if rule == "causal":
        visible = visible.tril()
    _compare_with(trial, MaskLayout.tree(PARENTS, LENGTHS, causal=rule == "causal"), visible)


@check({"overlapping": 6, "touching": 3, "apart": 2})
def union_counts_once(trial: Trial, reach: int) -> None:
    """What two parts both show counts once, and a row that sees nothing of one part is what the other shows."""
    length = 9
    at = torch.arange(length)
    distance = at[:, None] - at
    first = (distance >= 0) & (distance < 3)
    active = at % 2 == 0
    second = (distance >= 0) & (at < reach) & active[:, None]
    valid = MaskLayout.padded((at < reach)[None], active_queries=active[None])
    _compare_with(trial, MaskLayout.causal(length, window=3) | valid, first | second)


def _compare_with(trial: Trial, layout: MaskLayout, visible: torch.Tensor) -> None:
    """The results under ``layout`` equal the reference under the mask ``Bool[Q, K]`` or ``Bool[B, 1, Q, K]``."""
    case = trial.case(layout, heads=4, kv_heads=2)
    mode = trial.strongest(case)
    if trial.compare_one(case, mode):
        expected = expected_results(case.change(layout=MaskLayout.dense(visible).to(case.q.device)), mode)
        assert_within(_run(trial, case), expected)


def _paths() -> list[list[int]]:
    """The tokens from a root to each leaf, by index."""
    starts = [sum(LENGTHS[:node]) for node in range(len(LENGTHS))]
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        own = [*range(starts[node], starts[node] + LENGTHS[node])]
        paths.append([*(paths[parent] if parent >= 0 else ()), *own])
    return [paths[node] for node in range(len(PARENTS)) if node not in PARENTS]


def _tokens(case: Case, layout: MaskLayout, index: Sequence[int]) -> Case:
    names = ("q", "k", "v", "grad_output", "grad_lse")
    parts = {name: getattr(case, name)[:, :, index] for name in names}
    return case.change(layout=layout.to(case.q.device), **parts)


def _run(trial: Trial, case: Case) -> dict[str, torch.Tensor]:
    mode = trial.strongest(case)
    return evaluate(trial.must_prepare(case.layout, case.request(mode)), case, mode)
