"""The compiled CPU kernel of flex_attention.

A kernel takes seconds to compile, so a few serve all tests: sizes are the same wherever they can be.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyattn import AttentionRequest, MaskLayout, StructuredMask, UnsupportedAttentionError, attention, backends
from polyattn.testing import reference_attention
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, evaluate, make_case
from polyattn_conformance.variants import poisoned
from polyattn_flex import FlexBackend

_MISSING = FlexBackend().device_reasons(torch.device("cpu"))
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(bool(_MISSING), reason=f"nothing compiles here: {'; '.join(map(str, _MISSING))}"),
]

LENGTH = 260
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
_INDEX = torch.arange(LENGTH)
_RANDOM = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
_HOLES = torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7

STRUCTURED = {
    "full": lambda: MaskLayout.full(LENGTH),
    "causal": lambda: MaskLayout.causal(LENGTH),
    "causal_window": lambda: MaskLayout.causal(LENGTH, window=33),
    "full_window": lambda: MaskLayout(LENGTH, LENGTH, visibility=StructuredMask(window=70)),
    "packed": lambda: MaskLayout.packed([100, 1, 159]),
    "packed_both_ways": lambda: MaskLayout.packed([130, 130], causal=False),
    "left_padding": lambda: MaskLayout.padded(lengths=[170], kv_len=LENGTH, side="left"),
    "prefix_lm": lambda: MaskLayout.prefix_lm([140], LENGTH),
    "chunked": lambda: MaskLayout.chunked(128, LENGTH),
    "inactive": lambda: MaskLayout.causal(LENGTH, active_queries=_INDEX[None] % 3 > 0),
    "nothing": lambda: MaskLayout.padded(lengths=[0], kv_len=LENGTH),
}
DENSE = {
    "dense": lambda: MaskLayout.dense(
        _RANDOM & (torch.arange(LENGTH) % 7 > 0)[:, None] & (torch.arange(LENGTH) % 5 > 0)
    ),
    "holes": lambda: MaskLayout.padded(_HOLES),
    "mask_mod": lambda: MaskLayout.from_mod(lambda b, h, q, k: (k - q) % 3 == 0, q_len=LENGTH, kv_len=LENGTH),
}


@pytest.fixture
def kernels():
    """How many kernels the process has compiled."""
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _assert_right(case):
    """Right, with NaN wherever nobody may look."""
    case = poisoned(case, torch.nan)
    prepared = backends.get("flex_attention").prepare(case.layout, case.request(INFER))
    assert_within(evaluate(prepared, case, INFER), expected_results(case, INFER))


def test_one_kernel_serves_every_structure(kernels):
    before = kernels()
    for build in STRUCTURED.values():
        _assert_right(make_case(build(), **SIZES))
    assert kernels() - before <= 1


def _other(layout):
    return make_case(layout, dtype=torch.bfloat16, v_head_dim=7, softcap=3.0, bias=(LENGTH,), **SIZES)


def test_one_kernel_serves_every_other_mask(kernels):
    before = kernels()
    for build in DENSE.values():
        _assert_right(_other(build()))
    assert kernels() - before <= 1


def test_prepares_inside_a_compiled_graph():
    backend, case = backends.get("flex_attention"), _other(MaskLayout.causal(LENGTH, window=40))
    request = case.request(INFER)

    def call(q, k, v, bias, sinks):
        layout = MaskLayout.causal(LENGTH, window=40)  # without values to look at its structure is dense here
        return backend.prepare(layout, request)(q, k, v, bias=bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_within(evaluate(compiled, case, INFER), expected_results(case, INFER))


def test_runs_inside_a_compiled_graph_on_views_of_a_linear_layer():
    batch, heads, kv_heads, width = SIZES.values()
    torch.manual_seed(0)
    projection = nn.Linear(32, (heads + 2 * kv_heads) * width)
    hidden = torch.randn(batch, LENGTH, 32)
    layout = MaskLayout.packed([100, 160])

    def projected(hidden):
        return projection(hidden).unflatten(-1, (-1, width)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)

    def layer(hidden, prepared):
        return prepared(*projected(hidden)).output.transpose(1, 2).flatten(2) + 1

    with torch.no_grad():
        q, k, v = projected(hidden)
        prepared = backends.get("flex_attention").prepare(layout, AttentionRequest.of(q, k, v))
        got = torch.compile(layer, fullgraph=True)(hidden, prepared)
        want = reference_attention(q, k, v, layout.to_dense())[0].transpose(1, 2).flatten(2) + 1
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layout", [MaskLayout.full(1, 66), MaskLayout.padded(lengths=[20], kv_len=66, q_len=1)], ids=str
)
def test_one_query_over_a_static_cache(layout):
    q, k, v = (
        torch.randn(1, *size, 64, generator=torch.Generator().manual_seed(3)) for size in ((9, 1), (3, 66), (3, 66))
    )
    got = attention(q, k, v, layout, backend="flex_attention").output
    want, _ = reference_attention(q, k, v, layout.to_dense())
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_one_query_over_a_long_cache_survives_a_bias_that_blocks_part_of_it():
    # torch's own choice here, its decode kernel, returns zeros: a blocked part counts as a score of 0 beside -500.
    layout = MaskLayout.padded(lengths=[1024, 700], kv_len=1024, q_len=1)
    q, k, v = (torch.randn(2, 2, length, 16, generator=torch.Generator().manual_seed(3)) for length in (1, 1024, 1024))
    bias = torch.full((1024,), -500.0)
    bias[:128] = -torch.inf
    got = attention(q, k, v, layout, backend="flex_attention", bias=bias).output
    want, _ = reference_attention(q, k, v, layout.to_dense(), bias=bias)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_beyond_the_compile_limit_a_call_raises():
    _assert_right(make_case(MaskLayout.causal(LENGTH), **SIZES))
    backend = backends.get("flex_attention").configure({"compile_limit": 1})
    case = make_case(MaskLayout.causal(LENGTH + 1), **SIZES)
    prepared = backend.prepare(case.layout, case.request(INFER))
    text = (
        "options: got sizes that need another kernel, with compile_limit=1 reached, "
        "need at most 1 sets of sizes, dtypes, strides and constants in one process; "
        "set dynamic: true in backend_options, which compiles for all lengths at once, pad lengths to a few sizes, "
        "or raise compile_limit"
    )
    with pytest.raises(UnsupportedAttentionError, match=text):
        prepared(case.q, case.k, case.v)


def test_dynamic_serves_all_lengths_with_one_kernel(kernels):
    backend = backends.get("flex_attention").configure({"dynamic": True})
    before = kernels()
    for length in (130, 131, 257, 300):
        case = make_case(MaskLayout.causal(length, window=40), **SIZES)
        prepared = backend.prepare(case.layout, case.request(INFER))
        assert_within(evaluate(prepared, case, INFER), expected_results(case, INFER))
    assert kernels() - before == 1


def test_with_the_compiler_turned_off_a_call_raises():
    case = make_case(MaskLayout.causal(LENGTH), **SIZES)
    prepared = backends.get("flex_attention").prepare(case.layout, case.request(INFER))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="never runs uncompiled unasked"):
        prepared(case.q, case.k, case.v)


def test_strides_grad_mode_and_autocast_share_a_kernel(kernels):
    case = make_case(MaskLayout.causal(LENGTH), **SIZES)
    prepared = backends.get("flex_attention").prepare(case.layout, case.request(INFER))
    want = prepared(case.q, case.k, case.v).output
    before = kernels()
    wide = torch.stack([case.q, case.q], -1)[..., 0]
    with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        assert torch.equal(prepared(wide.requires_grad_(), case.k, case.v).output, want)
    assert kernels() == before


@pytest.mark.parametrize("width", [16])
def test_narrow_heads_are_right_where_eight_keys_are_left_over(width):
    """torch's own kernel gives other numbers there on a CPU without AVX-512."""
    backend = backends.resolve("flex_attention", {"dynamic": True})
    for keys in (24, 40):
        q, k = torch.randn(1, 2, 5, width), torch.randn(1, 2, keys, width)
        layout = MaskLayout.causal(5, keys)
        with torch.no_grad():
            found = attention(q, k, k, layout, backend=backend).output
        want, _ = reference_attention(q, k, k, layout.to_dense())
        torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)
