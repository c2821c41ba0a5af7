"""What is kept between calls: nothing of one call reaches another, and nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import os
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from polyattn import MaskLayout
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import GRADIENT, INFER, TRAIN, Case, evaluate
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import CheckFailed, require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.trial import Trial
from polyattn_conformance.variants import ARRANGEMENTS, rearranged

_NAMES = ("full", "causal", "causal_window", "packed", "dense", "right_padding", "inactive")


@check()
def reuse(trial: Trial) -> None:
    """What was prepared once serves every layer, whatever its strides, also when others are prepared in between."""
    cases = [trial.case(LAYOUTS[name](), heads=4, kv_heads=2) for name in trial.accepted(_NAMES)]
    cases += [trial.case(MaskLayout.packed(lengths)) for lengths in ([2, 6], [5, 3])]
    cases += [trial.case(MaskLayout.causal(8), scale=scale) for scale in (0.1, 1.0)]
    modes = [trial.strongest(case) for case in cases]
    prepared = [trial.must_prepare(case.layout, case.request(mode)) for case, mode in zip(cases, modes, strict=True)]
    in_memory = ARRANGEMENTS["sequence_first"], torch.Tensor.contiguous, ARRANGEMENTS["width_strided"]
    for flip, arrange in zip((1, -1, 0.5), in_memory, strict=True):
        for case, mode, call in zip(cases, modes, prepared, strict=True):
            layer = rearranged(case.change(q=case.q * flip, v=case.v * flip), itertools.repeat(arrange).__next__)
            assert_within(evaluate(call, layer, mode), expected_results(layer, mode))
            trial.honoured += 1


@check()
def backward_twice(trial: Trial) -> None:
    """A retained graph gives the same gradients again."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name]())
        prepared = trial.must_prepare(case.layout, case.request(TRAIN))
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        output = prepared(*leaves).output
        first, second = (torch.autograd.grad(output, leaves, case.grad_output, retain_graph=True) for _ in range(2))
        for leaf, one, two in zip("qkv", first, second, strict=True):
            require(torch.equal(one, two), f"gradient of {leaf}: the second backward differs")
        trial.honoured += 1


@check()
def inference_mode(trial: Trial) -> None:
    """What was prepared and used in inference mode leaves nothing behind that training could trip over."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name]())
        mode = trial.strongest(case)
        prepared = trial.must_prepare(case.layout, case.request(mode))
        with torch.inference_mode():
            prepared(case.q, case.k, case.v)
            trial.must_prepare(case.layout, case.request(INFER))(case.q, case.k, case.v)
        assert_within(evaluate(prepared, case, mode), expected_results(case, mode))
        trial.honoured += 1


@check()
def one_after_another(trial: Trial) -> None:
    """Layouts that come and go, each in the memory of the last one, are not taken for each other."""
    for seed in range(8):
        mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) < 0.5
        builders: list[Callable[[], MaskLayout]] = [
            functools.partial(MaskLayout.dense, mask),
            functools.partial(MaskLayout.padded, mask[:2]),
            functools.partial(MaskLayout.packed, [1 + seed % 5, 5 - seed % 5]),
            functools.partial(MaskLayout.causal, 6, window=1 + seed % 5),
        ]
        for build in builders:
            trial.compare_one(trial.case(build()), INFER)


@check()
def in_place(trial: Trial) -> None:
    """Tensors are read anew by each call, and a result is not touched by the next call.

    A tensor that changes between forward and backward gives the right gradient or torch's error, never a wrong one.
    """
    low = [trial.featured(MaskLayout.causal(5), dtype=torch.bfloat16)] if trial.declares("bfloat16") else []
    for case in [trial.featured(MaskLayout.causal(5)), trial.featured(MaskLayout.packed([2, 3])), *low]:
        if trial.prepare(case.layout, case.request(INFER)) is None:
            continue
        prepared = trial.must_prepare(case.layout, case.request(INFER))
        tensors = {name: x.clone() for name, x in case.tensors().items()}
        with torch.no_grad():
            for name, x in tensors.items():
                output = prepared(**tensors).output
                before = output.clone()
                x.data.mul_(-1.5)  # torch counts no version of it
                changed = case.change(**{other: y.clone() for other, y in tensors.items()})
                assert_within({"output": prepared(**tensors).output}, _outputs(changed))
                require(torch.equal(output, before), f"an earlier output changed when {name} did")
        if trial.prepare(case.layout, case.request(TRAIN)) is not None:
            for name in tensors:
                _assert_not_stale(trial, case, name)
        trial.honoured += 1


def _outputs(case: Case) -> dict[str, Any]:
    return {"output": expected_results(case, INFER)["output"]}


def _assert_not_stale(trial: Trial, case: Case, name: str) -> None:
    prepared = trial.must_prepare(case.layout, case.request(TRAIN))
    leaves = {other: x.clone().requires_grad_() for other, x in case.tensors().items()}
    output = prepared(**leaves).output
    with torch.no_grad():
        leaves[name].mul_(-1.5)
    try:
        gradients = torch.autograd.grad(output, list(leaves.values()), case.grad_output)
    except RuntimeError:
        return  # as torch does: one of the variables needed for the backward was modified
    expected = {key: value for key, value in expected_results(case, TRAIN).items() if key != "output"}
    try:
        assert_within({GRADIENT.format(k): g for k, g in zip(leaves, gradients, strict=True)}, expected)
    except AssertionError as error:
        raise CheckFailed(f"{name} changed after the forward, and the backward used the new values: {error}") from error


@check()
def interleaved(trial: Trial) -> None:
    """Several forwards, then their backwards, in either order: each knows its own tensors."""
    for name in trial.accepted(_NAMES):
        cases = [trial.case(LAYOUTS[name](), heads=4, kv_heads=2, seed=seed) for seed in range(3)]
        prepared = trial.must_prepare(cases[0].layout, cases[0].request(TRAIN))
        for order in (slice(None), slice(None, None, -1)):
            leaves = [[x.detach().requires_grad_() for x in (case.q, case.k, case.v)] for case in cases]
            outputs = [prepared(*three).output for three in leaves]
            for case, three, output in list(zip(cases, leaves, outputs, strict=True))[order]:
                gradients = torch.autograd.grad(output, three, case.grad_output)
                named = {GRADIENT.format(x): gradient for x, gradient in zip("qkv", gradients, strict=True)}
                assert_within({"output": output.detach(), **named}, expected_results(case, TRAIN))
        trial.honoured += 1


@check()
def threads(trial: Trial) -> None:
    """One prepared attention serves several threads at once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for name in trial.accepted(("causal", "packed", "dense")):
            cases = [trial.case(LAYOUTS[name](), heads=4, kv_heads=2, seed=seed) for seed in range(4)]
            mode = trial.strongest(cases[0])
            prepared = trial.must_prepare(cases[0].layout, cases[0].request(mode))
            expected = [expected_results(case, mode) for case in cases]

            def work(i: int) -> None:
                for _ in range(8):
                    assert_within(evaluate(prepared, cases[i], mode), expected[i])  # noqa: B023 - ends with the pool

            with ThreadPoolExecutor(len(cases)) as pool:
                list(pool.map(work, range(len(cases))))
            trial.honoured += 1
    finally:
        sys.setswitchinterval(interval)


@check({"of_keys_and_values": "kv", "of_all": "qkv"})
def one_tensor(trial: Trial, shared: str) -> None:
    """One tensor may be given as keys and values, or as all three; its gradient is the sum."""
    for name in trial.accepted(("full", "causal", "packed", "right_padding")):
        case = trial.case(LAYOUTS[name]())
        case = case.change(v=case.k, q=case.k if "q" in shared else case.q)
        prepared = trial.must_prepare(case.layout, case.request(TRAIN))
        leaf, query = case.k.detach().requires_grad_(), case.q.detach().requires_grad_()
        query = leaf if "q" in shared else query
        gradient = torch.autograd.grad(prepared(query, leaf, leaf).output, leaf, case.grad_output)[0]
        parts = [want for key, want in expected_results(case, TRAIN).items() if key[-1] in shared and "of" in key]
        error = (gradient.double() - torch.stack([want.value for want in parts]).sum(0)).abs()
        bound = torch.stack([want.bound for want in parts]).sum(0)
        bound = bound + torch.finfo(case.k.dtype).eps * torch.stack([want.value.abs() for want in parts]).sum(0)
        require((error <= bound).all(), f"the gradient of one tensor for {shared} is off by {error.max():.3g}")
        trial.honoured += 1


@check()
def prepared_for_training(trial: Trial) -> None:
    """What was prepared for gradients serves calls without: under ``no_grad``, and of tensors that want none."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2)
        prepared = trial.must_prepare(case.layout, case.request(TRAIN))
        assert_within(evaluate(prepared, case, INFER), _outputs(case))
        result = prepared(case.q, case.k, case.v)
        require(not result.output.requires_grad, "the output requires grad although no input does")
        assert_within(evaluate(prepared, case, TRAIN), expected_results(case, TRAIN))
        trial.honoured += 1


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of FP32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the flash kernel of torch": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "the memory-efficient kernel of torch": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "the plain kernel of torch": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "the anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "torch's random numbers": (
        lambda: torch.get_rng_state().tolist(),
        lambda x: torch.set_rng_state(torch.tensor(x, dtype=torch.uint8)),
    ),
    "Python's random numbers": (random.getstate, random.setstate),
    "the filters of warnings": (lambda: list(warnings.filters), lambda x: setattr(warnings, "filters", x)),
    "the environment": (lambda: dict(os.environ), os.environ.update),
}


#: Other values of settings on which nothing may depend.
_OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "the precision of FP32 products": lambda now: "high" if now == "highest" else "highest",
    "the flash kernel of torch": operator.not_,
    "the memory-efficient kernel of torch": operator.not_,
    "torch's random numbers": lambda now: [(x + 1) % 256 if i < 4 else x for i, x in enumerate(now)],
}


@contextlib.contextmanager
def _unchanged(*, otherwise: bool) -> Iterator[None]:
    """Nothing inside changes a setting, some of which have other values than before if ``otherwise``."""
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    now = dict(before)
    try:
        for name, other in _OTHERWISE.items() if otherwise else ():
            now[name] = other(before[name])
            _SETTINGS[name][1](now[name])
        yield
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != now[name]]
        require(not changed, f"prepare, attend or backward changed {', '.join(changed)}")
    finally:
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                write(before[name])


@check()
def no_trace(trial: Trial) -> None:
    """Settings and random numbers of torch and Python stay as they are."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2)
        for mode in dict.fromkeys((INFER, trial.strongest(case))):
            prepared = trial.must_prepare(case.layout, case.request(mode))
            evaluate(prepared, case, mode)  # what is loaded once may set up what it needs
            for otherwise in (False, True):
                with _unchanged(otherwise=otherwise):
                    evaluate(trial.must_prepare(case.layout, case.request(mode)), case, mode)
            trial.honoured += 1


@check()
def nothing_kept(trial: Trial) -> None:
    """No tensor of a call stays alive once its results are gone."""
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name]())
        for mode in dict.fromkeys((INFER, trial.strongest(case))):
            prepared = trial.must_prepare(case.layout, case.request(mode))
            tensors = {letter: x.clone().requires_grad_(mode.grad) for letter, x in case.tensors().items()}
            alive += [(letter, weakref.ref(x)) for letter, x in tensors.items()]
            prepared(**tensors)
            del tensors
            trial.honoured += 1
    gc.collect()
    kept = sorted({letter for letter, x in alive if x() is not None})
    require(not kept, f"{', '.join(kept)} of a call is still alive although its result is gone")
