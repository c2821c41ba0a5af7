"""Layers under BF16 autocast: FP32 weights, norms that promote, and kernels that take one dtype."""

import pytest
import torch

from decoder import NORM, config_of, rope_of
from fa_stand_in import stand_in
from polyattn import AttentionInputError, AttentionScope, MaskLayout, UnsupportedAttentionError

pytestmark = pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
BACKENDS = {"eager": {}, "sdpa": {}, "flex_attention": {"compiled": False}, "fa": {}}
POSITIONS = torch.arange(8)[None]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with stand_in("flash_attn") as calls:
        yield request.param, calls


def layer_of(backend, **changes):
    torch.manual_seed(0)
    config = config_of(backend, backend_options=BACKENDS[backend], groups=[], **changes)
    return config.layer(0).build()


def hidden_of(dtype=torch.float32):
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


class Promoting(torch.nn.Module):
    """A norm that hands back FP32 whatever it got, as many do."""

    def forward(self, x):
        return torch.nn.functional.normalize(x.float(), dim=-1)


def trained(layer):
    hidden = hidden_of().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden, AttentionScope(MaskLayout.packed([3, 5])), POSITIONS)
    output.float().square().sum().backward()
    return output, hidden


@pytest.mark.parametrize("norm", [NORM, {**NORM, "position": "after"}], ids=["before", "after"])
def test_fp32_norm_weights_train_on_every_backend(backend, norm):
    name, calls = backend
    layer = layer_of(name, qk_norm=norm)
    output, hidden = trained(layer)
    assert output.dtype is torch.bfloat16
    assert hidden.grad.dtype is torch.float32
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad.dtype is torch.float32
        assert torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.any(), parameter_name
    assert all(call[x].dtype is torch.bfloat16 for call in calls.forward for x in "qkv")
    assert len(calls.forward) == (name == "fa")


def test_a_norm_that_promotes_queries_and_keys_trains_on_every_backend(backend):
    name, calls = backend
    layer = layer_of(name)
    layer.q_norm, layer.k_norm = Promoting(), Promoting()
    output, _ = trained(layer)
    assert output.dtype is torch.bfloat16
    assert all(call[x].dtype is torch.bfloat16 for call in calls.forward for x in "qkv")
    assert len(calls.forward) == (name == "fa")


def test_without_autocast_it_is_refused_with_the_three_dtypes():
    layer = layer_of("sdpa").bfloat16()
    layer.q_norm, layer.k_norm = Promoting(), Promoting()
    with pytest.raises(AttentionInputError) as caught:
        layer(hidden_of(torch.bfloat16), AttentionScope(MaskLayout.causal(8)), POSITIONS)
    assert "got q torch.float32, k torch.float32, v torch.bfloat16" in str(caught.value)


def test_the_result_under_autocast_is_near_that_of_fp32(backend):
    name, _ = backend
    got, _ = trained(layer_of(name))
    want = layer_of("eager")(hidden_of(), AttentionScope(MaskLayout.packed([3, 5])), POSITIONS)
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.02)


def test_without_autocast_fp32_is_refused_by_fa_before_any_product_and_says_two_ways_out():
    layer = layer_of("fa")
    layer.q_proj.weight = None  # any matrix product would fail differently
    with stand_in("flash_attn"), pytest.raises(UnsupportedAttentionError) as caught:
        layer(hidden_of(), AttentionScope(MaskLayout.causal(8)), POSITIONS)
    text = str(caught.value)
    assert "float32" in text
    assert "cast q, k and v to bfloat16 or float16, or call under torch.autocast" in text


def test_fp64_stays_fp64_under_autocast():
    layer = layer_of("sdpa").double()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden_of(torch.float64), AttentionScope(MaskLayout.causal(8)), POSITIONS)
    assert output.dtype is torch.float64
    assert torch.equal(output, layer(hidden_of(torch.float64), AttentionScope(MaskLayout.causal(8)), POSITIONS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_of_another_dtype_are_refused_with_both(dtype):
    with pytest.raises(AttentionInputError, match=f"dtype of the projections, torch.float32, got {dtype}; cast"):
        layer_of("sdpa")(hidden_of(dtype), AttentionScope(MaskLayout.causal(8)), POSITIONS)


def test_a_layer_cast_to_bf16_runs_in_bf16_with_fp32_tables():
    layer = layer_of("sdpa", rope=rope_of()).bfloat16()
    scope = AttentionScope(MaskLayout.causal(8))
    assert layer(hidden_of(torch.bfloat16), scope, POSITIONS).dtype is torch.bfloat16
    assert scope.rotary(layer.rotary, POSITIONS).cos.dtype is torch.float32
    assert scope.builds == {"attention": 1, "rotary": 1}


def test_one_scope_serves_both_sides_of_an_autocast_region():
    layer, scope = layer_of("sdpa"), AttentionScope(MaskLayout.causal(8))
    want = layer(hidden_of(), scope, POSITIONS)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(hidden_of(), scope, POSITIONS).dtype is torch.bfloat16
    assert torch.equal(layer(hidden_of(), scope, POSITIONS), want)
    assert scope.builds == {"attention": 2, "rotary": 1}
