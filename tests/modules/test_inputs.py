"""What a layer is given wrongly is said before any matrix product, all at once."""

import pytest
import torch

from decoder import config_of, rope_of
from fa_stand_in import stand_in
from polyattn import (
    AttentionInputError,
    AttentionScope,
    BackendBase,
    GroupedQueryAttention,
    LayoutError,
    MaskLayout,
    RotaryEmbedding,
    UnsupportedAttentionError,
)

POSITIONS = torch.arange(6)[None]
HIDDEN = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


def layer_of(backend="eager", **changes):
    torch.manual_seed(0)
    return config_of(backend, groups=[], **changes).layer(0).build()


def scope_of(length=6, keys=None):
    return AttentionScope(MaskLayout.causal(length, keys))


@pytest.fixture
def layer():
    """A layer whose projections cannot multiply: any product would fail in another way."""
    module = layer_of()
    module.q_proj.weight = None
    return module


def refused(layer, kind=AttentionInputError, **call):
    rest = {name: value for name, value in call.items() if name not in {"hidden", "scope", "positions"}}
    hidden, scope = call.get("hidden", HIDDEN), call["scope"] if "scope" in call else scope_of()
    positions = call.get("positions", POSITIONS)
    with pytest.raises(kind) as caught:
        layer(hidden, scope, positions, **rest)
    with pytest.raises(kind):  # filling the scope asks for the same
        layer.fill(scope, hidden, positions, **rest)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"hidden": HIDDEN[0]}, "hidden must be a floating tensor [B, S, 32], got torch.float32 (6, 32)"),
        ({"hidden": HIDDEN.long()}, "hidden must be a floating tensor [B, S, 32], got torch.int64 (2, 6, 32)"),
        ({"hidden": [[1.0]]}, "hidden must be a floating tensor [B, S, hidden_size], got list"),
        ({"kv_hidden": "context"}, "kv_hidden must be a floating tensor [B, S, hidden_size], got str"),
        ({"positions": POSITIONS[0]}, "positions must be an integer tensor [B|1, 6] with B=2, got (6,)"),
        ({"positions": POSITIONS.expand(3, 6)}, "positions must be an integer tensor [B|1, 6] with B=2, got (3, 6)"),
        ({"positions": POSITIONS[None]}, "positions must be an integer tensor [B|1, 6] with B=2, got (1, 1, 6)"),
        ({"positions": POSITIONS > 0}, "positions must be an integer tensor [B|1, 6], got torch.bool"),
        ({"positions": POSITIONS.to("meta")}, "positions must be on the device of hidden, cpu, got meta"),
        ({"kv_positions": POSITIONS}, "kv_positions must come with kv_hidden, past or keys_values, whose positions"),
        ({"scope": scope_of(5)}, "q_len=6 and kv_len=6 for these hidden states, got q_len=5 and kv_len=5"),
        ({"scope": None}, "scope must be an AttentionScope, got NoneType"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_what_it_got(layer, call, text):
    assert text in refused(layer, **call)


def test_everything_that_is_wrong_is_said_at_once(layer):
    context = torch.zeros(1, 3, 32, dtype=torch.bfloat16)
    text = refused(layer, kv_hidden=context, positions=POSITIONS[:, :5])
    assert "kv_hidden must have the batch of hidden, 2, got 1" in text
    assert "kv_hidden must have the dtype of hidden, torch.float32, got torch.bfloat16" in text
    assert "kv_len=9 for these hidden states, got q_len=6 and kv_len=6" in text
    assert "positions must be an integer tensor [B|1, 6] with B=2, got (1, 5)" in text
    assert "kv_positions must be an integer tensor [B|1, 3], got NoneType" in text


def test_positions_of_several_axes_must_have_them_all():
    rope = rope_of(axes={"sections": [2, 1, 1], "layout": "contiguous"})
    text = refused(layer_of(rope=rope), positions=POSITIONS.expand(2, 1, 6))
    assert "an integer tensor [B|1, 6] or [3, B|1, 6] with B=2, got (2, 1, 6)" in text


def test_a_layout_of_another_batch_or_device_is_refused(layer):
    three = AttentionScope(MaskLayout.packed([[6], [2, 4], [3, 3]]))
    assert "layout.batch must be 1 (broadcasts) or the batch of the tensors" in refused(layer, LayoutError, scope=three)
    elsewhere = AttentionScope(MaskLayout.dense(torch.ones(6, 6, dtype=torch.bool, device="meta")))
    assert "layout must be on the device of q, k and v" in refused(layer, LayoutError, scope=elsewhere)


def test_a_scope_serves_one_forward_of_one_length():
    layer, scope = layer_of(), scope_of()
    layer(HIDDEN, scope, POSITIONS)
    with pytest.raises(AttentionInputError, match="make a scope for each forward"):
        layer(HIDDEN[:, :5], scope, POSITIONS[:, :5])
    layer(HIDDEN[:1], scope, POSITIONS)  # another batch is another request under the same layout
    assert scope.builds == {"attention": 2, "rotary": 1}


def test_what_the_backend_refuses_is_said_before_any_product_with_all_reasons():
    class Narrow(BackendBase):
        name = "narrow"
        abilities = frozenset({"float64", "full"})

        def plan(self, layout, request):
            return None

    layer = GroupedQueryAttention(32, 4, 4, backend=Narrow())
    layer.q_proj.weight = None
    with pytest.raises(UnsupportedAttentionError) as caught:
        layer(HIDDEN, scope_of(), None)
    assert {reason.feature for reason in caught.value.reasons} == {"float32", "causal", "grad"}


def test_a_model_may_be_built_on_the_cpu_for_a_backend_of_another_device():
    layer = layer_of("fa")  # it may move to a GPU before it runs
    with pytest.raises(UnsupportedAttentionError, match="need a cuda device"):
        layer(HIDDEN, scope_of(), POSITIONS)
    config = config_of("fa", groups=[])
    with pytest.raises(UnsupportedAttentionError, match="need a cuda device"):
        config.layer(0).build(device="cpu")  # it may not
    with stand_in("flash_attn"):
        assert config.layer(0).build(device="cpu").backend.name == "fa"
    assert config.layer(0).build(device="meta").backend.name == "fa"


def test_a_refused_backend_leaves_the_old_one():
    layer = layer_of(softcap=3.0)
    with pytest.raises(UnsupportedAttentionError, match="softcap"):
        layer.set_backend("sdpa")
    assert layer.backend.name == "eager"
    layer(HIDDEN, scope_of(), POSITIONS)


class Shifted(RotaryEmbedding):
    """A rotary module with state of its own."""

    shift = 0

    def forward(self, positions, *, length=None):
        return super().forward(positions + self.shift, length=length)


def test_layers_with_rotary_modules_of_their_own_share_no_table_whatever_their_specs_say():
    torch.manual_seed(0)
    layers = [layer_of() for _ in range(3)]
    scope = scope_of()
    plain = layers[0](HIDDEN, scope, POSITIONS)
    for shift, layer in enumerate(layers[1:], 1):
        layer.rotary = Shifted(layer.spec.rope)
        layer.rotary.shift = 5 * shift
    later = POSITIONS + 40
    outputs = [layer(HIDDEN, scope, POSITIONS) for layer in layers[1:]]
    assert scope.builds == {"attention": 1, "rotary": 3}
    torch.testing.assert_close(outputs[0], plain, rtol=1e-4, atol=1e-5)  # a shift of all positions changes nothing
    assert not torch.equal(outputs[0], outputs[1])
    layers[0].rotary = RotaryEmbedding(config_of(rope=rope_of(500.0), groups=[]).layer(0).rope)
    assert not torch.allclose(layers[0](HIDDEN, scope, POSITIONS), plain)
    layers[0](HIDDEN, scope, later)
    assert scope.builds == {"attention": 1, "rotary": 5}


def test_a_frozen_layer_attends_without_asking_for_gradients():
    layer, scope = layer_of().requires_grad_(False), scope_of()
    assert not layer(HIDDEN, scope, POSITIONS).requires_grad
    (prepared,) = scope.kept("attention")
    assert not prepared.request.needs_grad
    layer.k_proj.weight.requires_grad_()
    layer(HIDDEN, scope, POSITIONS).sum().backward()
    assert layer.k_proj.weight.grad.any()
    assert scope.builds == {"attention": 2, "rotary": 1}


def test_asking_for_determinism_is_part_of_what_is_prepared():
    layer, scope = layer_of("sdpa"), scope_of()
    layer(HIDDEN, scope, POSITIONS)
    torch.use_deterministic_algorithms(True)
    try:
        layer(HIDDEN, scope, POSITIONS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert scope.builds["attention"] == 2
