"""flex_attention without compiling: refusals, options, and the form without a compiler."""

from __future__ import annotations

import dataclasses
import pickle
import warnings

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from polyattn import (
    AttentionRequest,
    AttentionScope,
    ConfigError,
    MaskLayout,
    UnsupportedAttentionError,
    attention,
    backends,
    explain,
)
from polyattn.testing import reference_attention
from polyattn_flex import FlexBackend, FlexOptions, _backend, _kernels, _ops, _reasons

_UNCOMPILED = "backend_options {compiled: false} runs it uncompiled, slowly and in memory quadratic in the length"

_LOOK_FOR_COMPILER = _reasons._of_cpu.__wrapped__
pytestmark = pytest.mark.usefixtures("any_compiler")


@pytest.fixture
def uncompiled():
    return FlexBackend().configure({"compiled": False})


@pytest.fixture
def quiet():
    """The warning about running uncompiled is given once in a process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "backend 'flex_attention' with compiled=False")
        yield


@pytest.fixture
def no_kernel(monkeypatch):
    def called(*args, **kwargs):
        raise AssertionError("something was computed")

    for module, name in ((_kernels, "compiled"), (_kernels, "evaluated"), (_ops, "infer")):
        monkeypatch.setattr(module, name, called)


def _request(**changes):
    base = AttentionRequest(
        batch=1,
        heads=2,
        kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return dataclasses.replace(base, **changes)


def _qkv(length=8, *, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 8, generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)]


_LACKS = "which 'flex_attention' does not have"
_INFERENCE_ONLY = f"{_LACKS}; use a CUDA device, since the compiled CPU kernel is inference only; or {_UNCOMPILED}"
_NO_LSE = f"{_LACKS}; use a CUDA device, since the compiled CPU kernel returns no LSE"
_FOR_SINKS = f"{_NO_LSE}, which sinks are applied with; or {_UNCOMPILED}"
REFUSALS = {
    "training": (
        {"needs_grad": True},
        f"grad: got needs_grad=True, need a backend with the ability 'grad', {_INFERENCE_ONLY}",
    ),
    "lse": (
        {"needs_lse": True},
        f"lse: got needs_lse=True, need a backend with the ability 'lse', {_NO_LSE}; or {_UNCOMPILED}",
    ),
    "lse_gradient": (
        {"needs_lse": True, "needs_lse_grad": True},
        f"lse_grad: got needs_lse_grad=True, need a backend with the ability 'lse_grad', {_INFERENCE_ONLY}",
    ),
    "sinks": (
        {"has_sinks": True},
        f"sinks: got sink logits, need a backend with the ability 'sinks', {_FOR_SINKS}",
    ),
    "bias_gradient": (
        {"has_bias": True, "needs_bias_grad": True},
        f"bias_grad: got a bias that requires grad, need a backend with the ability 'bias_grad', {_INFERENCE_ONLY}",
    ),
    "dtype": (
        {"dtype": torch.float64},
        (
            f"float64: got float64, need a backend with the ability 'float64', {_LACKS}; cast q, k and v to float32, "
            f"bfloat16 or float16; or {_UNCOMPILED}"
        ),
    ),
    "dropout": (
        {"dropout_p": 0.1, "training": True},
        f"dropout: got dropout_p 0.1 in training, need a backend with the ability 'dropout', {_LACKS}",
    ),
    "device": (
        {"device": torch.device("meta")},
        "device: got meta, need a CPU or a CUDA device; move q, k and v there",
    ),
}


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_compiled_cpu_kernel_cannot_do_is_refused_by_reason(name):
    changes, text = REFUSALS[name]
    with pytest.raises(UnsupportedAttentionError) as refusal:
        backends.get("flex_attention").prepare(MaskLayout.causal(8), _request(**changes))
    assert text in [str(reason) for reason in refusal.value.reasons]


@pytest.mark.usefixtures("no_kernel")
def test_training_on_the_cpu_names_the_backends_that_can():
    q, k, v = _qkv(grad=True)
    backends.get("eager")  # only what is loaded is asked
    with pytest.raises(UnsupportedAttentionError, match=r"installed backends that can: .*eager") as refusal:
        attention(q, k, v, MaskLayout.causal(8), backend="flex_attention", return_lse=True)
    assert {reason.feature for reason in refusal.value.reasons} == {"grad", "lse", "lse_grad"}


def test_explain_says_that_an_option_runs_it_uncompiled():
    decision = explain(MaskLayout.causal(8), _request(needs_grad=True))
    assert decision.chosen != "flex_attention"
    assert _UNCOMPILED in str(decision)


def test_a_missing_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_reasons, "_of_cpu", _LOOK_FOR_COMPILER)
    (reason,) = backends.get("flex_attention").unsupported(MaskLayout.causal(8), _request())
    assert (reason.code, reason.feature) == ("no_compiler", "kernel")
    assert str(reason) == (
        "kernel: got no no-such-compiler on the path, need the C++ compiler that torch.compile uses; "
        f"install g++ or set CXX; or {_UNCOMPILED}"
    )


def test_options_of_the_cuda_kernels_are_refused_on_the_cpu():
    backend = FlexBackend().configure({"decode": True, "kernel_options": {"num_warps": 4}})
    (reason,) = backend.unsupported(MaskLayout.causal(8), _request())
    assert str(reason) == (
        "options: got decode and kernel_options on cpu, need a CUDA device, whose kernels they choose; "
        "leave them out of backend_options"
    )


@pytest.mark.parametrize(
    "options, text",
    [
        ({"compile": False}, r"unknown option 'compile'; the options are compiled: bool, decode: bool"),
        ({"compiled": "no"}, "option 'compiled' must be bool, got 'no'"),
        ({"compile_limit": 0}, "compile_limit must be at least 1, got 0"),
        ({"kernel_options": {"BACKEND": "AUTO"}}, "kernel_options must be among .*, got BACKEND"),
        (
            {"kernel_options": {"ROWS_GUARANTEED_SAFE": True}},
            "kernel_options must be among .*, got ROWS_GUARANTEED_SAFE",
        ),
        ({"kernel_options": {"num_warps": "4"}}, "kernel_options must be integers or booleans, got num_warps='4'"),
        (
            {"compiled": False, "decode": True},
            "decode, dynamic and kernel_options are about a compiled kernel, got compiled=False; leave them out",
        ),
        ({"compiled": False, "dynamic": True}, "decode, dynamic and kernel_options are about a compiled kernel"),
    ],
)
def test_a_wrong_option_is_an_error(options, text):
    with pytest.raises(ConfigError, match=text):
        FlexBackend().configure(options)


def test_a_configured_backend_is_a_value():
    options = {"kernel_options": {"fwd_BLOCK_M": 64}, "compile_limit": 3}
    backend = FlexBackend().configure(options)
    assert backend == FlexBackend(FlexOptions(**options)) != FlexBackend()
    assert hash(backend) == hash(FlexBackend().configure(options))
    assert pickle.loads(pickle.dumps(backend)) == backend


def test_auto_does_not_start_a_compiler_for_what_others_do():
    assert explain(MaskLayout.causal(8), _request()).chosen != "flex_attention"


def test_tensor_holders_are_equal_only_to_themselves():
    layout = MaskLayout.causal(8)
    one, two = (backends.get("flex_attention").prepare(layout, _request()).state for _ in range(2))
    assert one != two
    assert one.blocks != two.blocks


def test_twelve_layers_share_one_block_mask():
    scope = AttentionScope(MaskLayout.causal(8))
    states = {id(scope.prepare(backends.get("flex_attention"), _request()).state) for _ in range(12)}
    assert len(states) == 1
    assert scope.builds["attention"] == 1


@pytest.mark.usefixtures("no_kernel")
def test_a_block_mask_does_not_serve_other_lengths():
    prepared = backends.get("flex_attention").prepare(MaskLayout.causal(32), _request())
    with pytest.raises(ValueError, match=r"prepared for shape \(1, 2, 32, 8\), got \(1, 2, 16, 8\)"):
        prepared(*_qkv(16))


@pytest.mark.usefixtures("no_kernel")
def test_empty_sizes_are_answered_before_any_kernel():
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 0, 8)
    result = attention(q, k, k, MaskLayout.full(3, 0), backend="flex_attention")
    assert torch.equal(result.output, torch.zeros(2, 2, 3, 8))


@pytest.mark.usefixtures("quiet")
def test_the_uncompiled_form_says_so(uncompiled):
    prepared = uncompiled.prepare(MaskLayout.causal(8), _request(needs_grad=True, needs_lse=True))
    assert uncompiled.describe(prepared) == "uncompiled (option compiled=False): evaluated densely, quadratic memory"
    compiled = backends.get("flex_attention").prepare(MaskLayout.causal(300, window=100), _request())
    assert compiled.backend.describe(compiled) == (
        "compiled flex_attention, kernel CPU, 0 full and 5 partial tiles of 128 x 128"
    )


def test_the_uncompiled_form_warns_once(uncompiled):
    _backend._warn_uncompiled.cache_clear()
    with pytest.warns(UserWarning, match="evaluates attention densely, in memory quadratic in the length"):
        uncompiled.prepare(MaskLayout.causal(4), _request())
    uncompiled.prepare(MaskLayout.causal(5), _request())  # a second warning would be an error


def test_the_uncompiled_form_is_prepared_inside_a_compiled_function(uncompiled):
    q, k, v = _qkv(9)

    def output(q, layout):
        return attention(q, k, v, layout, backend=uncompiled).output

    layout = MaskLayout.packed([4, 5], window=3)
    compiled = torch.compile(output, backend="eager", fullgraph=True)(q, layout)
    torch.testing.assert_close(compiled, attention(q, k, v, layout, backend="eager").output)


@pytest.mark.usefixtures("quiet")
def test_the_uncompiled_form_is_what_flex_attention_computes_without_a_compiler(uncompiled):
    q, k, v = _qkv(9)
    block_mask = torch_flex.create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), 1, 1, 9, 9, device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        want, aux = torch_flex.flex_attention(
            q,
            k,
            v,
            score_mod=lambda score, b, h, i, j: 2 * torch.tanh(score / 2),
            block_mask=block_mask,
            return_aux=torch_flex.AuxRequest(lse=True),
        )
    got = attention(q, k, v, MaskLayout.causal(9, window=4), backend=uncompiled, softcap=2.0, return_lse=True)
    assert torch.equal(got.output, want)
    assert torch.equal(got.lse, aux.lse)


@pytest.mark.usefixtures("quiet")
def test_a_row_drowned_by_its_bias_is_live_beside_masked_keys_without_bias(uncompiled):
    q, k, v = _qkv(6, grad=True)
    bias = torch.zeros(6)
    bias[:3] = torch.finfo(torch.float32).min  # the first three rows see nothing else
    layout = MaskLayout.causal(6)
    result = attention(q, k, v, layout, backend=uncompiled, bias=bias, return_lse=True)
    incoming = torch.ones_like(result.output), torch.ones_like(result.lse)
    gradients = torch.autograd.grad([result.output, result.lse], [q, k, v], incoming)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = reference_attention(*leaves, layout.to_dense(), bias=bias)
    wanted = torch.autograd.grad(want, leaves, [x.double() for x in incoming])
    torch.testing.assert_close([*gradients], [x.float() for x in wanted], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.lse, want[1].float())


def test_loading_the_backend_imports_neither_flex_attention_nor_a_compiler(run_python):
    code = (
        "import sys, polyattn; polyattn.backends.get('flex_attention')\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'torch.nn.attention.flex_attention') "
        "if name in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_plans_hold_tensors_and_nothing_else():
    for layout in (MaskLayout.causal(8), MaskLayout.dense(torch.ones(8, 8).tril().bool())):
        state = backends.get("flex_attention").prepare(layout, _request()).state
        held = [*vars(state).values(), *vars(state.blocks).values(), *(state.ranges or ())]
        assert all(x is None or isinstance(x, (Tensor, tuple, _backend.Blocks)) for x in held)
