"""A layer whose parts were replaced after it was built, and one scope under changing conditions."""

import copy
import dataclasses

import pytest
import torch
from torch.nn.utils import parametrize

from decoder import NORM, SEGMENTATIONS, Decoder, batch_of, config_of, rope_of
from polyattn import (
    AttentionInputError,
    AttentionScope,
    AttentionSpec,
    ConfigError,
    GroupedQueryAttention,
    LayoutError,
    MaskLayout,
    RopeSpec,
    RotaryEmbedding,
)
from polyattn_modules import RMSNorm

HIDDEN = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(6)[None]


def layer_of(backend="eager", **changes):
    torch.manual_seed(0)
    return config_of(backend, groups=[], **changes).layer(0).build()


def scope_of():
    return AttentionScope(MaskLayout.packed([2, 4]))


def test_a_layer_without_its_rotation_leaves_that_of_the_others_alone():
    first, second = layer_of(), layer_of()
    want = second(HIDDEN, scope_of(), POSITIONS)
    first.rotary = None
    plain = layer_of(rope=None)(HIDDEN, scope_of(), None)
    for order in ((first, second), (second, first)):
        scope = scope_of()
        got = {module: module(HIDDEN, scope, POSITIONS) for module in order}
        assert torch.equal(got[first], plain)
        assert torch.equal(got[second], want)
        assert scope.builds == {"attention": 1, "rotary": 1}


def test_layers_of_one_structure_share_however_they_were_made():
    layers = [layer_of(), layer_of(rope=RopeSpec.from_dict(rope_of())), copy.deepcopy(layer_of())]
    scope = scope_of()
    outputs = [layer(HIDDEN, scope, POSITIONS) for layer in layers]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert scope.builds == {"attention": 1, "rotary": 1}
    assert len(scope.kept(layers[0].kind.name)) == 1


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("gone", [None, torch.nn.Identity()], ids=["None", "Identity"])
def test_a_norm_that_was_taken_out_is_not_applied(position, gone):
    layer = layer_of(qk_norm={**NORM, "position": position})
    layer.q_norm = layer.k_norm = gone
    context = {"kv_hidden": HIDDEN[:, :3], "kv_positions": POSITIONS[:, :3]}
    plain = layer_of(qk_norm=None)
    for rest in ({}, context):
        scopes = [AttentionScope(MaskLayout.causal(6, 9 if rest else 6)) for _ in range(2)]
        assert torch.equal(layer(HIDDEN, scopes[0], POSITIONS, **rest), plain(HIDDEN, scopes[1], POSITIONS, **rest))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("q_norm", RMSNorm(8, eps=1e-6)),
        ("k_norm", torch.nn.Identity()),
        ("rotary", RotaryEmbedding(RopeSpec.from_dict(rope_of()))),
        ("sinks", torch.nn.Identity()),
    ],
)
def test_a_part_that_would_stay_unused_is_refused(name, part):
    layer = layer_of(qk_norm=None, rope=None)
    with pytest.raises(AttentionInputError, match=f"{name} must be None in a layer that was built without, got"):
        setattr(layer, name, part)
    assert getattr(layer, name) is None
    assert torch.equal(layer(HIDDEN, scope_of(), None), layer_of(qk_norm=None, rope=None)(HIDDEN, scope_of(), None))


def test_a_rotary_module_of_another_kind_is_refused():
    layer = layer_of()
    with pytest.raises(AttentionInputError, match=r"rotary must be a RotaryEmbedding, .* got Identity"):
        layer.rotary = torch.nn.Identity()
    assert type(layer.rotary) is RotaryEmbedding


def test_structure_and_masks_do_not_change_under_a_layer_that_has_read_them():
    scope = scope_of()
    for name in ("layout", "context_layout", "length"):
        with pytest.raises(AttributeError):
            setattr(scope, name, None)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AttentionSpec) if field.name != "sinks"])
def test_setting_a_field_of_the_structure_is_refused_with_the_way_out(name):
    layer = layer_of()
    with pytest.raises(ConfigError) as caught:
        setattr(layer, name, 3)
    assert str(caught.value) == (
        f"{name} of a layer stays as it was built, got 3; build another layer, "
        f"GroupedQueryAttention.from_spec(dataclasses.replace(layer.spec, {name}=...))"
    )
    assert not hasattr(layer, name)


def test_setting_what_a_layer_was_built_with_is_refused_with_the_way_out():
    layer = layer_of()
    spec = dataclasses.replace(layer.spec, window=3)
    for name, value, text in (
        ("spec", spec, r"spec of .* got AttentionSpec; .* GroupedQueryAttention\.from_spec\(spec\)"),
        ("backend", "sdpa", r"backend cannot .* got 'sdpa'; use layer\.set_backend"),
        ("fused_qkv", True, r"fused_qkv of .* got True; .*from_spec\(layer\.spec, fused_qkv="),
    ):
        with pytest.raises(ConfigError, match=text):
            setattr(layer, name, value)
    assert GroupedQueryAttention.from_spec(spec, backend="eager").spec.window == 3


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "rotary", "sinks"])
def test_a_part_that_is_not_a_module_is_refused(name):
    with pytest.raises(AttentionInputError, match=f"{name} must be .* got bool"):
        setattr(layer_of(sinks=True, qk_norm=NORM), name, True)
    with pytest.raises(AttentionInputError, match=f"{name} must be None in a layer that was built without, got bool"):
        setattr(layer_of(qk_norm=None, rope=None), name, True)


def test_a_subclass_may_add_parts_of_its_own():
    class Gated(GroupedQueryAttention):
        def __init__(self, *args, **rest):
            super().__init__(*args, **rest)
            self.gate, self.strength = torch.nn.Linear(32, 32), 0.5

        def forward(self, hidden, *args, **rest):
            return super().forward(hidden, *args, **rest) * self.strength * self.gate(hidden)

    layer = layer_of()
    gated = Gated.from_spec(layer.spec, backend="eager")
    gated.load_state_dict(layer.state_dict(), strict=False)
    want = layer(HIDDEN, scope_of(), POSITIONS) * 0.5 * gated.gate(HIDDEN)
    assert torch.equal(gated(HIDDEN, scope_of(), POSITIONS), want)


@pytest.mark.parametrize(
    ("layout", "rest", "error", "text"),
    [
        (None, {}, LayoutError, r"^layout must be a MaskLayout, got NoneType; MaskLayout\.causal\(length\)"),
        ("causal", {}, LayoutError, "^layout must be a MaskLayout, got 'causal'"),
        (MaskLayout.causal(6), {"context_layout": "full"}, LayoutError, "^context_layout must be .* got 'full'"),
        (MaskLayout.causal(6), {"length": "a"}, AttentionInputError, "^length must be an int >= 0, .* got 'a'"),
        (MaskLayout.causal(6), {"length": -1}, AttentionInputError, "^length must be an int >= 0, .* got -1"),
        (MaskLayout.causal(6), {"length": True}, AttentionInputError, "^length must be an int >= 0, .* got True"),
        (MaskLayout.causal(6), {"length": torch.tensor(6)}, AttentionInputError, "never a tensor"),
    ],
)
def test_a_scope_of_something_else_is_refused_when_it_is_made(layout, rest, error, text):
    with pytest.raises(error, match=text):
        AttentionScope(layout, **rest)


class Adapter(torch.nn.Module):
    """A projection with a low-rank addition and trainable parameters of its own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_an_adapter_on_a_frozen_layer_is_trained_and_merging_it_gives_the_same():
    layer, scope = layer_of("sdpa").requires_grad_(False), scope_of()
    plain = layer_of("sdpa").requires_grad_(False)
    assert not plain(HIDDEN, scope, POSITIONS).requires_grad
    layer.q_proj = Adapter(layer.q_proj)
    output = layer(HIDDEN, scope, POSITIONS)  # the same scope, now with gradients
    output.sum().backward()
    assert layer.q_proj.up.weight.grad.any()
    assert layer.q_proj.base.weight.grad is None
    plain.q_proj.weight += layer.q_proj.up.weight.detach() @ layer.q_proj.down.weight.detach()
    torch.testing.assert_close(output, plain(HIDDEN, scope, POSITIONS))


class Counted(torch.nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


def test_a_parametrised_weight_is_computed_once_a_forward():
    layer, counted = layer_of(), Counted()
    parametrize.register_parametrization(layer.q_proj, "weight", counted)
    counted.calls = 0
    layer(HIDDEN, scope_of(), POSITIONS)
    assert counted.calls == 1


class Casting(torch.nn.Module):
    """A projection whose weight has another dtype than what it takes and gives."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x.float()).to(x.dtype)


def test_a_projection_that_casts_by_itself_is_let_do_so():
    layer = layer_of()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(layer, name, Casting(getattr(layer, name)))
    assert layer(HIDDEN.bfloat16(), scope_of(), POSITIONS).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_one_scope_serves_changing_modes_dtypes_and_batches(backend):
    """Each call equals the same call with a scope of its own, in any order."""
    layer = layer_of(backend, dropout=0.0 if backend == "sdpa" else 0.5)
    low = copy.deepcopy(layer).bfloat16()

    def call(module, hidden, scope, *, train=False, grad=True, autocast=False, **rest):
        module.train(train)
        torch.manual_seed(0)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(hidden, scope, POSITIONS, **rest)

    bias = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    calls = [
        (layer, HIDDEN, {}),
        (layer, HIDDEN, {"train": True}),
        (layer, HIDDEN, {"grad": False}),
        (layer, HIDDEN, {"autocast": True}),
        (layer, HIDDEN, {"autocast": True, "train": True, "grad": False}),
        (low, HIDDEN.bfloat16(), {}),
        (layer, HIDDEN[:1], {}),
        (layer, HIDDEN, {"attention_bias": bias}),
        (layer, HIDDEN, {"attention_bias": bias.clone().requires_grad_()}),
    ]
    scope = scope_of()
    for module, hidden, rest in [*calls, *reversed(calls)]:
        got, want = call(module, hidden, scope, **rest), call(module, hidden, scope_of(), **rest)
        assert got.dtype is want.dtype
        assert got.requires_grad is want.requires_grad
        assert torch.equal(got, want), rest


# Dynamo looks at .grad of the hidden states that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_compiled_one_by_one_share_their_graphs_and_settle():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    model = Decoder(config_of("sdpa"))
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=count)
    for seed, lengths in enumerate(SEGMENTATIONS):
        batch = batch_of(lengths, seed)
        torch.testing.assert_close(model(*batch), plain(*batch), rtol=1e-5, atol=1e-5)
    assert len(graphs) <= 4  # two kinds of layers, each with the shapes it began with and then with any
