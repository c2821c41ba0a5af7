"""flex_attention on CUDA: dtypes, gradients, fully masked rows, LSE, short queries, one kernel for every structure.

Each set of sizes is a kernel to compile (seconds), so the sizes are few.
"""

from __future__ import annotations

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout, StructuredMask, UnsupportedAttentionError, backends
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, TRAIN, TRAIN_LSE, evaluate, make_case
from polyattn_conformance.variants import poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
    # Dynamo looks at the gradient of every input and hides the warning that this gives, but not from an error filter.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LENGTH = 260
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "device": "cuda"}
STRUCTURED = {
    "full": lambda: MaskLayout.full(LENGTH),
    "causal": lambda: MaskLayout.causal(LENGTH),
    "causal_window": lambda: MaskLayout.causal(LENGTH, window=33),
    "full_window": lambda: MaskLayout(LENGTH, LENGTH, visibility=StructuredMask(window=70)),
    "packed": lambda: MaskLayout.packed([100, 1, 159]),
    "left_padding": lambda: MaskLayout.padded(lengths=[170], kv_len=LENGTH, side="left"),
    "prefix_lm": lambda: MaskLayout.prefix_lm([140], LENGTH),
    "chunked": lambda: MaskLayout.chunked(128, LENGTH),
    "inactive": lambda: MaskLayout.causal(LENGTH, active_queries=torch.arange(LENGTH)[None] % 3 > 0),
    "nothing": lambda: MaskLayout.padded(lengths=[0], kv_len=LENGTH),
}
OTHERS = {
    "dense_by_head": lambda: MaskLayout.dense(_random(1, 4, LENGTH, LENGTH)),
    "holes": lambda: MaskLayout.padded(_random(2, LENGTH)),
    "mask_mod": lambda: MaskLayout.from_mod(_every_third, q_len=LENGTH, kv_len=LENGTH),
}


def _random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.5


def _every_third(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx) % 3 == 0


@pytest.fixture
def flex():
    return backends.get("flex_attention")


@pytest.fixture
def kernels():
    """How many graphs the process has compiled."""
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _assert_right(backend, case, mode):
    prepared = backend.prepare(case.layout, case.request(mode))
    assert_within(evaluate(prepared, case, mode), expected_results(case, mode))
    return prepared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_all_gradients_in_every_dtype(flex, dtype):
    case = make_case(MaskLayout.causal(LENGTH, window=70), dtype=dtype, softcap=5.0, bias=(4, LENGTH, LENGTH), **SIZES)
    _assert_right(flex, case, TRAIN_LSE)
    _assert_right(flex, case, INFER)


def test_one_kernel_serves_every_structure_and_nothing_leaks_from_what_nobody_sees(flex, kernels):
    before = kernels()
    for build in STRUCTURED.values():
        _assert_right(flex, poisoned(make_case(build(), **SIZES), torch.nan), TRAIN_LSE)
    assert kernels() - before <= 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_and_their_gradients(flex, name):
    _assert_right(flex, poisoned(make_case(OTHERS[name](), **SIZES), torch.nan), TRAIN_LSE)


def test_sinks_and_their_gradients(flex):
    _assert_right(flex, make_case(MaskLayout.causal(LENGTH), sinks=True, **SIZES), TRAIN)


@pytest.mark.parametrize("queries", [1, 16, 127, 128, 129])
def test_short_queries_run_the_named_kernel(flex, queries):
    case = make_case(MaskLayout.causal(queries, LENGTH), **SIZES)
    prepared = _assert_right(flex, case, TRAIN_LSE)
    assert "kernel TRITON," in flex.describe(prepared)


def test_the_decode_kernel_runs_when_it_is_asked_for(flex):
    decode = flex.configure({"decode": True})
    prepared = _assert_right(decode, make_case(MaskLayout.causal(1, LENGTH), **SIZES), INFER)
    assert "kernel TRITON_DECODE," in decode.describe(prepared)
    (reason,) = decode.unsupported(MaskLayout.causal(LENGTH), prepared.request)
    assert str(reason) == (
        f"options: got decode with {LENGTH} queries, need fewer than 128 queries; leave decode out of backend_options"
    )


@pytest.mark.parametrize("widths", [(8, 8), (24, 48)], ids=["narrow", "unequal"])
def test_widths_that_the_kernel_does_not_take_are_padded(flex, widths):
    sizes = {**SIZES, "head_dim": widths[0], "v_head_dim": widths[1]}
    _assert_right(flex, make_case(MaskLayout.causal(LENGTH), **sizes), TRAIN_LSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_drowned_by_its_bias_is_live(flex, dtype):
    case = make_case(MaskLayout.causal(LENGTH), dtype=dtype, bias=(LENGTH,), **SIZES)
    bias = torch.zeros_like(case.bias)
    bias[:40] = torch.finfo(dtype).min
    _assert_right(flex, case.change(bias=bias), TRAIN_LSE)


def test_mask_and_bias_together_kill_a_row(flex):
    case = make_case(MaskLayout.causal(LENGTH), bias=(4, LENGTH, LENGTH), **SIZES)
    bias = case.bias.clone()
    bias[:, 5, :6] = -torch.inf
    _assert_right(flex, case.change(bias=bias), TRAIN_LSE)


def test_float64_is_refused(flex):
    case = make_case(MaskLayout.causal(8), dtype=torch.float64, **SIZES)
    with pytest.raises(UnsupportedAttentionError, match="float64: got float64, need float32, bfloat16 or float16"):
        flex.prepare(case.layout, case.request(INFER))


def test_attend_never_waits_for_the_device(flex):
    case = make_case(MaskLayout.packed([100, 160]), **SIZES)
    prepared = flex.prepare(case.layout, case.request(TRAIN_LSE))
    evaluate(prepared, case, TRAIN_LSE)  # compiles
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = prepared(*leaves)
        torch.autograd.grad([result.output, result.lse], leaves, [case.grad_output, case.grad_lse])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_trains_inside_a_compiled_graph_on_views_of_a_linear_layer(flex):
    torch.manual_seed(0)
    projection = torch.nn.Linear(32, 3 * 64, device="cuda")
    hidden = torch.randn(2, LENGTH, 32, device="cuda")

    def heads(hidden):
        return projection(hidden).unflatten(-1, (6, 32)).transpose(1, 2).chunk(3, 1)

    def loss(hidden, prepared):
        return prepared(*heads(hidden)).output.square().mean()

    request = AttentionRequest.of(*heads(hidden))
    for lengths in ([100, 160], [200, 60]):
        layout = MaskLayout.packed(lengths)
        grads = []
        for backend, call in (("eager", loss), ("flex_attention", torch.compile(loss, fullgraph=True))):
            value = call(hidden, backends.get(backend).prepare(layout, request))
            grads.append(torch.autograd.grad(value, projection.weight)[0])
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)
