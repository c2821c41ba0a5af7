"""A training config names its attention, and everything wrong in it is said at once."""

import pickle

import pytest

from polyattn import AttentionConfig, ConfigError, RopeConfigError, UnknownBackendError

ROPE = {
    "schema_version": 1,
    "variant": "default",
    "theta": 10000.0,
    "head_dim": 8,
    "rotary_dim": 8,
    "interleaved": False,
    "max_position": 64,
    "original_max_position": 64,
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


def test_a_config_survives_pickling():
    config = AttentionConfig(attn_backend="sdpa", rope=ROPE, groups=[{"layers": "::2", "window": 3}])
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.layer(2).window == 3


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
    assert "window: must be an int >= 1 or null, got 0" in text
    assert "groups[0].window: must be an int >= 1 or null, got 'wide'" in text


def test_sequence_parallelism_is_refused_when_the_config_is_built():
    with pytest.raises(UnknownBackendError, match="sequence parallel") as caught:
        AttentionConfig(attn_backend="usp")
    assert "sdpa" in str(caught.value)


@pytest.mark.parametrize(
    "data, text",
    [
        ({"atn_backend": "sdpa"}, r"unknown key 'atn_backend' .* the keys are attn_backend, backend_options, rope"),
        ({"attn_backend": 3}, "must be the name of a backend, got 3"),
        ({"attn_backend": "sdpa", "backend_options": {"x": 1}}, "backend 'sdpa' has no options, got x"),
        ({"backend_options": ["x"]}, "backend_options must be a mapping, got list"),
        ({"rope": "yarn"}, "rope: must be a mapping or null, got str"),
        ({"groups": {"layers": [1]}}, "groups must be a list of mappings, got dict"),
        ({"groups": [{"window": 2}]}, r"groups\[0\] must be a mapping with 'layers'"),
        ({"groups": [{"layers": [1], "windw": 2}]}, r"unknown key 'windw' in groups\[0\]"),
        ({"groups": [{"layers": "a:b"}]}, "slice 'start:stop:step' of non-negative numbers, got 'a:b'"),
        ({"groups": [{"layers": "0:-1"}]}, "got '0:-1'"),
        ({"groups": [{"layers": [-1]}]}, r"groups\[0\].layers must be a list of indices >= 0"),
    ],
)
def test_each_mistake_has_its_own_text(data, text):
    with pytest.raises(ConfigError, match=text):
        AttentionConfig.from_dict(data)


def test_files_that_are_missing_or_no_yaml_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the attention config .*nothing.yaml.*No such file"):
        AttentionConfig.from_yaml(tmp_path / "nothing.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("attn_backend: [sdpa")
    with pytest.raises(ConfigError, match="must be a YAML file"):
        AttentionConfig.from_yaml(bad)
    bad.write_text("- sdpa")
    with pytest.raises(ConfigError, match="must be a mapping, got list"):
        AttentionConfig.from_yaml(bad)


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "attention.yaml"
    path.write_text("attn_backend: sdpa\nwindow: 8\n")
    assert AttentionConfig.from_yaml(path).layer(3).window == 8
