"""eager, sdpa and fa on CUDA against the FP64 reference: right within the kit's bounds, or refused with reasons."""

from __future__ import annotations

import pytest
import torch

from polyattn import MaskLayout, StructuredMask, backends
from polyattn_conformance.case import INFER, TRAIN, TRAIN_LSE, make_case
from polyattn_conformance.checks.host_reads import forbid_host_reads
from polyattn_conformance.trial import Trial
from polyattn_conformance.variants import poisoned
from polyattn_fa2 import FlashBackend, FlashOptions

BACKENDS = {
    "eager": lambda: backends.get("eager"),
    "sdpa": lambda: backends.get("sdpa"),
    "flash_attn": lambda: FlashBackend(FlashOptions(provider="flash_attn")),
    "torch_varlen": lambda: FlashBackend(FlashOptions(provider="torch_varlen")),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTH = 200
LAYOUTS = {
    "full": lambda: MaskLayout.full(LENGTH),
    "causal": lambda: MaskLayout.causal(LENGTH),
    "causal_one_query": lambda: MaskLayout.causal(1, LENGTH),
    "causal_more_queries": lambda: MaskLayout.causal(LENGTH, 70),
    "causal_window": lambda: MaskLayout.causal(LENGTH, window=33),
    "full_window": lambda: MaskLayout(LENGTH, LENGTH, visibility=StructuredMask(window=40)),
    "full_window_more_queries": lambda: MaskLayout(LENGTH, 7, visibility=StructuredMask(window=40)),
    "packed": lambda: MaskLayout.packed([100, 1, 99]),
    "packed_window": lambda: MaskLayout.packed([100, 1, 99], window=20),
    "right_padding": lambda: MaskLayout.padded(lengths=[LENGTH, 131], kv_len=LENGTH),
    "right_padding_window": lambda: MaskLayout.padded(lengths=[LENGTH, 131, 90], kv_len=LENGTH, window=50),
    "left_padding": lambda: MaskLayout.padded(lengths=[LENGTH, 131], kv_len=LENGTH, side="left"),
    "holes": lambda: MaskLayout.padded(torch.arange(2 * LENGTH).view(2, LENGTH) % 7 > 2, causal=False),
    "prefix_lm": lambda: MaskLayout.prefix_lm([140], LENGTH),
    "chunked": lambda: MaskLayout.chunked(64, LENGTH),
    "inactive": lambda: MaskLayout.causal(LENGTH, active_queries=torch.arange(LENGTH)[None] % 3 > 0),
    "dense": lambda: MaskLayout.dense(torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) % 11 > 4),
}
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.fixture(params=BACKENDS)
def trial(request, device):
    trial = Trial(BACKENDS[request.param](), device)
    if trial.absent:
        pytest.skip(trial.absent)
    return trial


def assert_right(trial, *cases, modes=(INFER, TRAIN, TRAIN_LSE)):
    for case in cases:
        for mode in modes:
            trial.compare_one(case, mode)
    if not trial.honoured:
        pytest.skip("; ".join(dict.fromkeys(str(reason) for reasons in trial.refusals for reason in reasons)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_lse_and_every_gradient_are_right_and_nothing_leaks_from_what_nobody_sees(trial, device, name, dtype):
    case = make_case(LAYOUTS[name](), dtype=dtype, device=device, **SIZES)
    assert_right(trial, case, poisoned(case, torch.nan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_and_its_gradient_are_right(trial, device, dtype):
    shape = (4, LENGTH, LENGTH)
    assert_right(trial, make_case(MaskLayout.causal(LENGTH), dtype=dtype, device=device, bias=shape, **SIZES))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", [{"softcap": 5.0}, {"sinks": True}, {"scale": 0.1}], ids=lambda x: next(iter(x)))
def test_features_are_right(trial, device, feature, dtype):
    layouts = (MaskLayout.causal(LENGTH), MaskLayout.packed([100, 1, 99]))
    assert_right(trial, *(make_case(layout, dtype=dtype, device=device, **feature, **SIZES) for layout in layouts))


@pytest.mark.parametrize("widths", [(8, 8), (20, 12), (64, 128), (128, 128), (256, 240)])
def test_widths_are_right(trial, device, widths):
    sizes = {**SIZES, "head_dim": widths[0], "v_head_dim": widths[1], "dtype": torch.bfloat16, "device": device}
    assert_right(trial, make_case(MaskLayout.causal(LENGTH), **sizes), make_case(MaskLayout.packed([50, 90]), **sizes))


@pytest.mark.parametrize("name", ["full", "causal", "causal_window", "packed", "right_padding_window", "inactive"])
def test_attend_never_waits_for_the_device(trial, device, name):
    case = make_case(LAYOUTS[name](), dtype=torch.bfloat16, device=device, **SIZES)
    prepared = trial.prepare(case.layout, case.request(TRAIN))
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    torch.autograd.grad(prepared(*leaves).output, leaves, case.grad_output)  # what is made once is made here
    torch.cuda.synchronize(device)
    with forbid_host_reads("attend"):
        torch.autograd.grad(prepared(*leaves).output, leaves, case.grad_output)


@pytest.mark.parametrize("name", ["causal", "packed", "right_padding"])
def test_deterministic_algorithms_give_equal_bits(trial, device, name):
    case = make_case(LAYOUTS[name](), dtype=torch.bfloat16, device=device, **SIZES)
    torch.use_deterministic_algorithms(True)
    try:
        prepared = trial.prepare(case.layout, case.request(TRAIN))
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        one, other = (torch.autograd.grad(prepared(*leaves).output, leaves, case.grad_output) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["packed"])
def test_a_compiled_layer_gives_the_same_numbers(trial, device, name):
    case = make_case(LAYOUTS[name](), dtype=torch.bfloat16, device=device, **SIZES)
    prepared = trial.prepare(case.layout, case.request(TRAIN))
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    results = []
    for call in (prepared, torch.compile(prepared, fullgraph=True)):
        output = call(*leaves).output
        results.append([output, *torch.autograd.grad(output, leaves, case.grad_output)])
    torch.compiler.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=2e-2, atol=2e-2)
