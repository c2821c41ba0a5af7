"""transformers configurations: every known model is read right, and what cannot be read is refused by name."""

from __future__ import annotations

import copy
import functools
import json
import logging
import re

import pytest
import torch

from polyattn import RopeConfigError, RopeFrequencies, RopeSpec, RotaryEmbedding, rope_variants
from polyattn.rope import CANONICAL_ONLY, above, check_spec, inverse_powers
from polyattn_readers.model_classes import class_axes, class_pairing, classes, known_classes, reordered
from rope_golden import DATA

CONFIGS = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))
MODELS = {model["model"]: model for model in CONFIGS["models"]}
HAS_FIELD = ("axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu")

PLAIN = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 10000.0}


def v4(scaling=None, **keys):
    return {**PLAIN, "rope_scaling": scaling, **keys}


def v5(rope, **keys):
    kept = {name: value for name, value in PLAIN.items() if name != "rope_theta"}
    return {**kept, "rope_parameters": {"rope_theta": 10000.0, **rope}, **keys}


def entries(style):
    return [
        pytest.param(name, meaning, id=f"{name} {meaning.get('layer_type', '')}".strip())
        for name, model in MODELS.items()
        if style in model
        for meaning in model["canonical"]
    ]


def dictionary(name, style):
    model = MODELS[name]
    sizes = {key: value for key, value in model["dimensions"].items() if value != "per-layer"}
    return {"model_type": model["model_type"], **sizes, **model[style]}


def read(name, style, meaning):
    per_layer = MODELS[name]["dimensions"].get("head_dim") == "per-layer"
    return RopeSpec.from_hf(
        dictionary(name, style),
        layer_type=meaning.get("layer_type"),
        head_dim=meaning["head_dim"] if per_layer else None,
    )


def assert_means(spec, meaning):
    assert spec.variant == meaning["rope_type"].removesuffix("_alpha")
    assert spec.theta == meaning["theta"]
    latent = meaning.get("layer_type") in {"main", "compress"}  # DeepSeek-V4: of its heads, the part that rotates
    assert spec.head_dim == meaning["rotary_dim" if latent else "head_dim"]
    assert spec.rotary_dim == 2 * meaning.get("table_width", meaning["rotary_dim"] // 2)
    assert spec.interleaved == (meaning["pairing"] != "half")
    assert spec.max_position == meaning["max_position"]
    assert spec.original_max_position == meaning.get("original_max_position")
    for parameter, value in spec.parameters.items():
        if value is not None and parameter not in {"switch", "attention_factor"}:
            assert value == (tuple(meaning[parameter]) if isinstance(value, tuple) else meaning[parameter])
    scaling = RotaryEmbedding(spec).angles(torch.tensor([[0]]))[1]
    # PhiMoE's own multiplier is what serving engines apply.
    assert scaling == pytest.approx(meaning.get("long_mscale", meaning["attention_factor"]), rel=1e-12)
    if "mrope_section" in meaning:
        sections = [spec.axes.sections[axis] for axis in ((1, 2, 0) if spec.axes.layout == "ernie" else (0, 1, 2))]
        assert sections == meaning["mrope_section"]
        assert spec.axes.layout == {"chunked": "contiguous"}.get(meaning["mrope_layout"], meaning["mrope_layout"])
    else:
        assert spec.axes is None


LONG_LISTS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(("name", "meaning"), entries("v4"))
def test_a_version_4_dictionary_gives_its_canonical_parameters(name, meaning):
    assert_means(read(name, "v4", meaning), meaning)


@pytest.mark.parametrize(("name", "meaning"), entries("v5"))
def test_a_version_5_dictionary_gives_its_canonical_parameters(name, meaning):
    assert_means(read(name, "v5", meaning), meaning)


@pytest.mark.parametrize(("name", "meaning"), entries("v5"))
def test_what_is_written_for_the_model_is_read_back(name, meaning):
    spec = read(name, "v5", meaning)
    written = spec.to_hf(MODELS[name]["model_type"])
    assert RopeSpec.from_hf(json.loads(json.dumps(written))) == spec
    given = MODELS[name]["v5"]["rope_parameters"]
    given = given.get(meaning.get("layer_type"), given)
    idle = {"type", "llama_4_scaling_beta", "max_position_embeddings"}  # another name, another layer's, a repetition
    if "qk_rope_head_dim" in written:
        idle.add("partial_rotary_factor")
    if spec.parameters.get("alpha"):
        idle |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    for key, value in given.items():
        if key not in idle and (key, value) != ("partial_rotary_factor", 1.0):
            assert written["rope_parameters"][key] == value


def test_the_caller_keeps_its_dictionary():
    for name, model in MODELS.items():
        config = dictionary(name, "v5")
        before = copy.deepcopy(config)
        RopeSpec.from_hf(config, layer_type=model["canonical"][0].get("layer_type"))
        assert config == before


def plain_spec(interleaved, **fields):
    standard = {
        "variant": "default",
        "theta": 10000.0,
        "head_dim": 128,
        "rotary_dim": 128,
        "max_position": 64,
        "original_max_position": None,
        "parameters": {},
    }
    return RopeSpec(interleaved=interleaved, **{**standard, **fields})


def fitting_spec(model_type, interleaved):
    """A spec that the class can carry but for its pairing: with the axes that the class has by itself."""
    layout, sections = class_axes({"model_type": model_type})
    if layout is None:
        return plain_spec(interleaved)
    width = 2 * sum(sections)
    axes = {"sections": reordered(sections, layout, to_hf=False), "layout": layout}
    return plain_spec(interleaved, head_dim=width, rotary_dim=width, axes=axes)


@pytest.mark.parametrize(
    ("model_type", "pairing"), [("llama", False), ("cohere", True), ("qwen3_vl_text", False), ("deepseek_v32", True)]
)
def test_a_class_is_written_with_its_own_pairing_and_refused_with_the_other(model_type, pairing):
    """Which class pairs how is compared with its code in another file."""
    spec = fitting_spec(model_type, pairing)
    written = spec.to_hf(model_type)
    assert written["model_type"] == model_type
    assert "interleaved" not in json.dumps(written).replace("mrope_interleaved", "")
    assert RopeSpec.from_hf(written) == spec
    with pytest.raises(RopeConfigError, match=rf"{model_type}.*pairs .*interleaved={not pairing}"):
        fitting_spec(model_type, not pairing).to_hf(model_type)


def test_every_class_is_written_so_that_it_is_read_back():
    for name in known_classes() - set(classes()["fixed_theta"]):
        spec = fitting_spec(name, class_pairing({"model_type": name}))
        assert RopeSpec.from_hf(spec.to_hf(name)) == spec


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_class_with_a_field_for_the_pairing_gets_it(interleaved):
    for model_type in HAS_FIELD:
        spec = plain_spec(interleaved)
        written = spec.to_hf(model_type)
        assert written["rope_interleave"] is interleaved
        assert RopeSpec.from_hf(written) == spec


def test_a_class_whose_pairing_is_not_known_is_refused_both_ways():
    with pytest.raises(RopeConfigError, match="how it pairs channels is not known"):
        plain_spec(False).to_hf("fuyu")
    with pytest.raises(RopeConfigError, match="pass interleaved=True"):
        RopeSpec.from_hf({**PLAIN, "model_type": "fuyu", "partial_rotary_factor": 0.5})


def test_the_pairing_comes_from_the_class_or_from_the_argument():
    assert RopeSpec.from_hf({**PLAIN, "model_type": "cohere"}).interleaved is True
    assert RopeSpec.from_hf({**PLAIN, "model_type": "mine"}, interleaved=True).interleaved is True
    without = {name: value for name, value in PLAIN.items() if name != "model_type"}
    assert RopeSpec.from_hf(without, interleaved=False).interleaved is False
    with pytest.raises(RopeConfigError, match=r"model_type None: it does not tell how channels pair; pass interleaved"):
        RopeSpec.from_hf(without)
    with pytest.raises(RopeConfigError, match="interleaved must be None or False, got True: this class pairs halves"):
        RopeSpec.from_hf(PLAIN, interleaved=True)


def test_older_composite_configs_name_the_whole_model():
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    assert RopeSpec.from_hf(v4(scaling, model_type="qwen2_vl")).axes.layout == "contiguous"


def test_a_configuration_object_is_read_like_its_dictionary():
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    rope["original_max_position_embeddings"] = 8192
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope
    )
    spec = RopeSpec.from_hf(config)
    assert spec == RopeSpec.from_hf(config.to_dict())
    assert (spec.variant, spec.head_dim, spec.original_max_position) == ("llama3", 16, 8192)


@pytest.mark.parametrize(
    ("model_type", "variant", "parameters", "original"),
    [
        ("llama", "linear", {"factor": 4.0}, None),
        ("qwen3", "yarn", {"factor": 4.0, "beta_fast": 16.0}, 1024),
        ("llama", "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1024),
        ("phi3", "longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "switch": "long"}, 1024),
    ],
)
def test_transformers_computes_our_frequencies_from_what_we_write(model_type, variant, parameters, original):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = plain_spec(
        False, variant=variant, parameters=parameters, original_max_position=original, max_position=4096,
        head_dim=16, rotary_dim=16,
    )  # fmt: skip
    written = spec.to_hf(model_type)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **sizes, **written)
    theirs, scaling = ROPE_INIT_FUNCTIONS[variant](config, torch.device("cpu"), seq_len=2048)
    ours, our_scaling = RotaryEmbedding(spec).angles(torch.tensor([[1]]))
    assert torch.allclose(ours[0, 0], theirs, rtol=1e-6)
    assert our_scaling == pytest.approx(scaling)


def test_head_dim_null_is_computed_from_the_hidden_size():
    spec = RopeSpec.from_hf({**PLAIN, "head_dim": None, "hidden_size": 32, "num_attention_heads": 4})
    assert (spec.head_dim, spec.rotary_dim) == (8, 8)


def test_the_rotary_width_of_multi_head_latent_attention_is_its_rope_part():
    config = {**PLAIN, "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128}
    config |= {"head_dim": None, "qk_rope_head_dim": 64}
    assert RopeSpec.from_hf(config).head_dim == 64


def test_type_and_rope_type_may_both_be_present_when_they_agree(caplog):
    with caplog.at_level(logging.DEBUG):
        both = RopeSpec.from_hf(v4({"type": "linear", "rope_type": "linear", "factor": 4.0}))
    assert both == RopeSpec.from_hf(v4({"type": "linear", "factor": 4}))
    assert not caplog.records
    angles, _ = RotaryEmbedding(both).angles(torch.tensor([[1]]))
    assert angles[0, 0].tolist() == pytest.approx([0.25, 0.025, 0.0025, 0.00025], rel=1e-6)


def test_longrope_is_fixed_by_how_far_the_model_is_extended():
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = RopeSpec.from_hf(v4(scaling, model_type="phi3", original_max_position_embeddings=32))
    short = RopeSpec.from_hf(v4(scaling, model_type="phi3", original_max_position_embeddings=64))
    assert (long.variant, long.parameters["switch"], short.parameters["switch"]) == ("longrope", "long", "short")


def test_phi3_calls_longrope_yarn():
    scaling = {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    spec = RopeSpec.from_hf(v4(scaling, model_type="phi3", original_max_position_embeddings=32))
    assert spec.variant == "longrope"


GEMMA3 = v4(
    {"rope_type": "linear", "factor": 8.0}, model_type="gemma3_text", rope_theta=1e6, rope_local_base_freq=10000.0
)


def test_layer_types_of_older_gemma_and_olmo_files_have_their_own_rope():
    full = RopeSpec.from_hf(GEMMA3, layer_type="full_attention")
    sliding = RopeSpec.from_hf(GEMMA3, layer_type="sliding_attention")
    assert (full.variant, full.theta, sliding.variant, sliding.theta) == ("linear", 1e6, "default", 1e4)
    olmo = v4({"rope_type": "linear", "factor": 8.0}, model_type="olmo3")
    assert RopeSpec.from_hf(olmo, layer_type="sliding_attention").variant == "default"
    bert = {
        **PLAIN,
        "model_type": "modernbert",
        "rope_theta": None,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 1e4,
    }
    assert [RopeSpec.from_hf(bert, layer_type=f"{kind}_attention").theta for kind in ("full", "sliding")] == [
        160000.0,
        1e4,
    ]


@pytest.mark.parametrize("convention", ["dflash", "eagle"])
def test_drafts_of_old_paired_halves_whatever_their_class(convention):
    spec = RopeSpec.from_hf({**PLAIN, "model_type": "cohere"}, convention=convention)
    assert spec.interleaved is False
    with pytest.raises(RopeConfigError, match=f"convention '{convention}' pairs halves"):
        RopeSpec.from_hf(PLAIN, convention=convention, interleaved=True)


def test_dynamic_is_read_for_serving_and_refused_for_eagle():
    config = v4({"type": "dynamic", "factor": 2.0})
    spec = RopeSpec.from_hf(config)
    assert (spec.variant, spec.original_max_position) == ("dynamic", 64)
    assert RopeSpec.from_hf(config, convention="dflash") == spec
    with pytest.raises(RopeConfigError, match="rope_type 'dynamic' is refused under convention 'eagle'"):
        RopeSpec.from_hf(config, convention="eagle")


@pytest.mark.parametrize("key", CANONICAL_ONLY)
def test_canonical_only_keys_in_a_legacy_dictionary_are_refused(key):
    for config in (v4({"type": "linear", "factor": 2.0, key: 1}), v5({"rope_type": "default", key: 1}), v4(**{key: 1})):
        with pytest.raises(RopeConfigError, match=rf"canonical-only keys '{key}'"):
            RopeSpec.from_hf(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            v4({"type": "linear", "rope_type": "dynamic", "factor": 2.0}),
            "rope_type and type contradict each other, got 'dyn",
        ),
        (v4({"type": "linear"}), "'factor' is missing; keys of rope_type 'linear' are factor, rope_type, type"),
        (v4({"type": "linear", "factor": None}), "'factor' is missing"),
        (v4({"type": "linear", "factor": 0.5}), "parameters['factor'] must be a number >= 1, got 0.5"),
        (v4({"type": "linear", "factor": "2"}), "parameters['factor'] must be a number >= 1, got '2'"),
        (v4({"type": "linear", "factor": 2.0, "scale": 1}), "'scale' is unknown; keys of rope_type 'linear' are"),
        (v4({"factor": 2.0}), "'rope_type' is missing beside 'factor', 'rope_theta'"),
        (
            v4({"type": "axial"}),
            "rope_type must be one of default, dynamic, linear, llama3, longrope, proportional, yarn, got",
        ),
        (v4({"rope_type": "yarn", "factor": 4.0}), "'original_max_position_embeddings' is missing"),
        (v4({**YARN, "attn_factor": 1.1}), "'attn_factor' is unknown"),
        (v4({**YARN, "mscale": 1.0}), "parameters['mscale_all_dim'] must be given together"),
        (
            v4(YARN, original_max_position_embeddings=16),
            "original_max_position_embeddings is 16 at the top and 32 elsewhere",
        ),
        (v4({**YARN, "max_position_embeddings": 99}), "max_position_embeddings is 64, and 99 beside rope_type"),
        (v4({"rope_type": "llama3", "factor": 8.0}), "'low_freq_factor' is missing, 'high_freq_factor' is missing"),
        (
            v4({"rope_type": "dynamic", "alpha": 9.0, "mscale": 1.0}),
            "mscale and mscale_all_dim must be equal beside alpha",
        ),
        (v4({"rope_type": "dynamic", "factor": 2.0, "mscale": 1.0}), "'mscale' is unknown"),
        (v4(rope_theta=None), "'rope_theta' is missing"),
        (v4(max_position_embeddings=None), "'max_position_embeddings' is missing"),
        (v4(head_dim=None), "'head_dim' is missing and hidden_size / num_attention_heads is None / None"),
        (v4(head_dim=None, hidden_size=30, num_attention_heads=4), "hidden_size / num_attention_heads is 30 / 4"),
        (v5({"rope_type": "default"}, rope_theta=5e5), "rope_theta is 500000.0 at the top and 10000.0 elsewhere"),
        (
            v5({}, rope_scaling={"type": "linear", "factor": 2.0}),
            "rope_parameters and rope_scaling must be one dictionary",
        ),
        (v4("linear"), "rope_parameters and rope_scaling must be one dictionary, or null, got 'linear'"),
        (v5({"partial_rotary_factor": 0.0}), "partial_rotary_factor must be a number in (0, 1], got 0.0"),
        (v5({"partial_rotary_factor": "half"}), "partial_rotary_factor must be a number in (0, 1], got 'half'"),
        (
            v5({"partial_rotary_factor": 0.9}),
            "must be an even number of channels, which rotate in pairs, got int(8 * 0.9) = 7",
        ),
        (v4(model_type="glm"), "'partial_rotary_factor' is missing, and this class has a default of its own"),
        (v4({"type": "mrope"}), "'mrope_section' is missing beside type 'mrope'"),
        (v5({"mrope_section": [2, 1], "rope_type": "default"}), "must add up to rotary_dim / 2 = 4, got [2, 1] = 3"),
        (
            v5({"mrope_interleaved": True, "rope_type": "default"}),
            "'mrope_section' is missing beside mrope_interleaved",
        ),
        (
            v5(
                {"mrope_section": [2, 1, 1], "mrope_interleaved": False, "rope_type": "default"},
                model_type="qwen3_vl_text",
            ),
            "mrope_interleaved must agree with the lane order 'interleaved'",
        ),
        (
            v5(
                {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_type": "default"},
                model_type="qwen2_vl_text",
            ),
            "mrope_interleaved must agree with the lane order 'contiguous'",
        ),
        (
            v5({"mrope_section": [2, 2], "rope_type": "default"}, model_type="hunyuan_vl_text"),
            "mrope_section is not supported",
        ),
        (v4(dual_chunk_attention_config={"chunk_size": 8}), "dual_chunk_attention_config is not supported"),
        (
            v4(model_type="granite_swa", layer_rope_theta=[10000.0, 0, 5e5]),
            "layer_rope_theta gives layers other bases, [10000.0, 0, 500000.0]",
        ),
        ({"model_type": "llama4", "text_config": PLAIN}, "it is a composite; read the configuration of its text part"),
        (GEMMA3, "layer_type must be one of 'full_attention', 'sliding_attention', got None"),
        (42, "config must be a transformers configuration or its dictionary, got int"),
        (v4(rope_theta=10**400), "theta must be a finite float32 number greater than 1, got an int of 1329 bits"),
        (v4(head_dim=2**63), "head_dim must be an int >= 1 and less than 2**63, got 9223372036854775808"),
        (v4(max_position_embeddings="64"), "max_position_embeddings must be an int >= 1 and less than 2**63, got '64'"),
        (
            v4({"type": "longrope", **LONG_LISTS, "original_max_position_embeddings": "32"}),
            "original_max_position_embeddings must be an int >= 1 and less than 2**63, got '32'",
        ),
        (v4({"type": "mrope", "mrope_section": 4}), "mrope_section must be a list of ints, got 4"),
        (v4(model_type="granite_swa", layer_rope_theta=3), "layer_rope_theta gives layers other bases, 3"),
        (
            v4(model_type="deepseek_v3", qk_rope_head_dim=8, rope_interleave="no"),
            "rope_interleave must be true or false, got 'no'",
        ),
        (v4(rope_type="linear", factor=4.0), "'rope_type' must stand in rope_parameters (or rope_scaling), not at the"),
        ({"type": "linear", "factor": 4.0}, "'type' must stand in rope_parameters (or rope_scaling), not at the top"),
        (v4(mrope_section=[2, 1, 1]), "'mrope_section' must stand in rope_parameters (or rope_scaling)"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config, text):
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec.from_hf(config)
    assert text in str(caught.value)


def test_a_refusal_names_the_model_type():
    with pytest.raises(RopeConfigError, match=r"^config of model_type 'llama': 'factor' is missing"):
        RopeSpec.from_hf(v4({"type": "linear"}))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"rope_theta": None},
            "'rope_theta' is missing; it stands in rope_parameters, or at the top as rope_theta or rotary_emb_base",
        ),
        ({"rope_theta": "1e4"}, "rope_theta must be a finite float32 number greater than 1, got '1e4'"),
        (
            {"rope_theta": None, "rotary_emb_base": 1, "model_type": "gpt_neox", "rotary_pct": 0.5},
            "rotary_emb_base must be a finite float32 number",
        ),
        ({"head_dim": 7}, "head_dim must be an even number of channels, which rotate in pairs, got 7"),
        (
            {"head_dim": None, "hidden_size": 28, "num_attention_heads": 4},
            "hidden_size / num_attention_heads must be an even number of channels, which rotate in pairs, got 7",
        ),
        (
            {"partial_rotary_factor": 0.4},
            "head_dim * partial_rotary_factor must be an even number of channels, which rotate in pairs, got int(8 ",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "rope variant 'linear': parameters['factor'] must be"),
    ],
)
def test_a_wrong_value_is_named_by_the_key_of_the_config(keys, text):
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec.from_hf({**PLAIN, **keys})
    assert str(caught.value).startswith(f"config of model_type '{keys.get('model_type', 'llama')}': {text}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"convention": "old"}, "convention must be one of serving, dflash, eagle, got 'old'"),
        ({"interleaved": "yes"}, "interleaved must be True, False or None, got 'yes'"),
        ({"layer_type": "full_attention"}, "layer_type must be None, got 'full_attention': one rope serves all layers"),
        ({"head_dim": 0}, "head_dim must be an int >= 1 and less than 2**63, got 0"),
        ({"head_dim": 16}, "head_dim must be None or 8, as 'head_dim' says, got 16; leave it out"),
        ({"max_position": 32}, "max_position must be None or 64, as max_position_embeddings says, got 32"),
        ({"interleaved": True}, "interleaved must be None or False, got True: this class pairs halves"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec.from_hf(PLAIN, **arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"model_type": "llama", "head_dim": 16}, 16),
        ({"model_type": "deepseek_v3", "head_dim": 32, "qk_rope_head_dim": 16}, 16),
        ({"model_type": "unknown", "kv_channels": 16, "hidden_size": 128, "num_attention_heads": 4}, 16),
        ({"model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 16}, 16),
        (
            {
                "model_type": "unknown",
                "layer_types": ["full_attention"] * 2,
                "per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 16}},
            },
            16,
        ),
    ],
)
def test_a_width_beside_that_of_the_config_must_be_the_same(keys, width):
    layer_type = "full_attention" if "layer_types" in keys or "global_head_dim" in keys else None
    config = {"max_position_embeddings": 64, "rope_theta": 1e4, **keys}
    if layer_type is not None:
        config["layer_types"] = ["full_attention"] * 2
        if keys["model_type"] != "unknown":
            del config["rope_theta"]
            config["rope_parameters"] = {layer_type: {"rope_type": "default", "rope_theta": 1e4}}
    read = functools.partial(
        RopeSpec.from_hf, config, layer_type=layer_type, interleaved=None if "unknown" not in keys.values() else False
    )
    assert read(head_dim=width) == read()
    with pytest.raises(RopeConfigError, match=f"head_dim must be None or {width}, as '.*' says, got 32; leave it out"):
        read(head_dim=32)


def test_a_width_that_the_config_leaves_open_is_given_beside_it():
    config = {**PLAIN, "head_dim": None, "hidden_size": 64, "num_attention_heads": 16}
    assert (RopeSpec.from_hf(config).head_dim, RopeSpec.from_hf(config, head_dim=16).head_dim) == (4, 16)


@pytest.mark.parametrize("convention", ["dflash", "eagle"])
def test_a_draft_whose_config_pairs_adjacent_channels_is_refused(convention):
    config = {**PLAIN, "model_type": "deepseek_v3", "qk_rope_head_dim": 8, "rope_interleave": True}
    with pytest.raises(RopeConfigError, match=f"rope_interleave is true, but convention '{convention}' pairs halves"):
        RopeSpec.from_hf(config, convention=convention)


def test_a_part_at_the_top_that_no_layer_type_has_is_refused():
    ropes = {kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0} for kind in ("a", "b")}
    config = {**PLAIN, "model_type": "x", "rope_theta": None, "rope_parameters": ropes, "partial_rotary_factor": 0.5}
    with pytest.raises(RopeConfigError, match=r"partial_rotary_factor is 0\.5 at the top and no layer type has it"):
        RopeSpec.from_hf(config, layer_type="a", interleaved=False)


def test_one_rope_for_all_layers_serves_each_layer_type_of_the_config():
    config = {**PLAIN, "layer_types": ["full_attention", "sliding_attention"]}
    assert RopeSpec.from_hf(config, layer_type="sliding_attention") == RopeSpec.from_hf(PLAIN)


def test_null_betas_are_their_defaults_and_a_null_factor_is_refused():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert RopeSpec.from_hf(v4({**yarn, "beta_fast": None, "beta_slow": None})) == RopeSpec.from_hf(v4(yarn))
    with pytest.raises(RopeConfigError, match="'factor' is missing"):
        RopeSpec.from_hf(v4({**yarn, "factor": None}))


def test_deepseek_yarn_is_not_a_type_of_a_dictionary():
    with pytest.raises(RopeConfigError, match=r"rope_type must be one of .*, got 'deepseek_yarn'"):
        RopeSpec.from_hf(v4({"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32}))


def test_a_null_type_is_plain_rope():
    assert RopeSpec.from_hf(v4({"type": None, "rope_type": None})) == RopeSpec.from_hf(PLAIN)


def test_a_layer_type_that_is_not_a_name_is_refused():
    config = {**PLAIN, "rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    with pytest.raises(RopeConfigError, match=r"layer_type must be one of 'full_attention', got \['full_attention'\]"):
        RopeSpec.from_hf(config, layer_type=["full_attention"])


def test_layers_without_rope_are_refused_by_their_type():
    config = {**PLAIN, "rope_theta": None, "rope_parameters": {"full_attention": None, "sliding_attention": {}}}
    with pytest.raises(RopeConfigError, match="layer_type 'full_attention' has no rotary embedding"):
        RopeSpec.from_hf(config, layer_type="full_attention")


LISTS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("spec", "model_type", "text"),
    [
        (
            plain_spec(False, rotary_dim=64),
            "llama",
            "it ignores partial_rotary_factor, but rotary_dim is 64 of head_dim 128",
        ),
        (
            plain_spec(False, variant="longrope", original_max_position=32, parameters={**LISTS, "switch": "short"}),
            "phi3",
            "it cannot carry this spec: parameters",
        ),
        (
            plain_spec(False, variant="dynamic", original_max_position=32, parameters={"factor": 2.0}),
            "llama",
            "it cannot carry this spec: original_max_position 32 would be read as 64",
        ),
        (plain_spec(False), "qwen2_vl_text", "it cannot carry this spec: axes None would be read as"),
        (
            plain_spec(False, axes={"sections": [32, 16, 16], "layout": "interleaved"}),
            "qwen2_vl_text",
            "mrope_interleaved must agree with the lane order 'contiguous'",
        ),
        (plain_spec(False), "nobody", "how it pairs channels is not known, so the spec's pairing could be lost"),
    ],
)
def test_what_a_class_would_read_differently_is_not_written(spec, model_type, text):
    with pytest.raises(RopeConfigError) as caught:
        spec.to_hf(model_type)
    assert text in str(caught.value)


class Stretch:
    """A third party's variant: every frequency divided by ``factor``, the keys of its configurations declared."""

    name, api_version = "stretch", 1
    defaults = {"slope": 1.0}
    hf_keys = {"factor": True, "slope": False, "original_max_position_embeddings": True}

    def validate(self, spec):
        check_spec(spec, {"factor": above(0.0), "slope": above(0.0)}, needs_original=True)

    def frequencies(self, spec, *, device, length=None):
        powers = inverse_powers(spec.theta, spec.rotary_dim)
        return RopeFrequencies((1 / powers / spec.parameters["factor"]).to(device))


def stretched(**keys):
    rope = {"rope_type": "stretch", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **keys}
    return {
        "model_type": "llama",
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {name: value for name, value in rope.items() if value is not None},
    }


def test_a_variant_of_a_stranger_is_read_from_a_configuration_by_the_keys_that_it_declares():
    with rope_variants.override("stretch", Stretch()):
        spec = RopeSpec.from_hf(stretched(slope=2.0))
        assert (spec.variant, spec.original_max_position) == ("stretch", 64)
        assert dict(spec.parameters) == {"factor": 4.0, "slope": 2.0}
        assert RopeSpec.from_hf(stretched()).parameters["slope"] == 1.0
        assert RopeSpec.from_hf(spec.to_hf("llama")) == spec


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"factor": None}, "'factor' is missing; keys of rope_type 'stretch' are factor, slope, original_max_position"),
        ({"original_max_position_embeddings": None}, "'original_max_position_embeddings' is missing"),
        ({"slant": 1.0}, "'slant' is unknown"),
        ({"slope": -1.0}, "must be a number > 0, got -1.0"),
    ],
)
def test_the_keys_of_a_stranger_are_read_as_strictly_as_ours(keys, text):
    with rope_variants.override("stretch", Stretch()), pytest.raises(RopeConfigError, match=re.escape(text)):
        RopeSpec.from_hf(stretched(**keys))


def test_a_key_of_a_stranger_at_the_top_is_refused_where_nothing_reads_it():
    text = "'slope' must stand beside rope_type, not at the top"
    with rope_variants.override("stretch", Stretch()), pytest.raises(RopeConfigError, match=text):
        RopeSpec.from_hf({**stretched(), "slope": 2.0})


def test_a_variant_that_declares_no_keys_has_no_name_in_configurations():
    class Same:
        name, api_version = "same", 1
        validate = frequencies = staticmethod(lambda spec, *, device=None, length=None: None)

    with rope_variants.override("same", Same()):
        with pytest.raises(RopeConfigError, match="variant 'same' declares no hf_keys"):
            plain_spec(False, variant="same").to_hf("llama")
        config = stretched(rope_type="same", factor=None, original_max_position_embeddings=None)
        with pytest.raises(
            RopeConfigError, match="must be a variant that declares hf_keys, got 'same', which declares"
        ):
            RopeSpec.from_hf(config)


@pytest.mark.parametrize("keys", [["factor"], {"factor"}, "factor", {1: True}])
def test_keys_that_are_not_a_mapping_are_the_fault_of_their_variant(keys):
    odd = Stretch()
    odd.hf_keys = keys
    text = "hf_keys of RoPE variant 'stretch' must be a mapping from keys to bools, got "
    with rope_variants.override("stretch", odd), pytest.raises(RopeConfigError, match=text):
        RopeSpec.from_hf(stretched())
