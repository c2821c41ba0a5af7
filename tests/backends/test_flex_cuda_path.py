"""What flex_attention does around the CUDA kernel, run on the CPU.

The compiler is replaced by one that evaluates the traced graph as it is, backward included. All before it is the code
that runs on a GPU: tables of blocks for both directions, the function of the mask, bias levels, padding, LSE.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from polyattn import MaskLayout
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import TRAIN, TRAIN_LSE, evaluate, make_case
from polyattn_conformance.variants import poisoned
from polyattn_flex import FlexBackend, _kernels, _reasons

# Dynamo looks at the gradient of every input and hides the warning that this gives, but not from an error filter.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LENGTH = 140
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture
def calls(monkeypatch):
    """What ``flex_attention`` is called with: the width of q, the kernel's name, whether the LSE is wanted."""
    seen = []

    def options(q, k, v, return_lse, kernel_options, return_aux=None):
        seen.append((q.shape[3], kernel_options["BACKEND"], return_aux is not None and return_aux.lse))
        return {**original(q, k, v, return_lse, kernel_options, return_aux), "OUTPUT_LOGSUMEXP": True}

    original = torch_flex._apply_kernel_options
    monkeypatch.setattr(torch_flex, "_apply_kernel_options", options)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    evaluating = {
        dynamic: torch.compile(_kernels._flex, dynamic=dynamic, fullgraph=True, backend="aot_eager")
        for dynamic in (False, True)
    }
    monkeypatch.setattr(_kernels, "_compiled_flex", evaluating.__getitem__)
    return seen


@pytest.fixture
def flex(calls, monkeypatch):
    for module in (_kernels, _reasons):
        monkeypatch.setattr(module, "on_cpu", lambda device: False)
    monkeypatch.setattr(_reasons, "_of_cuda", lambda device: ())
    return FlexBackend()


def _assert_right(backend, case, mode):
    reasons = backend.unsupported(case.layout, case.request(mode))
    if [reason.code for reason in reasons] == ["bias_grad_torch"]:
        pytest.skip(f"refused: {reasons[0]}")
    prepared = backend.prepare(case.layout, case.request(mode))
    assert_within(evaluate(prepared, case, mode), expected_results(case, mode))
    return prepared


def _near_or_even(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & ((q_idx - kv_idx < 5) | (kv_idx % 2 == 0))


def test_gradients_of_everything_together(flex):
    case = make_case(
        MaskLayout.causal(LENGTH, window=70), softcap=5.0, bias=(4, LENGTH, LENGTH), sinks=True, head_dim=16, **SIZES
    )
    _assert_right(flex, case, TRAIN_LSE)


def test_nothing_leaks_from_what_nobody_sees(flex):
    layout = MaskLayout.padded(lengths=[100, 130], kv_len=LENGTH, side="left")
    _assert_right(flex, poisoned(make_case(layout, head_dim=16, **SIZES), torch.nan), TRAIN_LSE)


def test_a_mask_mod_is_handed_to_the_kernel_and_not_made_dense(flex):
    layout = MaskLayout.from_mod(_near_or_even, q_len=LENGTH, kv_len=LENGTH)
    prepared = _assert_right(flex, make_case(layout, head_dim=16, **SIZES), TRAIN_LSE)
    assert prepared.state.dense is prepared.state.ranges is None


def test_prepares_and_trains_inside_a_compiled_graph(flex):
    case = make_case(MaskLayout.causal(LENGTH, window=40), head_dim=16, **SIZES)
    request = case.request(TRAIN)

    def call(q, k, v, bias, sinks):
        return flex.prepare(MaskLayout.causal(LENGTH, window=40), request)(q, k, v)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_within(evaluate(compiled, case, TRAIN), expected_results(case, TRAIN))


def test_narrow_heads_are_padded_to_what_the_kernel_takes_and_the_kernel_is_named(flex, calls):
    _assert_right(flex, make_case(MaskLayout.causal(LENGTH), head_dim=7, v_head_dim=5, **SIZES), TRAIN)
    assert calls == [(16, "TRITON", False)]


@pytest.mark.parametrize("queries", [1, 127])
def test_short_queries_keep_the_kernel(flex, calls, queries):
    _assert_right(flex, make_case(MaskLayout.causal(queries, LENGTH), head_dim=16, **SIZES), TRAIN_LSE)
    assert calls == [(16, "TRITON", True)]


def test_the_decode_kernel_is_an_explicit_choice(flex, calls):
    decode = flex.configure({"decode": True, "kernel_options": {"num_warps": 4}})
    _assert_right(decode, make_case(MaskLayout.causal(1, LENGTH), head_dim=16, **SIZES), TRAIN)
    assert calls == [(16, "TRITON_DECODE", False)]


def test_rows_drowned_by_their_bias_are_live(flex):
    case = make_case(MaskLayout.causal(LENGTH), bias=(LENGTH,), head_dim=16, **SIZES)
    bias = torch.zeros_like(case.bias)
    bias[:40] = torch.finfo(torch.float32).min
    _assert_right(flex, case.change(bias=bias), TRAIN_LSE)


def test_mask_and_bias_together_kill_a_row(flex):
    case = make_case(MaskLayout.causal(LENGTH), bias=(LENGTH, LENGTH), head_dim=16, **SIZES)
    bias = case.bias.clone()
    bias[5, :6] = -torch.inf
    _assert_right(flex, case.change(bias=bias), TRAIN_LSE)


def test_dynamic_trains_on_ragged_lengths_with_two_kernels(flex, calls):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dynamic = flex.configure({"dynamic": True})
    for length in (140, 141, 257, 300):
        layout = MaskLayout.packed([100, length - 100])
        calls.clear()  # which the compiler guards on
        _assert_right(dynamic, make_case(layout, head_dim=16, **SIZES), TRAIN_LSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_bias_gradient_is_refused_with_a_torch_that_may_lose_it(flex, monkeypatch):
    case = make_case(MaskLayout.causal(LENGTH), bias=(LENGTH,), head_dim=16, **SIZES)
    monkeypatch.setattr(_reasons, "_OLD_TORCH", None)
    assert flex.unsupported(case.layout, case.request(TRAIN)) == ()
    monkeypatch.setattr(_reasons, "_OLD_TORCH", "2.13.1")
    (reason,) = flex.unsupported(case.layout, case.request(TRAIN))
    assert str(reason) == (
        "bias_grad: got the gradient of a bias with torch 2.13.1, whose compiled kernel may give zeros for it, "
        "need torch 2.14 or newer; the backend 'eager' is exact"
    )
    assert flex.unsupported(case.layout, case.change(leaves=("q", "k", "v")).request(TRAIN)) == ()
