"""Rotary rules of single model classes: which key counts, which layers rotate, and what no spec can say."""

from __future__ import annotations

import json

import pytest

from polyattn import AttentionConfig, RopeConfigError, RopeSpec, RotaryEmbedding
from polyattn.rope import RopeAxes

PLAIN = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 10000.0}


def read(*, layer_type=None, convention="serving", **keys):
    return RopeSpec.from_hf({**PLAIN, **keys}, layer_type=layer_type, convention=convention)


def refused(*, layer_type=None, **keys):
    with pytest.raises(RopeConfigError) as caught:
        read(layer_type=layer_type, **keys)
    return str(caught.value)


def of_transformers(model_type, **keys):
    """A configuration of transformers, where the installed version has the class."""
    auto = pytest.importorskip("transformers").AutoConfig
    try:
        return auto.for_model(model_type, **keys)
    except ValueError as error:
        if "Unrecognized model identifier" not in str(error):
            raise
        pytest.skip(f"this transformers has no {model_type}")


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"])
def test_full_attention_with_wider_heads_gets_their_width(model_type):
    config = of_transformers(model_type)
    for given in (config, json.loads(json.dumps(config.to_dict()))):
        widths = {kind: RopeSpec.from_hf(given, layer_type=kind).head_dim for kind in config.rope_parameters}
        assert widths == {"full_attention": 512, "sliding_attention": 256}
    older = {
        key: value for key, value in config.to_dict().items() if key not in {"per_layer_config", "global_head_dim"}
    }
    assert RopeSpec.from_hf({**older, "global_head_dim": 384}, layer_type="full_attention").head_dim == 384
    with pytest.raises(RopeConfigError, match="'global_head_dim' is missing"):
        RopeSpec.from_hf(older, layer_type="full_attention")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"0": {"head_dim": 16}}, "must give the layers of one type one head_dim, got 16, 8"),
        (
            {"first": {"head_dim": 16}},
            "per_layer_config must map indices of layers to their values, beside layer_types",
        ),
        ([16], "per_layer_config must map indices of layers to their values"),
    ],
)
def test_layers_of_one_type_with_heads_of_several_widths_are_refused(layers, text):
    keys = {"per_layer_config": layers, "layer_types": ["full_attention"] * 2}
    assert text in refused(layer_type="full_attention", **keys)


def test_sliding_layers_of_mimo_have_the_base_of_their_key():
    keys = {"model_type": "mimo_v2_flash", "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.5}
    kinds = ("full_attention", "sliding_attention")
    assert [read(layer_type=kind, **keys).theta for kind in kinds] == [5e6, 1e4]
    assert [read(layer_type=kind, **keys).rotary_dim for kind in kinds] == [4, 4]


def test_branches_of_deepseek_v4_that_compress_have_the_base_of_their_key():
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    file = {"head_dim": 32, "qk_rope_head_dim": 8, "max_position_embeddings": 1024, "rope_theta": 10000}
    file |= {"compress_rope_theta": 160000, "rope_scaling": yarn}
    flat = {branch: read(**file, model_type="deepseek_v4", layer_type=branch) for branch in ("main", "compress")}
    assert {branch: (spec.variant, spec.theta) for branch, spec in flat.items()} == {
        "main": ("default", 1e4),
        "compress": ("yarn", 1.6e5),
    }
    assert flat["compress"].parameters["attention_factor"] == 1.0
    config = of_transformers("deepseek_v4", **{**file, "rope_scaling": {**yarn, "rope_type": "yarn"}})
    assert {branch: RopeSpec.from_hf(config, layer_type=branch) for branch in flat} == flat


def test_latent_attention_has_the_width_of_its_rotated_part():
    keys = {"model_type": "deepseek_v3", "head_dim": 192}
    assert read(qk_rope_head_dim=64, **keys).head_dim == 64
    assert "'qk_rope_head_dim' is missing" in refused(**keys)
    half = {"model_type": "deepseek_v4", "head_dim": 32, "partial_rotary_factor": 0.25}
    assert (read(qk_rope_head_dim=8, **half).head_dim, read(qk_rope_head_dim=8, **half).rotary_dim) == (8, 8)
    assert "partial_rotary_factor 0.25 of head_dim 32 must be qk_rope_head_dim, 16" in refused(
        qk_rope_head_dim=16, **half
    )
    assert RopeSpec.from_hf(read(qk_rope_head_dim=64, **keys).to_hf("deepseek_v3")).head_dim == 64


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"model_type": "granitemoehybrid", "position_embedding_type": "nope"},
            "position_embedding_type is 'nope', so",
        ),
        ({"model_type": "granitemoehybrid"}, "position_embedding_type is None, so this model has no rotary embedding"),
        ({"model_type": "zamba2", "use_mem_rope": False}, "use_mem_rope is False, so this model has no rotary"),
        ({"model_type": "falcon", "alibi": True}, "alibi is True, so this model has no rotary embedding"),
        ({"position_embedding_type": "nope"}, "position_embedding_type is 'nope', so this model has no rotary"),
        (
            {"model_type": "bert", "position_embedding_type": "absolute"},
            "position_embedding_type is 'absolute', so this model has no rotary",
        ),
        ({"model_type": "kimi_linear"}, "the rope of this class is not supported: it has none"),
        ({"model_type": "nanochat"}, "it turns in the opposite direction"),
        ({"model_type": "qwen2_vl_vision"}, "its positions lie on a grid"),
        ({"model_type": "musicflamingo"}, "its angles come from time stamps"),
        ({"model_type": "cohere_compass_text"}, "its lanes do not stand in the order of their frequencies"),
    ],
)
def test_a_model_that_does_not_rotate_or_otherwise_is_refused(keys, text):
    assert text in refused(**keys)
    with pytest.raises(RopeConfigError):
        RopeSpec.from_hf({**PLAIN, **keys}, interleaved=False)


@pytest.mark.parametrize(
    ("model_type", "layer_type", "keys"),
    [
        ("cohere2", "full_attention", {}),
        ("afmoe", "full_attention", {}),
        ("exaone4", "full_attention", {"sliding_window": 16}),
        ("qwen3_next", "linear_attention", {"partial_rotary_factor": 0.5}),
        ("lfm2", "conv", {}),
    ],
)
def test_a_layer_type_that_does_not_rotate_is_refused(model_type, layer_type, keys):
    types = [layer_type, "sliding_attention"]
    text = refused(model_type=model_type, layer_types=types, layer_type=layer_type, **keys)
    assert f"layer_type '{layer_type}' has no rotary embedding in this class" in text
    assert read(model_type=model_type, layer_types=types, layer_type="sliding_attention", **keys).theta == 1e4


def test_all_layers_of_exaone_rotate_where_none_has_a_window():
    keys = {"model_type": "exaone4", "layer_types": ["full_attention"], "sliding_window": None}
    assert read(layer_type="full_attention", **keys).head_dim == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_ratio": 2.0},
        {"rotary_scaling": 4},
        {"theta_scale": 1},
        {"swa_rope_theta": 1e4},
        {"rope_local_base_freq": 1e4},
        {"rotary_emb_base": 20000},
        {"rotary_pct": 0.25},
        {"qk_rope_head_dim": 4},
        {"no_rope_layers": [1, 0]},
        {"model_type": "mine", "rope_dim": 4},
    ],
)
def test_a_key_of_the_rope_that_nothing_reads_is_refused(keys):
    (name,) = set(keys) - {"model_type"}
    assert f"nothing reads '{name}', which may change the rope" in refused(**keys)


def test_a_kind_of_positions_that_a_rotary_class_does_not_read_changes_nothing():
    assert read(position_embedding_type="absolute") == read(position_embedding_type="rope_gptj") == read()


def test_a_key_that_nothing_reads_may_be_null_or_say_that_all_rotates():
    assert read(rope_ratio=None, rotary_pct=1.0) == read()
    assert "rope_interleave is True, which this class does not read" in refused(rope_interleave=True)


def test_rotary_dim_is_read_where_the_class_has_it():
    for model_type in ("minimax_m2", "gptj", "codegen"):
        assert read(model_type=model_type, rotary_dim=4).rotary_dim == 4
    assert read(model_type="minimax_m2", rotary_dim=4, partial_rotary_factor=0.5).rotary_dim == 4
    assert "rotary_dim is 4, but 2 channels rotate by partial_rotary_factor" in refused(
        model_type="minimax_m2", rotary_dim=4, partial_rotary_factor=0.25
    )
    assert "rotary_dim is 4, but 8 channels rotate" in refused(model_type="minimax_m3_vl_text", rotary_dim=4)
    assert "canonical-only keys 'rotary_dim'; configurations of this class have no such keys" in refused(rotary_dim=4)
    spec = RopeSpec.from_hf(of_transformers("minimax_m2", rotary_dim=64, head_dim=128))
    assert (spec.head_dim, spec.rotary_dim) == (128, 64)


def test_the_longest_sequence_is_said_by_the_caller_where_the_config_does_not():
    config = {"model_type": "recurrent_gemma", "head_dim": 8, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert RopeSpec.from_hf(config, max_position=2048).max_position == 2048
    assert RopeSpec.from_hf(PLAIN, max_position=64) == RopeSpec.from_hf(PLAIN)
    for given, kwargs, text in (
        (config, {}, "'max_position_embeddings' is missing; add it, or pass max_position="),
        (PLAIN, {"max_position": 32}, "max_position must be None or 64, as max_position_embeddings says, got 32"),
        (config, {"max_position": 0}, r"max_position must be an int >= 1 and less than 2\*\*63, got 0"),
        (config, {"max_position": "8"}, "max_position must be an int >= 1"),
    ):
        with pytest.raises(RopeConfigError, match=text):
            RopeSpec.from_hf(given, **kwargs)


def test_dbrx_is_read_by_its_own_names():
    config = {"model_type": "dbrx", "d_model": 64, "n_heads": 4, "max_seq_len": 32}
    spec = RopeSpec.from_hf({**config, "attn_config": {"rope_theta": 5e5}})
    assert (spec.head_dim, spec.max_position, spec.theta) == (16, 32, 5e5)
    with pytest.raises(RopeConfigError, match=r"rope_theta is 10000.0 and attn_config.rope_theta is 500000.0"):
        RopeSpec.from_hf({**config, "rope_theta": 1e4, "attn_config": {"rope_theta": 5e5}})


@pytest.mark.parametrize(("model_type", "theta"), [("llama", 1e4), ("mixtral", 1e6)])
@pytest.mark.parametrize("convention", ["dflash", "eagle"])
def test_a_draft_without_base_is_read_alike_as_dictionary_and_object(convention, model_type, theta):
    keys = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    spec = RopeSpec.from_hf({"model_type": model_type, **keys}, convention=convention)
    assert spec.theta == theta
    assert RopeSpec.from_hf(of_transformers(model_type, **keys), convention=convention) == spec
    for unknown in ("mine", "gemma3_text"):  # of the second it depends on the layer
        with pytest.raises(RopeConfigError, match="'rope_theta' is missing"):
            RopeSpec.from_hf({"model_type": unknown, **keys}, convention=convention)
    with pytest.raises(RopeConfigError, match="'rope_theta' is missing"):
        RopeSpec.from_hf({"model_type": model_type, **keys})


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "glm"])
def test_an_axis_may_turn_nothing(layout):
    import torch

    spec = RopeSpec.from_hf(
        {**PLAIN, "rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    )
    axes = RopeAxes((2, 2, 0), layout)
    assert 2 not in axes.lanes()
    with_axes = RopeSpec(**{**{key: getattr(spec, key) for key in spec.__dataclass_fields__}, "axes": axes})
    positions = torch.tensor([[[3]], [[3]], [[9]]])
    tables, text = RotaryEmbedding(with_axes)(positions), RotaryEmbedding(spec)(positions[0])
    assert torch.equal(tables.cos, text.cos)
    middle = RopeAxes((2, 0, 2), "contiguous")  # the axis after one without lanes keeps its place
    third = RopeSpec(**{**{key: getattr(spec, key) for key in spec.__dataclass_fields__}, "axes": middle})
    angles, _ = RotaryEmbedding(third).angles(positions)
    lanes, _ = RotaryEmbedding(spec).angles(torch.tensor([[3, 9]]))
    assert torch.equal(angles[0, 0], torch.cat((lanes[0, 0, :2], lanes[0, 1, 2:])))


def test_sections_with_a_zero_are_read():
    rope = {"type": "mrope", "mrope_section": [2, 2, 0]}
    assert read(model_type="qwen2_vl", rope_scaling=rope).axes.sections == (2, 2, 0)


def test_a_config_of_layers_says_the_convention_of_a_draft():
    rope = {**PLAIN, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert AttentionConfig("eager", rope=rope).rope == RopeSpec.from_hf(rope)
    with pytest.raises(RopeConfigError, match=r"rope: .*rope_type 'dynamic' is refused under convention 'eagle'"):
        AttentionConfig("eager", rope={**rope, "convention": "eagle"})
    with pytest.raises(RopeConfigError, match="convention must be one of serving, dflash, eagle, got 'old'"):
        AttentionConfig("eager", rope={**PLAIN, "convention": "old"})
    assert AttentionConfig("eager", rope={**PLAIN, "model_type": "minimax_m2", "rotary_dim": 4}).rope.rotary_dim == 4


@pytest.mark.parametrize(
    ("model_type", "keys", "layer_type", "text"),
    [
        ("gpt_oss", {}, None, "rope_parameters is missing, and this class has a default of its own that scales"),
        ("mistral4", {"qk_rope_head_dim": 8}, None, "rope_parameters is missing, and this class has a default"),
        ("gemma3_text", {}, "sliding_attention", "rope_parameters must have an entry for each layer type"),
        ("modernbert", {}, "sliding_attention", "rope_parameters must have an entry for each layer type"),
        (
            *("glm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
            "'partial_rotary_factor' is missing, and this class has a default of its own",
        ),
    ],
)
def test_what_a_class_would_fill_in_by_itself_must_be_said(model_type, keys, layer_type, text):
    types = ["sliding_attention", "full_attention"]
    assert text in refused(model_type=model_type, layer_types=types, layer_type=layer_type, **keys)


def test_a_base_at_the_top_that_no_layer_type_has_is_refused():
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    keys = {"model_type": "gemma3_text", "rope_parameters": ropes, "layer_type": "full_attention"}
    assert read(**{**keys, "rope_theta": 1e6}).theta == 1e6
    assert "rope_theta is 5000.0 at the top and no layer type has it" in refused(**{**keys, "rope_theta": 5e3})
