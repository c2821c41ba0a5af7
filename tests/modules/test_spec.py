"""The written form of an attention spec, and how configurations of transformers models are read into it."""

import copy
import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from families import FAMILIES, config_of
from polyattn import (
    AttentionConfig,
    AttentionSpec,
    ConfigError,
    GroupedQueryAttention,
    QKNorm,
    RopeConfigError,
    RopeSpec,
)

FOLDER = Path(__file__).parents[1] / "data" / "specs"
GOLDEN = sorted(path.stem for path in FOLDER.glob("*.json") if not path.name.endswith(".config.json"))
#: The fields of each version of the schema. A change of the fields needs a new version, with its own line here.
FIELDS = {
    1: {
        "": (
            *(
                "hidden_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "v_head_dim",
                "rope",
                "qk_norm",
                "window",
                "dropout",
            ),
            *("bias", "output_bias", "softcap", "sinks", "scale"),
            *("input_size", "layout", "output_gate", "value_norm", "shared_keys_values", "query_scale"),
        ),
        "qk_norm": ("position", "scope", "weighted", "eps"),
    }
}


def golden(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def golden_config(name):
    file = json.loads((FOLDER / f"{name}.config.json").read_text())
    return file["config"], file["layer"]


def without(data, path):
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return data


def paths(data, prefix=()):
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


def test_there_is_a_recorded_spec_for_each_family():
    configs = [golden_config(name)[0]["model_type"] for name in GOLDEN]
    assert set(configs) == set(FAMILIES)


@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_specs_round_trip_byte_for_byte(name):
    spec = AttentionSpec.from_dict(golden(name))
    assert json.dumps(spec.to_dict(), indent=2) + "\n" == (FOLDER / f"{name}.json").read_text()


def test_a_recorded_spec_without_any_one_field_is_refused_by_its_name():
    for path in paths(golden("qwen3")):
        with pytest.raises((ConfigError, RopeConfigError), match=path[-1]):
            AttentionSpec.from_dict(without(golden("qwen3"), path))


@pytest.mark.parametrize("name", GOLDEN)
def test_configurations_are_read_as_recorded(name):
    config, layer = golden_config(name)
    before = copy.deepcopy(config)
    assert AttentionSpec.from_hf(config, layer=layer).to_dict() == golden(name)
    assert config == before


@pytest.mark.parametrize("name", GOLDEN)
def test_a_spec_is_written_so_that_it_is_read_back(name):
    spec, model_type = AttentionSpec.from_dict(golden(name)), golden_config(name)[0]["model_type"]
    written = spec.to_hf(model_type, layers=3)
    assert written["num_hidden_layers"] == 3
    assert all(AttentionSpec.from_hf(json.loads(json.dumps(written)), layer=layer) == spec for layer in range(3))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_configuration_objects_read_like_their_dictionaries(family):
    config = config_of(family)
    for layer in range(config.num_hidden_layers):
        of_object = AttentionSpec.from_hf(config, layer=layer)
        assert of_object == AttentionSpec.from_hf(config.to_dict(), layer=layer)
        assert of_object == AttentionSpec.from_hf({"model_type": "outer", "text_config": config.to_dict()}, layer=layer)


def test_a_change_of_the_fields_needs_a_new_version():
    fields = {
        "": tuple(field.name for field in dataclasses.fields(AttentionSpec)),
        "qk_norm": tuple(field.name for field in dataclasses.fields(QKNorm)),
    }
    assert FIELDS[AttentionSpec.SCHEMA_VERSION] == fields, "raise SCHEMA_VERSION and list the new fields here"


def test_equal_specs_have_one_written_form_and_one_hash():
    spec = AttentionSpec.from_dict(golden("qwen3"))
    other = AttentionSpec.from_dict({**golden("qwen3"), "dropout": 0})
    assert other == spec
    assert hash(other) == hash(spec)
    assert json.dumps(other.to_dict()) == json.dumps(spec.to_dict())


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_another_version_is_refused(version):
    with pytest.raises(ConfigError, match=f"schema_version of an attention spec must be 1, got {version!r}"):
        AttentionSpec.from_dict({**golden("llama"), "schema_version": version})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"extra": 1}, "extra is unknown"),
        ({"qk_norm": {**golden("qwen3")["qk_norm"], "extra": 1}}, r"qk_norm\.extra is unknown"),
        ({"qk_norm": "head"}, "qk_norm must be a mapping, got str"),
        ({"num_kv_heads": 5}, "num_heads=32 and num_kv_heads=5"),
        (
            {"window": 0, "dropout": 2.0},
            r"window must be an int >= 1, a pair \(left, right\) .*, got 0; dropout must be a number in \[0, 1\)",
        ),
        ({"head_dim": 64}, "rope.head_dim must equal head_dim, got rope.head_dim=128 and head_dim=64"),
    ],
)
def test_a_wrong_field_of_the_written_form_is_named(changes, text):
    with pytest.raises(ConfigError, match=text):
        AttentionSpec.from_dict({**golden("qwen3"), **changes})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("output_gate", "head", "must be None: a gate on the output is not built yet, got 'head'"),
        ("value_norm", {"eps": 1e-6}, "must be None: a norm of the values is not built yet, got dict"),
        (
            *("shared_keys_values", True),
            "must be False: a layer with the keys and values of another one is not built yet, got True",
        ),
        ("shared_keys_values", None, "must be False: .* got None"),
        ("query_scale", 0.5, "must be None: a factor of queries by their position is not built yet, got 0.5"),
    ],
)
def test_a_field_whose_feature_is_not_built_is_part_of_the_form_and_takes_only_the_value_that_turns_it_off(
    field, value, text
):
    spec = AttentionSpec.from_dict(golden("llama"))
    for make in (
        lambda: AttentionSpec.from_dict({**golden("llama"), field: value}),
        lambda: dataclasses.replace(spec, **{field: value}),
        lambda: GroupedQueryAttention(32, 4, 2, **{field: value}),
    ):
        with pytest.raises(ConfigError, match=f"^{field} {text}$"):
            make()
    with pytest.raises(ConfigError, match=f"^{field}: {text}$"):
        AttentionConfig.from_dict({field: value})


def is_required(field):
    return field.default is dataclasses.MISSING


def test_configs_and_layers_take_their_fields_and_defaults_from_one_list():
    spec = AttentionSpec(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8)
    assert AttentionConfig(attn_backend="eager", hidden_size=32, num_heads=4, num_kv_heads=2).layer(0).spec == spec
    assert GroupedQueryAttention(32, 4, 2).spec == spec
    taken = inspect.signature(GroupedQueryAttention).parameters
    optional = {field.name: field.default for field in dataclasses.fields(AttentionSpec) if not is_required(field)}
    assert {name: taken[name].default for name in optional} == optional
    assert taken["v_head_dim"].default is None
    with pytest.raises(TypeError, match="windw"):
        GroupedQueryAttention(32, 4, 2, windw=3)


@pytest.mark.parametrize("key", ["qk_norm", "has_weight", "schema_version", "sinks", "v_head_dim"])
def test_a_configuration_with_a_key_of_the_canonical_form_is_refused(key):
    config, layer = golden_config("qwen3")
    with pytest.raises(ConfigError, match=f"config must not carry the canonical-only keys '{key}'"):
        AttentionSpec.from_hf({**config, key: 1}, layer=layer)


@pytest.mark.parametrize("key", ["interleaved", "rotary_dim", "variant"])
def test_the_keys_of_a_canonical_rope_are_refused_too_even_where_a_layer_does_not_rotate(key):
    config, _ = golden_config("llama4")
    with pytest.raises(RopeConfigError, match=f"canonical-only keys '{key}'"):
        AttentionSpec.from_hf({**config, "attn_temperature_tuning": False, key: 1}, layer=3)


@pytest.mark.parametrize(
    ("name", "changes", "layer", "text"),
    [
        ("llama", {"model_type": "gpt2"}, 0, "model_type must be one of llama, mistral, .*, got 'gpt2'"),
        ("llama", {"num_attention_heads": ...}, 0, "'num_attention_heads' is missing"),
        ("llama", {"hidden_size": 30, "num_attention_heads": 4}, 0, "'head_dim' is missing and .* is 30 / 4"),
        ("llama", {}, -1, "layer must be the index of a layer, an int >= 0, got -1"),
        ("qwen3", {"head_dim": None}, 0, "'head_dim' is missing, and the default of this class is not hidden_size"),
        ("qwen3", {"num_key_value_heads": ...}, 0, "'num_key_value_heads' is missing"),
        ("qwen3", {"rms_norm_eps": ...}, 0, "'rms_norm_eps' is missing"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 0, "sliding_window must be an int, got None"),
        ("qwen3", {"layer_types": ["full_attention"]}, 1, "layer must be one of the 1 of layer_types, got 1"),
        (
            "qwen3",
            {"layer_types": ["linear_attention"]},
            0,
            "must be of type full_attention or sliding_attention",
        ),
        ("mistral", {"sliding_window": ...}, 0, "'sliding_window' is missing; null means none"),
        ("gemma3_sliding", {"sliding_window_pattern": ...}, 0, "'sliding_window_pattern' is missing"),
        ("gemma3_sliding", {"attn_logit_softcapping": 30.0}, 0, "attn_logit_softcapping must be off, got 30.0"),
        ("gemma3_sliding", {"use_bidirectional_attention": True}, 0, "use_bidirectional_attention must be off"),
        (
            *("mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}),
            *(0, "llama_4_scaling_beta must be absent or 0, got 0.1: it scales queries by their position"),
        ),
        (
            *("mistral", {"rope_scaling": {"sliding_attention": {"llama_4_scaling_beta": 0.2}}}),
            *(0, "llama_4_scaling_beta must be absent or 0, got 0.2"),
        ),
        (
            "llama",
            {"model_type": "deepseek_v3", "v_head_dim": 128},
            0,
            "model_type must be one of llama, .*, got 'deeps",
        ),
        ("llama4", {"attention_chunk_size": 8192}, 0, r"got 'chunked_attention'; give the chunks in the layout"),
        ("llama4", {}, 3, "attn_temperature_tuning must be false, got true"),
        ("llama4", {"no_rope_layers": [1]}, 1, "no_rope_layers must say whether layer 1 rotates"),
        ("llama4", {"use_qk_norm": ...}, 0, "'use_qk_norm' is missing"),
        ("llama", {"num_attention_heads": "4"}, 0, "num_attention_heads must be an int >= 1, got '4'"),
        ("llama", {"hidden_size": 32.0}, 0, "hidden_size must be an int >= 1, got 32.0"),
        ("llama", {"attention_bias": "no"}, 0, "attention_bias must be true or false, got 'no'"),
        ("gemma3_sliding", {"sliding_window_pattern": 0}, 0, "sliding_window_pattern must be an int >= 1, got 0"),
        ("gemma3_sliding", {"query_pre_attn_scalar": -4}, 0, "query_pre_attn_scalar must be a positive number, got -4"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": "x"}, 0, "max_window_layers must be an int >= 0"),
        ("qwen3", {"layer_types": "full_attention"}, 0, "layer_types must be a list of the types of all layers"),
        ("llama4", {"no_rope_layers": None, "no_rope_layer_interval": 0}, 0, "no_rope_layer_interval must be an int"),
        ("llama4", {"no_rope_layers": 3}, 0, "no_rope_layers must be a list of 0 and 1, got 3"),
    ],
)
def test_what_a_configuration_leaves_unsaid_is_an_error_that_names_the_key(name, changes, layer, text):
    config = {key: value for key, value in {**golden_config(name)[0], **changes}.items() if value is not ...}
    with pytest.raises(ConfigError, match=text):
        AttentionSpec.from_hf(config, layer=layer)


def test_old_conventions_of_each_family_are_resolved_by_name():
    gemma, _ = golden_config("gemma3_sliding")
    assert [AttentionSpec.from_hf(gemma, layer=i).window for i in range(6)] == [512] * 5 + [None]
    assert [AttentionSpec.from_hf(gemma, layer=i).rope.theta for i in (4, 5)] == [10000.0, 1000000.0]
    qwen = {**golden_config("qwen3")[0], "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert [AttentionSpec.from_hf(qwen, layer=i).window for i in range(4)] == [None, None, 64, 64]
    llama4 = {**golden_config("llama4")[0], "no_rope_layers": None, "no_rope_layer_interval": 4}
    llama4["attn_temperature_tuning"] = False
    assert [AttentionSpec.from_hf(llama4, layer=i).rope is None for i in range(4)] == [False, False, False, True]
    assert [AttentionSpec.from_hf(llama4, layer=i).qk_norm is None for i in range(4)] == [False, False, False, True]
    llama = golden_config("llama")[0]
    assert AttentionSpec.from_hf({**llama, "num_key_value_heads": None, "head_dim": None}).num_kv_heads == 32
    assert AttentionSpec.from_hf({**llama, "attention_bias": True}).output_bias is True


@pytest.mark.parametrize(
    ("name", "changes", "model_type", "text"),
    [
        ("qwen3", {}, "llama", "cannot carry this spec: qk_norm .* would be read as None"),
        ("llama", {}, "qwen3", "cannot carry this spec: qk_norm None would be read as"),
        (
            "llama",
            {"softcap": 3.0, "sinks": True},
            "llama",
            "softcap 3.0 would be read as None; sinks True would",
        ),
        ("llama", {"window": 8}, "llama", "window 8 would be read as None"),
        ("llama", {"bias": True}, "llama", "output_bias False would be read as True|bias True would be read"),
        ("llama", {}, "gpt2", "model_type must be one of"),
    ],
)
def test_a_class_that_would_lose_a_field_is_refused_with_the_field(name, changes, model_type, text):
    spec = dataclasses.replace(AttentionSpec.from_dict(golden(name)), **changes)
    with pytest.raises(ConfigError, match=text):
        spec.to_hf(model_type)


def test_a_class_with_the_other_pairing_is_refused():
    spec = AttentionSpec.from_dict(golden("qwen3"))
    adjacent = dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, interleaved=True))
    with pytest.raises(RopeConfigError, match="pairs halves, the spec adjacent channels"):
        adjacent.to_hf("qwen3")


def test_drafts_of_older_conventions_are_read_by_naming_them():
    config = {**golden_config("llama")[0], "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert isinstance(AttentionSpec.from_hf(config, convention="dflash").rope, RopeSpec)
    with pytest.raises(RopeConfigError, match="refused under convention 'eagle'"):
        AttentionSpec.from_hf(config, convention="eagle")


def test_the_first_layer_of_an_eagle3_draft_reads_twice_the_hidden_width_and_is_written_so():
    config = {**AttentionSpec.from_dict(golden("llama")).to_hf("llama"), "architectures": ["LlamaForCausalLMEagle3"]}
    read = [AttentionSpec.from_hf(config, layer=layer, convention="eagle") for layer in (0, 1)]
    assert [spec.input_size for spec in read] == [2 * read[0].hidden_size, None]
    assert AttentionSpec.from_hf(config).input_size is None
    written = read[0].to_hf("llama", serving_target="sglang_eagle")
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert AttentionSpec.from_hf(written, convention="eagle") == read[0]
    with pytest.raises(ConfigError, match="input_size 99 would be read as None"):
        dataclasses.replace(read[0], input_size=99).to_hf("llama")


def test_the_name_of_a_layout_is_no_part_of_a_configuration():
    spec = AttentionSpec.from_dict(golden("llama"))
    named = dataclasses.replace(spec, layout="sliding")
    assert AttentionSpec.from_dict(named.to_dict()) == named
    assert AttentionSpec.from_hf(named.to_hf("llama")) == spec
    with pytest.raises(ConfigError, match="layout must be a name or None, got 3"):
        dataclasses.replace(spec, layout=3)
