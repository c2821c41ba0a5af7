"""Fused and separate projections, head counts, and what each head reads."""

import dataclasses

import pytest
import torch

from polyattn import AttentionScope, ConfigError, GroupedQueryAttention, MaskLayout, QKNorm, RopeSpec

NORM = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
ROPE = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=None,
    parameters={},
)
POSITIONS = torch.arange(6)[None]


def layer(**options):
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ROPE, "backend": "eager"}
    return GroupedQueryAttention(**{**fields, **options})


def hidden_of(length=6, seed=1, batch=2):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed))


def causal(length=6):
    return AttentionScope(MaskLayout.causal(length))


def results(module, context):
    """Output and gradients of the hidden states, with or without context keys."""
    hidden, other = hidden_of().requires_grad_(), hidden_of(3, seed=2).requires_grad_()
    if context:
        scope = AttentionScope(MaskLayout.causal(6, 9))
        output = module(hidden, scope, POSITIONS + 3, other, kv_positions=torch.arange(3)[None])
        return [output, *torch.autograd.grad(output.sin().sum(), (hidden, other))]
    output = module(hidden, causal(), POSITIONS)
    return [output, *torch.autograd.grad(output.sin().sum(), hidden)]


@pytest.mark.parametrize("options", [{}, {"bias": True, "v_head_dim": 5, "qk_norm": NORM}], ids=["plain", "all"])
@pytest.mark.parametrize("context", [False, True])
def test_one_matrix_gives_the_numbers_of_three(options, context):
    separate, fused = layer(**options), layer(**options, fused_qkv=True)
    assert set(fused.state_dict()) ^ set(separate.state_dict()) >= {"qkv_proj.weight", "q_proj.weight"}
    fused.load_state_dict(separate.state_dict())
    for got, want in zip(results(fused, context), results(separate, context), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_state_dict_of_either_form_loads_into_either():
    separate, fused = layer(bias=True), layer(bias=True, fused_qkv=True)
    state = fused.state_dict()
    separate.load_state_dict(state)
    assert set(state) == set(fused.state_dict())  # the caller's dictionary stays as it was
    again = layer(bias=True, fused_qkv=True)
    again.load_state_dict(separate.state_dict())
    for name, value in fused.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_within_a_larger_model_too():
    model = torch.nn.ModuleList([layer(), layer(fused_qkv=True)])
    model.load_state_dict(torch.nn.ModuleList([layer(fused_qkv=True), layer()]).state_dict())


def test_a_projection_of_the_wrong_size_is_told_by_torch():
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight"):
        layer().load_state_dict({**layer(fused_qkv=True).state_dict(), "qkv_proj.weight": torch.zeros(3, 32)})
    with pytest.raises(RuntimeError, match=r"size mismatch for qkv_proj\.weight"):
        layer(fused_qkv=True).load_state_dict({**layer().state_dict(), "v_proj.weight": torch.zeros(3, 32)})


def test_an_adapter_in_the_place_of_the_fused_matrix_is_called_for_context_keys_too():
    class Adapter(torch.nn.Module):
        """What fine-tuning puts around a matrix."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    adapted, doubled = layer(fused_qkv=True), layer(fused_qkv=True)
    with torch.no_grad():
        doubled.qkv_proj.weight.mul_(2)
    adapted.qkv_proj = Adapter(adapted.qkv_proj)
    for got, want in zip(results(adapted, context=True), results(doubled, context=True), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_query_head_reads_the_kv_head_of_its_group(backend, fused):
    module = layer(backend=backend, fused_qkv=fused, rope=None)
    with torch.no_grad():
        values = module.qkv_proj.weight[48:] if fused else module.v_proj.weight
        values.zero_()
        values[8:, 0] = 1.0  # values of KV head 1 are 1, of KV head 0 are 0
        module.o_proj.weight.copy_(torch.eye(32))
    hidden = hidden_of(3, batch=1)
    hidden[..., 0] = 1.0
    heads = module(hidden, causal(3), None).unflatten(-1, (4, 8))
    torch.testing.assert_close(heads[0, 0, :, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (2, 4)])
def test_heads_that_do_not_divide_are_refused_with_both_counts(heads, kv_heads):
    with pytest.raises(ConfigError, match=f"got num_heads={heads} and num_kv_heads={kv_heads}"):
        layer(num_heads=heads, num_kv_heads=kv_heads)


def test_values_of_another_width_go_through_the_output_projection():
    module = layer(v_head_dim=16, backend="sdpa")
    assert module.v_proj.weight.shape == (32, 32)
    assert module.o_proj.weight.shape == (32, 64)
    assert module(hidden_of(), causal(), POSITIONS).shape == (2, 6, 32)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("batch", "length"), [(0, 6), (2, 0)])
def test_empty_batches_and_lengths_give_empty_outputs_and_gradients(backend, batch, length):
    for fused in (False, True):
        module = layer(backend=backend, qk_norm=NORM, fused_qkv=fused)
        hidden = torch.zeros(batch, length, 32, requires_grad=True)
        output = module(hidden, causal(length), torch.arange(length)[None])
        assert output.shape == (batch, length, 32)
        output.sum().backward()
        assert hidden.grad.shape == hidden.shape


def test_positions_may_have_several_axes():
    axes = {"sections": [2, 1, 1], "layout": "contiguous"}
    module, text = layer(rope=dataclasses.replace(ROPE, axes=axes)), layer()
    three = POSITIONS.expand(3, 1, 6)
    same = module(hidden_of(), causal(), three.contiguous())
    torch.testing.assert_close(same, text(hidden_of(), causal(), POSITIONS))
    other = torch.stack([POSITIONS, POSITIONS * 2, POSITIONS + 5])
    assert not torch.allclose(module(hidden_of(), causal(), other), same)


def test_dropout_keeps_the_mean_in_training_and_is_off_in_eval():
    module = layer(dropout=0.5)
    with torch.no_grad():
        drawn = [module(hidden_of(batch=1), causal(), POSITIONS) for _ in range(1500)]
        module.eval()
        want = module(hidden_of(batch=1), causal(), POSITIONS)
        assert torch.equal(module(hidden_of(batch=1), causal(), POSITIONS), want)
    spread = torch.stack(drawn).std(0) / len(drawn) ** 0.5
    assert ((torch.stack(drawn).mean(0) - want).abs() < 5 * spread + 1e-6).all()


def test_a_layer_without_rope_needs_no_positions():
    module = layer(rope=None)
    assert torch.equal(module(hidden_of(), causal(), None), module(hidden_of(), causal(), POSITIONS))


def test_sinks_take_part_and_load_from_either_shape():
    module = layer(sinks=True, backend="sdpa")
    without = layer(backend="sdpa")
    without.load_state_dict({name: value for name, value in module.state_dict().items() if "sinks" not in name})
    with torch.no_grad():
        module.sinks.weight.fill_(-1e4)  # a sink that takes nothing
    torch.testing.assert_close(module(hidden_of(), causal(), POSITIONS), without(hidden_of(), causal(), POSITIONS))
    with torch.no_grad():
        module.sinks.weight.fill_(1e4)  # and one that takes all
    assert not module(hidden_of(), causal(), POSITIONS).any()
    module.load_state_dict({**without.state_dict(), "sinks": torch.arange(4.0)})
    assert torch.equal(module.sinks.logits(), torch.arange(4.0))
    module(hidden_of(), causal(), POSITIONS).sum().backward()
    assert module.sinks.weight.grad.abs().min() > 0
