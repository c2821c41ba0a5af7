"""Windows of two sides ``(left, right)`` in layers, specs, configs, serving targets and exports."""

import dataclasses
import json
import pickle

import pytest
import torch

from polyattn import (
    AttentionConfig,
    AttentionScope,
    AttentionSpec,
    ConfigError,
    GroupedQueryAttention,
    MaskLayout,
    QKNorm,
    RopeSpec,
    UnsupportedAttentionError,
    backends,
    check_servable,
)

NORM = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
ROPE = RopeSpec.from_dict({
    "schema_version": 1, "variant": "default", "theta": 1e4, "head_dim": 8, "rotary_dim": 8, "interleaved": False,
    "max_position": 64, "original_max_position": None, "parameters": {}, "axes": None,
})  # fmt: skip
SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
NEED = r"must be an int >= 1, a pair \(left, right\) of ints >= 0 \(None or -1: no bound\) or None, got "


def layer(window, backend="sdpa"):
    torch.manual_seed(0)
    return GroupedQueryAttention(**SIZES, window=window, backend=backend, dtype=torch.float64)


def spec_of(window, **changes):
    return AttentionSpec.of({**SIZES, "window": window, "rope": ROPE, **changes})


@pytest.mark.parametrize(
    ("given", "kept", "written"),
    [
        (3, 3, 3),
        ((2, 0), (2, 0), [2, 0]),
        ([2, 0], (2, 0), [2, 0]),
        ((None, 4), (None, 4), [None, 4]),
        ((4, -1), (4, None), [4, None]),
        ((2, 2), 3, 3),
        ((-1, None), None, None),
    ],
)
def test_a_window_has_one_form_in_a_spec_and_one_in_its_json(given, kept, written):
    spec = spec_of(given)
    assert spec.window == kept
    assert type(spec.window) is type(kept)
    assert spec.to_dict()["window"] == written
    again = AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec == pickle.loads(pickle.dumps(spec))
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("window", [(1, 2, 3), [3], (), (-2, 0), (1.0, 0), (True, 0), ("2", 0)])
def test_a_wrong_pair_is_refused_with_what_came_and_what_is_needed(window):
    with pytest.raises(ConfigError, match=f"^window {NEED}") as caught:
        layer(window)
    assert str(caught.value).endswith(str(window))
    with pytest.raises(ConfigError, match=rf"groups\[0\].window: {NEED}"):
        AttentionConfig(groups=[{"layers": [0], "window": list(window)}])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", [MaskLayout.causal(9), MaskLayout.packed([4, 5])], ids=["causal", "packed"])
def test_on_a_causal_layout_the_right_side_says_nothing_and_the_left_counts_without_the_query(backend, layout):
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    one = layer(3, backend)(hidden, AttentionScope(layout), None)
    for right in (0, 5, None):
        assert torch.equal(layer((2, right), backend)(hidden, AttentionScope(layout), None), one)


@pytest.mark.parametrize("window", [(2, 0), (0, 3), (None, 1), (4, -1)])
def test_on_a_layout_without_causality_each_side_holds(window):
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    behind, ahead = (9 if side in (None, -1) else side for side in window)
    q, k = torch.arange(9)[:, None], torch.arange(9)
    dense = MaskLayout.dense((q - k <= behind) & (k - q <= ahead))
    want = layer(None, "eager")(hidden, AttentionScope(dense), None)
    for backend in ("eager", "sdpa"):
        got = layer(window, backend)(hidden, AttentionScope(MaskLayout.full(9)), None)
        torch.testing.assert_close(got, want)


def test_a_window_of_two_sides_measures_by_the_positions_of_the_layer():
    hidden, at = torch.randn(1, 4, 32, dtype=torch.float64), torch.tensor([[7, 0, 5, 6]])
    distance = at[:, :, None] - at[:, None, :]
    dense = MaskLayout.dense(((distance <= 2) & (distance >= -1))[:, None])
    want = layer(None)(hidden, AttentionScope(dense), at)
    torch.testing.assert_close(layer((2, 1))(hidden, AttentionScope(MaskLayout.full(4)), at), want)


def test_layers_whose_windows_are_written_differently_share_what_is_prepared():
    scope, hidden = AttentionScope(MaskLayout.full(6)), torch.randn(1, 6, 32, dtype=torch.float64)
    for window in ((2, 0), [2, 0], (2, 1), 3, (2, 2)):
        layer(window)(hidden, scope, None)
    assert scope.builds["attention"] == 3


def test_a_backend_without_such_windows_serves_causal_layouts_and_refuses_others_by_the_name_of_the_window():
    eager = type(backends.get("eager"))

    class OneSided(eager):
        abilities = eager.abilities - {"two_sided_window"}

    hidden = torch.randn(1, 5, 32, dtype=torch.float64)
    one = layer((2, 0), OneSided())
    assert one(hidden, AttentionScope(MaskLayout.causal(5)), None).shape == hidden.shape
    with pytest.raises(UnsupportedAttentionError, match=r"two_sided_window: got window \(2, 0\), need a backend with"):
        one(hidden, AttentionScope(MaskLayout.full(5)), None)


def test_a_config_and_its_groups_take_pairs_and_yaml_writes_them_as_lists(tmp_path):
    path = tmp_path / "attention.yaml"
    path.write_text(
        "attn_backend: sdpa\nwindow: [128, 0]\ngroups:\n"
        "  - {layers: [1], window: [null, 16]}\n  - {layers: [2], window: [7, 7]}\n  - {layers: [3], window: null}\n"
    )
    config = AttentionConfig.from_yaml(path)
    assert config.window == (128, 0)
    assert [config.layer(index).window for index in range(4)] == [(128, 0), (None, 16), 8, None]
    assert dataclasses.replace(config, **SIZES).layer(0).spec.window == (128, 0)
    assert AttentionConfig(attn_backend="sdpa", window=[128, 0]) == AttentionConfig(
        attn_backend="sdpa", window=(128, 0)
    )


def test_serving_targets_refuse_what_their_configurations_cannot_write():
    reasons = check_servable(spec_of((128, 0), qk_norm=NORM), "sglang_dflash")
    assert [reason.code for reason in reasons] == ["two_sided_window"]
    assert str(reasons[0]).startswith("two_sided_window: got window (128, 0), need one number")
    assert [reason.code for reason in check_servable(spec_of((128, 0), qk_norm=NORM), "sglang_eagle")] == ["window"]
    assert check_servable(spec_of((127, 127), qk_norm=NORM), "sglang_dflash") == ()


def test_exports_refuse_what_no_configuration_of_the_family_can_say():
    with pytest.raises(ConfigError, match=r"sliding_window must be one int, got \(128, 0\)"):
        spec_of((128, 0)).to_hf("mistral")
    with pytest.raises(ConfigError, match=r"window \[128, 0\] would be read as None"):
        spec_of((128, 0)).to_hf("llama")
    assert spec_of((127, 127)).to_hf("mistral")["sliding_window"] == 128
    with pytest.raises(ConfigError, match=r"sliding_window must be one int, got \[128, 0\]"):
        AttentionSpec.from_hf({**spec_of(128).to_hf("mistral"), "sliding_window": [128, 0]})
