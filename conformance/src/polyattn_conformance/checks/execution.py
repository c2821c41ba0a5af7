"""How attention is run: autocast, meta tensors, compilation, checkpointing, reuse, no waiting for values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from polyattn import AttentionRequest, AttentionResult, MaskLayout, UnsupportedAttentionError, attention
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, TRAIN, Case, Mode, evaluate
from polyattn_conformance.checks.host_reads import forbid_host_reads
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.trial import LeftOut, Trial, raised

_NAMES = ("full", "causal", "causal_window", "packed", "dense", "right_padding", "inactive")


@contextlib.contextmanager
def _autocast(kind: str | None) -> Iterator[None]:
    if kind is None:
        yield
        return
    with warnings.catch_warnings():
        # A machine without CUDA says that its autocast does nothing, which is what is wanted there.
        warnings.filterwarnings("ignore", ".*(CUDA is not available|device_type of 'cuda')")
        context = torch.autocast(kind, dtype=torch.bfloat16)
    with context:
        yield


@check({"float32": (torch.float32,) * 3, "mixed": (torch.float32, torch.float32, torch.bfloat16)})
def autocast(trial: Trial, dtypes: tuple[torch.dtype, ...]) -> None:
    """Under autocast q, k and v are cast first: the output is in the autocast dtype, gradients come back in theirs."""
    if not torch.amp.is_autocast_available(trial.device.type):
        raise LeftOut(f"there is no autocast on {trial.device.type}")
    lows = [trial.case(LAYOUTS[name](), dtype=torch.bfloat16) for name in trial.accepted(_NAMES)]
    featured = trial.featured(MaskLayout.causal(6), dtype=torch.bfloat16)
    for low in (*lows, featured.change(**{name: x.float() for name, x in featured.extras().items()})):
        given = dict(zip("qkv", dtypes, strict=True))
        case = low.change(**{letter: getattr(low, letter).to(dtype) for letter, dtype in given.items()})
        mode = trial.strongest(low)
        with _autocast(trial.device.type):
            prepared = trial.must_prepare(case.layout, case.request(mode))
            results = evaluate(prepared, case, mode)
        for letter, dtype in given.items():
            gradient = results.get(f"gradient of {letter}")
            if gradient is not None:
                require(gradient.dtype is dtype, f"gradient of {letter}: {gradient.dtype}, need {dtype}")
                results[f"gradient of {letter}"] = gradient.to(torch.bfloat16)
        assert_within(results, expected_results(low, mode))
        trial.honoured += 1


@check()
def autocast_float64(trial: Trial) -> None:
    """FP64 stays FP64 under autocast, as torch leaves it."""
    if not torch.amp.is_autocast_available(trial.device.type):
        raise LeftOut(f"there is no autocast on {trial.device.type}")
    for name in _NAMES:
        case = trial.case(LAYOUTS[name](), dtype=torch.float64)
        with _autocast(trial.device.type):
            trial.compare(case)


@check(
    {
        f"{device}{f'-{autocast}_autocast' if autocast else ''}": (device, autocast)
        for device in ("meta", "cpu")
        for autocast in (None, "cpu", "cuda")
    },
    without_kernel=True,
)
def other_device(trial: Trial, where: tuple[str, str | None]) -> None:
    """FP32 tensors on meta and on the CPU run, or are refused by the backend's name, inside and outside autocast."""
    device, autocast = where
    for layout in (MaskLayout.causal(4), MaskLayout.full(4, 6)):
        q = torch.zeros(2, 4, layout.q_len, 8, device=device)
        k = torch.zeros(2, 2, layout.kv_len, 8, device=device)
        with _autocast(autocast):
            dtype = AttentionRequest.of(q, k, k).dtype
            results: list[AttentionResult] = []
            refusal = raised(
                UnsupportedAttentionError,
                lambda: results.append(attention(q, k, k, layout, backend=trial.backend)),  # noqa: B023 - called here
            )
        if refusal is not None:
            require(trial.backend.name in str(refusal), f"the refusal must name the backend: {refusal}")
            trial.refusals.append(refusal.reasons)
            continue
        result = results[0]
        got = (result.output.shape, result.output.dtype, result.output.device)
        require(got == (q.shape, dtype, q.device), f"output is {got}, need {(q.shape, dtype, q.device)}")
        trial.honoured += 1


class _Counter:
    """A compiler that counts the graphs it is given and runs them as they are, backward included."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # noqa: SLF001 - torch names it so


@contextlib.contextmanager
def compiled_call() -> Iterator[tuple[Any, _Counter]]:
    """A compiled call of what was prepared, and the count of its graphs."""

    def call(prepared: Any, *tensors: Tensor, **named: Tensor | None) -> tuple[Tensor, Tensor | None]:
        result = prepared(*tensors, **named)
        return result.output, result.lse

    counter = _Counter()
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    try:
        yield compiled, counter
    finally:
        torch.compiler.reset()


def _run_compiled(compiled: Any, trial: Trial, case: Case, mode: Mode, *, grad_mode: bool) -> None:
    prepared = trial.must_prepare(case.layout, case.request(mode))

    def call(*tensors: Tensor, **named: Tensor | None) -> AttentionResult:
        with torch.set_grad_enabled(grad_mode):
            return AttentionResult(*compiled(prepared, *tensors, **named))

    assert_within(evaluate(call, case, mode), expected_results(case, mode))
    trial.honoured += 1


def _compile_each_way(trial: Trial, case: Case) -> None:
    """Training if the backend trains, and inference: a compiler traces an autograd function in two different ways."""
    strongest = trial.strongest(case)
    for mode, grad_mode in ((strongest, strongest.grad), (INFER, False), (INFER, True)):
        with compiled_call() as (call, _):
            _run_compiled(call, trial, case, mode, grad_mode=grad_mode)


@check(("full", "causal", "causal_window", "packed", "dense", "right_padding"))
def compiled(trial: Trial, name: str) -> None:
    """``attend`` traces under ``torch.compile(fullgraph=True)`` with the same numbers, in training and in inference."""
    _compile_each_way(trial, trial.case(LAYOUTS[name](), heads=4, kv_heads=2))


@check()
def compiled_features(trial: Trial) -> None:
    """Scale, softcap, bias and sinks count in a compiled function as well, in training and in inference."""
    _compile_each_way(trial, trial.featured(MaskLayout.causal(6), heads=4, kv_heads=2, scale=0.6))


@check()
def recompiles(trial: Trial) -> None:
    """Eight batches whose documents differ in number and length need at most two graphs."""
    batches = ([12], [3, 9], [4, 4, 4], [1, 11], [5, 2, 5], [6, 6], [2, 2, 2, 6], [1, 1, 1, 1, 8])
    mode = trial.strongest(trial.case(MaskLayout.packed([5, 7])))
    with compiled_call() as (call, counter):
        for seed, lengths in enumerate(batches):
            case = trial.case(MaskLayout.packed(lengths), seed=seed)
            _run_compiled(call, trial, case, mode, grad_mode=mode.grad)
        require(counter.graphs <= 2, f"eight batches needed {counter.graphs} graphs")


@check({"reentrant": True, "not_reentrant": False})
def checkpointing(trial: Trial, reentrant: bool) -> None:
    """Activation checkpointing gives the same output and gradients."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2)
        prepared = trial.must_prepare(case.layout, case.request(TRAIN))

        def call(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> AttentionResult:
            def run(*tensors: Tensor) -> Tensor:
                return prepared(*tensors).output  # noqa: B023 - called before the loop goes on

            return AttentionResult(torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=reentrant))

        if reentrant:
            _backward(call, case)
        else:
            assert_within(evaluate(call, case, TRAIN), expected_results(case, TRAIN))
        trial.honoured += 1


def _backward(call: Any, case: Case) -> None:
    """Reentrant checkpointing knows only ``backward``, not ``autograd.grad``."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    output = call(**leaves).output
    output.backward(case.grad_output)
    results = {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}
    assert_within({"output": output.detach(), **results}, expected_results(case, TRAIN))


@check()
def deterministic(trial: Trial) -> None:
    """Under deterministic algorithms two runs are equal to the bit."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        cases = [trial.case(LAYOUTS[name](), heads=4, kv_heads=2) for name in trial.accepted(_NAMES)]
        # Sums over many keys, queries and heads, which a kernel splits among workers.
        cases += [trial.case(MaskLayout.full(q_len, kv_len), batch=1) for q_len, kv_len in ((2, 1100), (1100, 2))]
        cases += [trial.case(MaskLayout.causal(8), batch=1, heads=16, kv_heads=1)]
        for case in cases:
            mode = trial.strongest(case)
            prepared = trial.must_prepare(case.layout, case.request(mode))
            first, *others = (evaluate(prepared, case, mode) for _ in range(4))
            assert_within(first, expected_results(case, mode))
            for result, value in first.items():
                same = all(torch.equal(value, other[result]) for other in others)
                require(same, f"{result} of {case}: two runs differ")
            trial.honoured += 1
    finally:
        torch.use_deterministic_algorithms(before)


@check()
def no_waiting(trial: Trial) -> None:
    """``attend`` never waits for a value of a tensor, neither forward nor backward."""
    for name in trial.accepted(_NAMES):
        case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2)
        mode = trial.strongest(case)
        prepared = trial.must_prepare(case.layout, case.request(mode))
        leaves = [x.detach().requires_grad_(mode.grad) for x in (case.q, case.k, case.v)]
        with forbid_host_reads("attend"), torch.set_grad_enabled(mode.grad):
            output = prepared(*leaves).output
            if mode.grad:
                torch.autograd.grad(output, leaves, case.grad_output)
        trial.honoured += 1
