"""Second derivatives and torch.func transforms: right, or an error; never a zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn import AttentionResult
from polyattn_conformance.case import TRAIN, Call, Case
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.reference import plain_attention, reference_attention
from polyattn_conformance.trial import Trial

Three = tuple[Tensor, Tensor, Tensor]
Transform = Callable[[Call, Case], tuple[Tensor, ...]]


def _loss(call: Call, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: (call(q, k, v).output * case.grad_output).sum()


def _tangents(case: Case) -> Three:
    return case.q.roll(1, 2), case.k.roll(1, 2), case.v.roll(1, 2)


def _double_backward(call: Call, case: Case) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    first = torch.autograd.grad(_loss(call, case)(*leaves), leaves, create_graph=True)
    mixed = [(gradient * tangent).sum() for gradient, tangent in zip(first, _tangents(case), strict=True)]
    return torch.autograd.grad(torch.stack(mixed).sum(), leaves, materialize_grads=True)


def _grad(call: Call, case: Case) -> tuple[Tensor, ...]:
    gradients: Three = torch.func.grad(_loss(call, case), argnums=(0, 1, 2))(case.q, case.k, case.v)
    return gradients


def _vmap(call: Call, case: Case) -> tuple[Tensor, ...]:
    stacks = [torch.stack([x, 2 * x, -x]) for x in (case.q, case.k, case.v)]
    return (torch.func.vmap(lambda q, k, v: call(q, k, v).output)(*stacks),)


def _vmap_grad(call: Call, case: Case) -> tuple[Tensor, ...]:
    stacks = [torch.stack([x, 2 * x, -x]) for x in (case.q, case.k, case.v)]
    gradients: Three = torch.func.vmap(torch.func.grad(_loss(call, case), argnums=(0, 1, 2)))(*stacks)
    return gradients


def _jvp(call: Call, case: Case) -> tuple[Tensor, ...]:
    inputs = (case.q, case.k, case.v)
    with warnings.catch_warnings():
        # torch prepares its forward-mode formulas with a function that it deprecates.
        warnings.filterwarnings("ignore", ".*torch.jit", category=FutureWarning)
        return tuple(torch.func.jvp(lambda q, k, v: call(q, k, v).output, inputs, _tangents(case)))


@check({"double_backward": _double_backward, "grad": _grad, "vmap": _vmap, "vmap_grad": _vmap_grad, "jvp": _jvp})
def transform(trial: Trial, run: Transform) -> None:
    """Second derivatives and torch.func transforms are right, or raise where ``second_order`` is not declared."""
    must = trial.abilities is not None and "second_order" in trial.abilities
    dtype = torch.float64 if trial.declares("float64") else trial.dtype
    cases = [
        trial.case(LAYOUTS[name](), dtype=dtype, heads=4, kv_heads=2)
        for name in ("full", "causal", "packed", "dense", "middle", "left_padding")
    ]
    capped = trial.case(LAYOUTS["causal"](), dtype=dtype, heads=4, kv_heads=2, softcap=1.0)
    for case in [*cases, capped]:
        prepared = trial.prepare(case.layout, case.request(TRAIN))
        if prepared is None:
            continue
        try:
            results = run(prepared, case)
        except Exception as error:
            if must:
                raise
            trial.notes.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        _assert_close(results, run, case)
        trial.honoured += 1


def _assert_close(results: tuple[Tensor, ...], run: Transform, case: Case) -> None:
    def formulas(attend: Callable[..., tuple[Tensor, Tensor]]) -> Call:
        return lambda q, k, v: AttentionResult(*attend(q, k, v, case.visible, softcap=case.softcap))

    wide = case.to(torch.float64)
    exact, rounded = run(formulas(reference_attention), wide), run(formulas(plain_attention), case)
    for place, (got, want, near) in enumerate(zip(results, exact, rounded, strict=True)):
        worst = (got.double() - want).abs().max().item()
        lost = (near.double() - want).abs().max().item()
        allowed = 2 * lost + 64 * torch.finfo(case.q.dtype).eps * (1 + want.abs().max().item())
        require(
            worst <= allowed, f"result {place} of {run.__name__.strip('_')}: error {worst:.3g}, at most {allowed:.3g}"
        )
