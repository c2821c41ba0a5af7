"""What a serving engine cannot read is known before training, with every reason."""

import dataclasses

import pluggy
import pytest

from polyattn import AttentionSpec, ConfigError, QKNorm, Reason, RopeSpec, check_servable
from polyattn.registry import hooks

TARGETS = ["sglang_dflash", "sglang_eagle"]
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
NORM = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
SPEC = AttentionSpec(
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    rope=ROPE,
    qk_norm=NORM,
    window=None,
    dropout=0.0,
    bias=False,
    output_bias=False,
    softcap=None,
    sinks=False,
    scale=None,
)


def codes(target, **changes):
    return [reason.code for reason in check_servable(dataclasses.replace(SPEC, **changes), target)]


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_target_computes_has_no_reason_against_it(target):
    assert codes(target) == []
    assert codes(target, scale=8**-0.5, dropout=0.1) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"qk_norm": dataclasses.replace(NORM, position="after")}, "norm_after_rope"),
        ({"qk_norm": dataclasses.replace(NORM, scope="projection")}, "norm_over_projection"),
        ({"qk_norm": dataclasses.replace(NORM, weighted=False)}, "norm_without_weight"),
        ({"rope": dataclasses.replace(ROPE, interleaved=True)}, "pairing"),
        ({"rope": None}, "no_rope"),
        ({"softcap": 3.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"scale": 0.5}, "scale"),
        ({"v_head_dim": 4}, "value_width"),
        ({"input_size": 48}, "input_size"),
        ({"bias": True}, "one_bias"),
    ],
)
def test_each_difference_is_one_reason(target, changes, code):
    assert codes(target, **changes) == [code]


@pytest.mark.parametrize("target", TARGETS)
def test_all_differences_are_said_at_once(target):
    norm = QKNorm(position="after", scope="projection", weighted=False, eps=1e-6)
    changes = {"qk_norm": norm, "rope": dataclasses.replace(ROPE, interleaved=True)}
    assert codes(target, **changes) == ["norm_after_rope", "norm_over_projection", "norm_without_weight", "pairing"]


def test_targets_differ_in_a_missing_norm_in_windows_and_in_partial_rotation():
    partial = dataclasses.replace(ROPE, rotary_dim=4)
    assert codes("sglang_dflash", qk_norm=None) == ["no_norm"]
    assert codes("sglang_eagle", qk_norm=None) == []
    assert codes("sglang_dflash", window=4) == []
    assert codes("sglang_eagle", window=4) == ["window"]
    assert codes("sglang_dflash", rope=partial) == ["partial_rotary"]
    assert codes("sglang_eagle", rope=partial) == []
    double = 2 * SPEC.hidden_size
    assert codes("sglang_dflash", input_size=double) == ["input_size"]
    assert codes("sglang_eagle", input_size=double) == []


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"must be one of sglang_dflash, sglang_eagle or known to .*, got 'sglang'"):
        check_servable(SPEC, "sglang")


@pytest.mark.parametrize(
    ("spec", "target", "text"),
    [
        (None, "sglang_eagle", r"^spec must be an AttentionSpec, got NoneType; a layer has one as layer\.spec"),
        (SPEC.to_dict(), "sglang_eagle", "^spec must be an AttentionSpec, got dict"),
        (SPEC, ["sglang_eagle"], r"^serving_target must be the name of a target, .* got \['sglang_eagle'\]"),
    ],
)
def test_arguments_of_another_type_are_refused(spec, target, text):
    with pytest.raises(ConfigError, match=text):
        check_servable(spec, target)


def test_an_export_for_a_target_refuses_with_every_reason():
    assert SPEC.to_hf("qwen3", serving_target="sglang_dflash")["model_type"] == "qwen3"
    changed = dataclasses.replace(SPEC, sinks=True, scale=0.5)
    with pytest.raises(ConfigError) as caught:
        changed.to_hf("qwen3", serving_target="sglang_dflash")
    text = str(caught.value)
    assert text.startswith("serving_target 'sglang_dflash' cannot serve this attention:")
    assert "sinks: got sinks, need no sinks" in text
    assert "scale: got scale 0.5, need head_dim ** -0.5" in text


class Engine:
    """A hook that knows a target of its own and adds to a built-in one."""

    @pluggy.HookimplMarker("polyattn")
    def polyattn_check_servable(self, spec, target):
        if target == "my_engine":
            return () if spec.num_kv_heads > 1 else (Reason("mqa", "gqa", "one KV head", "two"),)
        if target == "sglang_eagle":
            return (Reason("site", "gqa", "anything", "nothing today"),)
        return None


@pytest.fixture
def engine():
    hooks.register(Engine(), "engine")
    yield
    hooks.unregister("engine")


@pytest.mark.usefixtures("engine")
def test_a_hook_adds_targets_and_reasons():
    assert codes("my_engine") == []
    assert codes("my_engine", num_kv_heads=1) == ["mqa"]
    assert codes("sglang_eagle") == ["site"]
    assert codes("sglang_dflash") == []
    with pytest.raises(ConfigError, match="got 'sglang'"):
        check_servable(SPEC, "sglang")
