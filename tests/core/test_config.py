"""A training config names its attention, and everything wrong in it is said at once."""

import dataclasses
import pickle

import pytest
import torch

from polyattn import (
    AttentionConfig,
    AttentionScope,
    AttentionSpec,
    ConfigError,
    MaskLayout,
    QKNorm,
    RopeConfigError,
    RopeSpec,
    UnknownBackendError,
    UnsupportedAttentionError,
)
from polyattn_modules.groups import LayerGroup

WINDOW = "an int >= 1, a pair (left, right) of ints >= 0 (None or -1: no bound) or None"
ROPE = {
    "schema_version": 1,
    "variant": "default",
    "theta": 10000.0,
    "head_dim": 8,
    "rotary_dim": 8,
    "interleaved": False,
    "max_position": 64,
    "original_max_position": None,
    "parameters": {},
    "axes": None,
}


def test_a_config_resolves_its_backend_by_name():
    config = AttentionConfig.from_dict({"attn_backend": "sdpa", "rope": ROPE, "window": 16})
    layer = config.layer(0)
    assert layer.backend.name == "sdpa"
    assert layer.rope.theta == 10000.0
    assert layer.window == 16


def test_groups_override_by_list_and_by_slice_and_the_last_wins():
    config = AttentionConfig(
        attn_backend="sdpa",
        rope=ROPE,
        window=4,
        groups=[
            {"layers": "5::6", "window": None, "rope": {**ROPE, "theta": 1e6}},
            {"layers": [5, 7], "attn_backend": "eager"},
        ],
    )
    assert [config.layer(i).window for i in range(12)] == [4] * 5 + [4] + [4] * 5 + [None]
    assert config.layer(11).rope.theta == 1e6
    assert [config.layer(i).backend.name for i in (4, 5, 7, 11)] == ["sdpa", "eager", "eager", "sdpa"]


@pytest.mark.parametrize("index", [-1, "x", True])
def test_a_layer_is_an_index(index):
    with pytest.raises(ConfigError, match="layer must be an index >= 0"):
        AttentionConfig(attn_backend="sdpa").layer(index)


def test_a_config_survives_pickling():
    config = AttentionConfig(attn_backend="sdpa", rope=ROPE, groups=[{"layers": "::2", "window": 3}])
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.layer(2).window == 3


def test_the_rope_of_a_transformers_configuration_is_read():
    written = RopeSpec.from_dict(ROPE).to_hf("llama")
    assert AttentionConfig(rope=written).layer(0).rope == RopeSpec.from_dict(ROPE)


def test_the_short_form_of_a_rope_is_the_default_variant_on_whole_heads_in_halves():
    config = AttentionConfig.from_dict({"rope": {"rope_theta": 5e5}, **SIZES})
    want = {**ROPE, "theta": 5e5, "max_position": 2**31 - 1}
    assert config.layer(0).rope == RopeSpec.from_dict(want)
    narrow = AttentionConfig(rope={"rope_theta": 5e5}, head_dim=4, **SIZES)
    assert narrow.layer(0).rope.rotary_dim == 4


def test_the_short_form_of_a_rope_follows_the_sizes_of_each_group():
    groups = [{"layers": [1], "head_dim": 16}, {"layers": [2], "rope": {"rope_theta": 1e6}}]
    config = AttentionConfig(rope={"rope_theta": 1e4}, **SIZES, groups=groups)
    config = pickle.loads(pickle.dumps(dataclasses.replace(config, window=3)))
    assert [config.layer(i).rope.head_dim for i in range(3)] == [8, 16, 8]
    assert [config.layer(i).rope.theta for i in range(3)] == [1e4, 1e4, 1e6]


@pytest.mark.parametrize(
    "further", [{"rope_type": "yarn"}, {"rotary_dim": 4}, {"rope_scaling": None}, {"variant": "x"}]
)
def test_a_further_key_beside_the_short_form_of_a_rope_is_refused_with_both_full_forms(further):
    with pytest.raises(
        RopeConfigError,
        match=r"^rope: rope_theta alone is the short form \(variant default, the whole head rotates, halves in pairs\) "
        rf"and must stand alone, got also '{next(iter(further))}'; .*canonical form .*schema_version: 1.*"
        r"transformers form \(model_type, .*\)$",
    ):
        AttentionConfig(rope={"rope_theta": 1e4, **further}, **SIZES)


def test_the_short_form_of_a_rope_needs_the_width_of_a_head():
    for sizes in ({}, {"num_heads": 4}, {"hidden_size": 32}):
        with pytest.raises(
            ConfigError,
            match=r"^rope_theta alone must stand beside the width of a head \(head_dim, or hidden_size and num_heads\)",
        ):
            AttentionConfig(rope={"rope_theta": 1e4}, **sizes)
    with pytest.raises(ConfigError, match=r"hidden_size must be a multiple of num_heads .*; give head_dim"):
        AttentionConfig(rope={"rope_theta": 1e4}, **{**SIZES, "hidden_size": 30})
    with pytest.raises(
        RopeConfigError, match=r"^rope: rope_theta must be a finite float32 number greater than 1, got '10000'"
    ):
        AttentionConfig(rope={"rope_theta": "10000"}, **SIZES)
    with pytest.raises(RopeConfigError, match=r"^groups\[0\].rope: rope_theta must be a finite float32 number"):
        AttentionConfig(**SIZES, groups=[{"layers": [1], "rope": {"rope_theta": 1}}])


def test_a_rope_without_a_longest_sequence_is_not_exported():
    config = AttentionConfig(rope={"rope_theta": 1e4}, **SIZES)
    for export in (lambda: config.to_hf("llama", layers=2), lambda: config.layer(0).rope.to_hf("llama")):
        with pytest.raises(RopeConfigError, match=r"^max_position must be the longest sequence .*, got 2147483647, "):
            export()


def test_a_rope_of_no_form_and_an_odd_head_are_said_in_the_words_of_the_config():
    with pytest.raises(RopeConfigError, match=r"^rope: must be null for no rotation, or .*, got an empty mapping$"):
        AttentionConfig(rope={}, **SIZES)
    with pytest.raises(RopeConfigError, match=r"head_dim must be even where the whole head rotates, got 5$"):
        AttentionConfig(rope={"rope_theta": 1e4}, **{**SIZES, "head_dim": 5})


def test_one_fault_keeps_its_own_type():
    with pytest.raises(UnknownBackendError, match=r"attn_backend: .*spda"):
        AttentionConfig(attn_backend="spda")
    with pytest.raises(RopeConfigError, match=r"groups\[0\].rope: "):
        AttentionConfig(groups=[{"layers": [0], "rope": {"schema_version": 1}}])


def test_several_faults_are_one_error_that_lists_them_all():
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(attn_backend="spda", window=0, groups=[{"layers": [1], "window": "wide"}])
    text = str(caught.value)
    assert "has 3 faults" in text
    assert "spda" in text
    assert f"window: must be {WINDOW}, got 0" in text
    assert f"groups[0].window: must be {WINDOW}, got 'wide'" in text


def test_sequence_parallelism_is_refused_when_the_config_is_built():
    with pytest.raises(UnknownBackendError, match="sequence parallel") as caught:
        AttentionConfig(attn_backend="usp")
    assert "sdpa" in str(caught.value)


@pytest.mark.parametrize(
    "data, text",
    [
        (
            {"atn_backend": "sdpa"},
            r"unknown key 'atn_backend' .* the keys are attn_backend, backend_options, hidden",
        ),
        ({"attn_backend": 3}, "must be the name of a backend, got 3"),
        ({"attn_backend": "eager", "backend_options": {"x": 1}}, "backend 'eager' has no options, got 'x'"),
        ({"backend_options": ["x"]}, "backend_options must be a mapping, got list"),
        ({"rope": "yarn"}, "rope: must be a mapping or null, got str"),
        ({"groups": {"layers": [1]}}, "groups must be a list of mappings, got dict"),
        ({"groups": [{"window": 2}]}, r"groups\[0\] must be a mapping with 'layers'"),
        ({"groups": [{"layers": [1], "windw": 2}]}, r"unknown key 'windw' in groups\[0\]"),
        (
            {"groups": [{"layers": "0::2"}]},
            r"^groups\[0\] must override something .* got only layers='0::2'; give one of",
        ),
        ({"groups": [{"layers": "a:b"}]}, "slice 'start:stop:step' of non-negative numbers, got 'a:b'"),
        ({"groups": [{"layers": "0:-1"}]}, "got '0:-1'"),
        ({"groups": [{"layers": [-1]}]}, r"groups\[0\].layers must be a list of indices >= 0"),
    ],
)
def test_each_mistake_has_its_own_text(data, text):
    with pytest.raises(ConfigError, match=text):
        AttentionConfig.from_dict(data)


def test_files_that_are_missing_or_no_yaml_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the attention config .*nothing.yaml cannot be read: .*No such file"):
        AttentionConfig.from_yaml(tmp_path / "nothing.yaml")
    bad = tmp_path / "bad.yaml"
    for text, said in (
        ("attn_backend: [sdpa", "cannot be read"),
        ("- sdpa", "must hold a mapping of settings, got list"),
        ("[" * 5000, "it is nested too deeply"),
        ("window: 3\nwindow: 5", "the key 'window' is given twice"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=said):
            AttentionConfig.from_yaml(bad)


def test_a_path_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"^path must be a str or a Path, .* got int; .*AttentionConfig\.from_dict"):
        AttentionConfig.from_yaml(3)


def test_a_canonical_rope_without_its_version_is_told_from_a_transformers_one():
    for whole, named in (({"variant": "default"}, "'variant'"), (ROPE, "'axes', 'interleaved'")):
        rope = {key: value for key, value in whole.items() if key != "schema_version"}
        with pytest.raises(
            RopeConfigError, match=f"^rope: schema_version is missing beside {named}.*: 1, and the tran"
        ):
            AttentionConfig.from_dict({"attn_backend": "sdpa", "rope": rope})


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "attention.yaml"
    path.write_text("attn_backend: sdpa\nwindow: 8\n")
    assert AttentionConfig.from_yaml(path).layer(3).window == 8


NORM = {"position": "before", "scope": "head", "weighted": True, "eps": 1e-6}
SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}


def test_every_field_of_a_layer_can_be_set_and_overridden():
    values = {
        "dropout": 0.1,
        "bias": True,
        "output_bias": True,
        "softcap": 20.0,
        "sinks": True,
        "scale": 0.5,
        "qk_norm": NORM,
        "window": 3,
    }
    config = AttentionConfig.from_dict(
        {
            "attn_backend": "eager",
            **values,
            "groups": [
                {
                    "layers": [1],
                    **dict.fromkeys(("qk_norm", "window", "softcap", "scale")),
                    "dropout": 0.0,
                    "bias": False,
                    "output_bias": False,
                    "sinks": False,
                }
            ],
        }
    )
    first, second = config.layer(0), config.layer(1)
    assert {name: getattr(first, name) for name in values} == {**values, "qk_norm": QKNorm(**NORM)}
    assert second == type(second)(backend=first.backend)


def test_a_config_with_sizes_builds_whole_layers():
    config = AttentionConfig(
        attn_backend="sdpa",
        rope=ROPE,
        qk_norm=NORM,
        window=4,
        groups=[{"layers": "5::6", "window": None, "attn_backend": "eager"}],
        **SIZES,
    )
    layers = [config.layer(index).build() for index in range(6)]
    assert [layer.backend.name for layer in layers] == ["sdpa"] * 5 + ["eager"]
    assert [layer.spec.window for layer in layers] == [4] * 5 + [None]
    assert layers[0].spec.head_dim == layers[0].spec.v_head_dim == 8
    assert layers[0].q_norm.weight.shape == (8,)


def test_a_config_without_sizes_says_so_when_a_structure_is_asked_for():
    with pytest.raises(ConfigError, match="hidden_size, num_heads, num_kv_heads must be given"):
        AttentionConfig().layer(0).spec  # noqa: B018


def test_fields_that_contradict_each_other_are_found_in_every_group():
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(attn_backend="eager", rope=ROPE, **{**SIZES, "num_kv_heads": 3}, head_dim=16)
    assert "num_heads=4 and num_kv_heads=3; rope.head_dim must equal head_dim, got rope.head_dim=8" in str(caught.value)
    with pytest.raises(ConfigError, match=r"groups\[0\]: rope.head_dim must equal head_dim"):
        AttentionConfig(rope=ROPE, **SIZES, groups=[{"layers": [0]}, {"layers": [1], "head_dim": 4}][1:])
    with pytest.raises(ConfigError, match="num_kv_heads must be given"):
        AttentionConfig(hidden_size=32, num_heads=4)
    with pytest.raises(ConfigError, match="give head_dim"):
        AttentionConfig(**{**SIZES, "hidden_size": 30})


def test_what_a_backend_cannot_do_for_a_group_is_an_error_of_the_config_with_all_reasons():
    with pytest.raises(UnsupportedAttentionError) as caught:
        AttentionConfig(attn_backend="sdpa", softcap=20.0, **SIZES)
    assert [reason.feature for reason in caught.value.reasons] == ["softcap"]
    groups = [{"layers": [0], "attn_backend": "sdpa"}, {"layers": [1], "window": 0}]
    with pytest.raises(ConfigError) as several:
        AttentionConfig(attn_backend="eager", softcap=20.0, **SIZES, groups=groups)
    assert "has 2 faults" in str(several.value)
    assert "groups[0]: backend 'sdpa' cannot do this attention" in str(several.value)
    assert f"groups[1].window: must be {WINDOW}, got 0" in str(several.value)


def test_a_fault_that_groups_inherit_is_said_once():
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(**{**SIZES, "num_kv_heads": 3}, groups=[{"layers": [0], "window": 2}])
    assert str(caught.value).count("num_kv_heads=3") == 1


def test_a_serving_target_is_asked_about_every_group():
    config = {"rope": ROPE, "qk_norm": NORM, **SIZES, "serving_target": "sglang_dflash"}
    assert AttentionConfig.from_dict(config).serving_target == "sglang_dflash"
    groups = [{"layers": [1], "qk_norm": {**NORM, "position": "after"}}, {"layers": [2], "sinks": True, "scale": 0.1}]
    with pytest.raises(ConfigError) as caught:
        AttentionConfig.from_dict({**config, "groups": groups})
    text = str(caught.value)
    assert "groups[0]: serving_target 'sglang_dflash' cannot serve this attention" in text
    assert "a norm after the rotation" in text
    assert "groups[1]: serving_target" in text
    assert "sinks" in text
    assert "scale 0.1" in text


def test_a_serving_target_needs_sizes_and_must_be_known():
    with pytest.raises(
        ConfigError, match="serving_target must come with the sizes hidden_size, num_heads, num_kv_heads"
    ):
        AttentionConfig(serving_target="sglang_dflash")
    with pytest.raises(ConfigError, match="serving_target must be one of sglang_dflash, sglang_eagle"):
        AttentionConfig(serving_target="vllm", **SIZES)


def test_an_export_writes_all_layers_and_asks_the_target_again():
    config = AttentionConfig(rope=ROPE, qk_norm=NORM, **SIZES, window=16, groups=[{"layers": "2::3", "window": None}])
    written = config.to_hf("qwen3", layers=6)
    assert written["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert [AttentionSpec.from_hf(written, layer=i) for i in range(6)] == [config.layer(i).spec for i in range(6)]
    object.__setattr__(config, "serving_target", "sglang_eagle")  # a target that changed its mind after the config
    with pytest.raises(ConfigError, match="'sglang_eagle' cannot serve this attention:\n  - window"):
        config.to_hf("qwen3", layers=6)
    with pytest.raises(ConfigError, match="layers must be the number of layers, an int >= 1, got 0"):
        config.to_hf("qwen3", layers=0)


def test_two_ropes_are_exported_by_layer_type_or_refused():
    groups = [{"layers": "1::2", "window": None, "rope": {**ROPE, "theta": 1e6}}]
    config = AttentionConfig(rope=ROPE, qk_norm=NORM, **SIZES, window=16, groups=groups)
    written = config.to_hf("gemma3_text", layers=4)
    assert [AttentionSpec.from_hf(written, layer=i) for i in range(4)] == [config.layer(i).spec for i in range(4)]
    with pytest.raises((ConfigError, RopeConfigError)):
        config.to_hf("qwen3", layers=4)


def faults_of(**data):
    with pytest.raises(ConfigError) as caught:
        AttentionConfig.from_dict(data)
    error = pickle.loads(pickle.dumps(caught.value))
    assert all(str(fault) in str(error) for fault in error.faults)
    return [str(fault) for fault in error.faults]


def test_an_unknown_key_and_bad_groups_hide_no_other_fault():
    found = faults_of(
        atn_backend="sdpa",
        window=0,
        groups=[
            {"layers": "a:b", "windw": 3, "softcap": -1.0},
            "all",
            {"window": 0},
            {"layers": [0, 0], "attn_backend": "spda"},
            {"layers": [1], "window": 0},
        ],
    )
    begins = [
        "unknown key 'atn_backend'",
        "unknown key 'windw' in groups[0]",
        "groups[0].layers must be a slice",
        "groups[1] must be a mapping with 'layers', got 'all'",
        "groups[2] must be a mapping with 'layers', got {'window': 0}",
        "groups[3].layers must name each layer once, got [0, 0]",
        f"window: must be {WINDOW}, got 0",
        "groups[0].softcap: must be a positive number or None, got -1.0",
        f"groups[2].window: must be {WINDOW}, got 0",
        "groups[3].attn_backend: ",
        f"groups[4].window: must be {WINDOW}, got 0",
    ]
    assert [fault[: len(begin)] for fault, begin in zip(found, begins, strict=True)] == begins


def test_a_single_fault_lists_no_others():
    with pytest.raises(ConfigError) as caught:
        AttentionConfig.from_dict({"window": 0})
    assert caught.value.faults == ()


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("5:2", r"groups\[0\].layers must speak of a layer, got '5:2'"),
        ("3:3", r"groups\[0\].layers must speak of a layer, got '3:3'"),
        (":0", r"groups\[0\].layers must speak of a layer, got ':0'"),
        ([], r"groups\[0\].layers must be a list of indices >= 0 or a slice such as '5::6', got \[\]"),
        ([1, 0, 1], r"groups\[0\].layers must name each layer once, got \[1, 0, 1\]"),
    ],
)
def test_a_group_of_no_layer_or_of_one_twice_is_refused(layers, text):
    with pytest.raises(ConfigError, match=text):
        AttentionConfig(groups=[{"layers": layers, "window": 3}])


def test_groups_that_a_model_has_no_layer_for_are_refused_when_their_number_is_known():
    groups = [{"layers": "1::2", "window": 3}, {"layers": [2, 7], "window": 3}, {"layers": "6:9", "window": 3}]
    config = AttentionConfig(rope=ROPE, qk_norm=NORM, **SIZES, groups=groups)
    config.check_layers(8)
    with pytest.raises(ConfigError) as caught:
        config.to_hf("qwen3", layers=6)
    assert str(caught.value) == (
        "groups[1].layers must lie within the 6 layers of the model, got [2, 7]; "
        "groups[2].layers must lie within the 6 layers of the model, got '6:9'"
    )


def test_a_config_is_changed_by_replace_and_checked_again():
    config = AttentionConfig(attn_backend="sdpa", groups=[{"layers": [1], "window": 3}])
    again = dataclasses.replace(config, window=9)
    assert [again.layer(index).window for index in range(2)] == [9, 3]
    with pytest.raises(ConfigError, match=r"groups\[0\].layers"):
        dataclasses.replace(config, groups=[LayerGroup((), {})])


@pytest.mark.parametrize("value", ["1" + "0" * 400, "0x1" + "0" * 5000, "1" * 5000, ".inf", ".nan"])
@pytest.mark.parametrize("key", ["softcap", "scale", "dropout", "hidden_size", "head_dim", "eps", "theta", "factor"])
def test_a_number_too_large_for_anything_is_a_fault_of_its_key_or_of_the_file(tmp_path, key, value):
    path = tmp_path / "attention.yaml"
    text = f"{key}: {value}"
    if key == "eps":
        text = f"qk_norm: {{position: before, scope: head, weighted: true, eps: {value}}}"
    elif key in ("theta", "factor"):
        theta, factor = (value, 2.0) if key == "theta" else (1.0e4, value)
        text = (
            f"rope: {{schema_version: 1, variant: linear, theta: {theta}, head_dim: 8, rotary_dim: 8, "
            "interleaved: false, max_position: 64, original_max_position: null, "
            f"parameters: {{factor: {factor}}}, axes: null}}"
        )
    path.write_text(text)
    with pytest.raises((ConfigError, RopeConfigError)) as caught:
        AttentionConfig.from_yaml(path)
    assert key in str(caught.value) or "cannot be read: Exceeds the limit" in str(caught.value)


def test_a_window_wider_than_any_position_is_not_a_window():
    config = AttentionConfig(attn_backend="sdpa", window=2**70, **SIZES)
    layer, plain = config.layer(0).build(), AttentionConfig(attn_backend="sdpa", **SIZES).layer(0).build()
    plain.load_state_dict(layer.state_dict())
    hidden = torch.randn(2, 6, 32)
    for layout in (MaskLayout.causal(6), MaskLayout.packed([2, 4]), MaskLayout.padded(torch.ones(2, 6).bool())):
        for name in ("eager", "sdpa"):
            layer.set_backend(name)
            plain.set_backend(name)
            assert torch.equal(layer(hidden, AttentionScope(layout), None), plain(hidden, AttentionScope(layout), None))


def test_an_unknown_name_in_a_pydantic_config_is_a_validation_error_like_any_other_mistake():
    pydantic = pytest.importorskip("pydantic")

    class Training(pydantic.BaseModel):
        attention: dict

        @pydantic.field_validator("attention")
        @classmethod
        def check(cls, data):
            AttentionConfig.from_dict(data)
            return data

    good = {"schema_version": 1, "variant": "cosine", "theta": 1e4, "head_dim": 8, "rotary_dim": 8}
    rope = {**good, "interleaved": False, "max_position": 8, "original_max_position": None, "parameters": {}}
    for wrong in ({"attn_backend": "spda"}, {"rope": {**rope, "axes": None}}, {"window": 0}):
        with pytest.raises(pydantic.ValidationError, match=r"spda|cosine|window"):
            Training(attention=wrong)
