"""Multi-head latent attention: transformers' classes give the same numbers, and a cache of latents does."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json

import pytest
import torch
from transformers import AutoConfig

from polyattn import (
    AttentionInputError,
    AttentionScope,
    AttentionSpec,
    ConfigError,
    KVCache,
    LatentAttention,
    LatentSpec,
    MaskLayout,
    RopeSpec,
)

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "minicpm3", "youtu")
SIZES = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "max_position_embeddings": 128,
    "num_hidden_layers": 2,
}  # fmt: skip
ROPES = {
    "default": {},
    "yarn": {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
    }},
}  # fmt: skip
LENGTH = 21


def config_of(family, rope="default", **changes):
    config = AutoConfig.for_model(family, **{**SIZES, **ROPES[rope], **changes})
    config._attn_implementation = "eager"
    return config


def theirs(config):
    """transformers' attention of the layer, and its rotary module."""
    name = config.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    parts = [
        next(kind for key, kind in vars(module).items() if key.endswith(end))
        for end in ("Attention", "RotaryEmbedding")
    ]
    torch.manual_seed(0)
    return parts[0](config, 0).double(), parts[1](config)


def ours(config, reference, **rest):
    layer = LatentAttention.from_hf(config, dtype=torch.float64, **rest)
    state = {f"model.layers.0.self_attn.{name}": value for name, value in reference.state_dict().items()}
    layer.load_hf_weights(state, config, layer=0)
    return layer


def hidden(rows=2, length=LENGTH, width=48):
    return torch.randn(rows, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected(reference, rotary, x, visible):
    positions = torch.arange(x.shape[1])[None]
    mask = torch.where(visible, 0.0, -torch.inf).double()
    return reference(hidden_states=x, position_embeddings=rotary(x, positions), attention_mask=mask)[0]


def close(got, want):
    """Within what FP32 rotary tables and norms lose: 1e-6 of the size."""
    with torch.no_grad():
        assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_every_family_are_those_of_its_class(family, rope):
    config = config_of(family, rope)
    reference, rotary = theirs(config)
    x, layout = hidden().requires_grad_(), MaskLayout.causal(LENGTH)
    want = expected(reference, rotary, x, layout.to_dense())
    given = dict(reference.named_parameters())
    weights = torch.randn_like(want)
    for backend in ("eager", "sdpa"):
        layer = ours(config, reference, backend=backend)
        got = layer(x, AttentionScope(layout), torch.arange(LENGTH)[None])
        close(got, want)
        leaves = [given[name] for name, _ in layer.named_parameters()]
        assert len(leaves) == len(given)
        wanted = torch.autograd.grad(want, [x, *leaves], weights, retain_graph=True)
        for mine, right in zip(torch.autograd.grad(got, [x, *layer.parameters()], weights), wanted, strict=True):
            close(mine, right)


@pytest.mark.parametrize("changes", [{"q_lora_rank": None}, {"attention_bias": True}, {"rope_interleave": False}])
def test_what_a_configuration_may_leave_out_or_turn_on(changes):
    config = config_of("deepseek_v3", **changes)
    reference, rotary = theirs(config)
    layout = MaskLayout.causal(LENGTH)
    layer = ours(config, reference, backend="sdpa")
    got = layer(hidden(), AttentionScope(layout), torch.arange(LENGTH)[None])
    close(got, expected(reference, rotary, hidden(), layout.to_dense()))


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_documents_windows_and_padding_are_masks_like_everywhere(backend):
    options = {"flex_attention": {"compiled": False}}.get(backend)
    config = config_of("deepseek_v3")
    reference, rotary = theirs(config)
    layout = MaskLayout.causal(LENGTH, active_queries=torch.arange(LENGTH)[None] != 3)
    spec = dataclasses.replace(LatentSpec.from_hf(config), window=5)
    layer = LatentAttention.from_spec(spec, backend=backend, backend_options=options, dtype=torch.float64)
    layer.load_state_dict(reference.state_dict())
    got = layer(hidden(), AttentionScope(layout), torch.arange(LENGTH)[None])
    want = expected(reference, rotary, hidden(), MaskLayout.causal(LENGTH, window=5).to_dense())
    live = torch.arange(LENGTH) != 3
    close(got[:, live], want[:, live])
    assert (got[:, 3] == 0).all()


@pytest.mark.parametrize("kind", ["static", "growing", "sliding"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_a_cache_of_latents_gives_what_the_whole_sequence_gives(backend, kind):
    config = config_of("deepseek_v3", "yarn")
    reference, _ = theirs(config)
    spec = dataclasses.replace(LatentSpec.from_hf(config), window=4 if kind == "sliding" else None)
    layer = LatentAttention.from_spec(spec, backend=backend, dtype=torch.float64)
    layer.load_state_dict(reference.state_dict())
    want = layer(hidden(), AttentionScope(MaskLayout.causal(LENGTH)), torch.arange(LENGTH)[None])
    capacity = None if kind == "sliding" else {"static": 32, "growing": 3}[kind]
    cache = KVCache(spec, 2, capacity, kind=kind, dtype=torch.float64, max_new=7, max_rollback=1)
    found = []
    for part in hidden().split([5, 1, 1, 7, 7], 1):
        scope = AttentionScope(cache.layout(part.shape[1]))
        found.append(layer(part, scope, None, cache=cache))
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=0, atol=1e-12)
    cache.rollback(cache.lengths - 1)
    cache.reorder(torch.tensor([1, 0]))
    last = layer(hidden()[:, -1:].flip(0), AttentionScope(cache.layout(1)), None, cache=cache)
    torch.testing.assert_close(last, want[:, -1:].flip(0), rtol=0, atol=1e-12)


def test_a_cache_holds_the_latent_and_the_rotated_key_once():
    cache = KVCache(LatentSpec.from_hf(config_of("deepseek_v3")), 2, 8)
    assert cache.keys.shape == (2, 1, 8, 16 + 6)
    assert cache.values.shape == (2, 1, 8, 16)
    assert cache.values.data_ptr() == cache.keys.data_ptr()
    assert sum(x.numel() for x in (cache.slots_of_keys, cache.slots_of_values)) == 2 * 8 * 22


def test_a_cache_takes_no_gradients_and_no_adapter():
    config = config_of("deepseek_v3")
    layer = LatentAttention.from_hf(config, dtype=torch.float64)
    cache = KVCache(layer.spec, 2, 8, dtype=torch.float64)
    with pytest.raises(AttentionInputError, match="a cache takes no gradients"):
        layer(hidden(length=3), AttentionScope(cache.layout(3)), None, cache=cache)
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    with torch.no_grad(), pytest.raises(AttentionInputError, match=r"kv_b_proj must be a plain nn.Linear.*Sequential"):
        layer(hidden(length=3), AttentionScope(cache.layout(3)), None, cache=cache)
    want = layer(hidden(length=3), AttentionScope(MaskLayout.causal(3)), torch.arange(3)[None])
    assert want.shape == (2, 3, 48)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v32", "an indexer that selects keys"), ("glm_moe_dsa", "an indexer that selects keys"),
        ("axk2", "a gate on the output and an indexer"), ("hy_v4", "a gate on the output and an indexer"),
        ("kimi_linear", "no rotation"), ("longcat_flash", "factors of its latents"),
        ("mistral4", "a factor of queries by their position"), ("glm5_next", "layers that are not softmax attention"),
    ],
)  # fmt: skip
def test_other_classes_with_latents_are_refused_with_what_they_have_more(family, more):
    with pytest.raises(ConfigError, match=f"{family}'.*{more}.*which no latent spec says"):
        LatentSpec.from_hf({"model_type": family})


def test_readers_name_each_other():
    with pytest.raises(ConfigError, match=r"model_type must be one of deepseek_v2, .*got 'llama'"):
        LatentSpec.from_hf({"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"LatentSpec\.from_hf"):
        AttentionSpec.from_hf(config_of("deepseek_v3"))


def test_a_spec_goes_through_json_and_names_every_fault():
    spec = dataclasses.replace(LatentSpec.from_hf(config_of("minicpm3", "yarn")), window=(3, None), layout="full")
    assert LatentSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert LatentAttention.from_spec(spec).spec == spec
    with pytest.raises(ConfigError, match=r"kind of a latent spec must be 'latent', got None"):
        LatentSpec.from_dict(AttentionSpec.of({"hidden_size": 8, "num_heads": 2, "num_kv_heads": 2}).to_dict())
    with pytest.raises(
        ConfigError, match=r"num_heads must be an int.*kv_rank must be.*got 0.*norm_eps must be a small"
    ):
        dataclasses.replace(spec, num_heads=2.5, kv_rank=0, norm_eps=2)
    rope = dataclasses.replace(spec.rope, head_dim=8, rotary_dim=8)
    with pytest.raises(ConfigError, match=r"rope.head_dim must equal rope_dim.*got rope.head_dim=8 and rope_dim=6"):
        dataclasses.replace(spec, rope=rope)


def test_a_layer_refuses_another_structure_before_it_loads_weights():
    config = config_of("deepseek_v3")
    layer = LatentAttention.from_spec(dataclasses.replace(LatentSpec.from_hf(config), kv_rank=8))
    with pytest.raises(ConfigError, match=r"kv_rank 8 instead of 16; build it with LatentAttention\.from_hf"):
        layer.load_hf_weights({"model.layers.0.self_attn.o_proj.weight": torch.zeros(1)}, config, layer=0)
    with pytest.raises(ConfigError, match=r"kv_rank of a layer stays as it was built.*LatentAttention\.from_spec"):
        layer.kv_rank = 9


def test_a_layer_compiles_whole_and_is_copied():
    config = config_of("deepseek_v3")
    layer = LatentAttention.from_hf(config, backend="sdpa", dtype=torch.float64)
    twin, positions = copy.deepcopy(layer), torch.arange(LENGTH)[None]
    x, layout = hidden().requires_grad_(), MaskLayout.packed([8, LENGTH - 8])

    def loss(layer, x):
        return layer(x, AttentionScope(layout), positions).square().sum()

    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(layer, x), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad(loss(twin, x), x)[0])


def test_a_latent_layer_needs_its_positions():
    spec = LatentSpec.from_hf(config_of("deepseek_v3"))
    assert isinstance(spec.rope, RopeSpec)
    layer = LatentAttention.from_spec(spec, dtype=torch.float64)
    with pytest.raises(AttentionInputError, match="positions must be an integer tensor"):
        layer(hidden(), AttentionScope(MaskLayout.causal(LENGTH)), None)
