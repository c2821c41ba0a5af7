"""``polyattn rope``: an option that would mean nothing, or contradicts the file, is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from polyattn_cli import cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.fixture
def rope(tmp_path):
    """``rope(option, ..., key=value)``: the command on a config with these keys."""

    def invoke(*options, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
        return CliRunner().invoke(cli, ["rope", str(path), *map(str, options)], prog_name="polyattn")

    return invoke


@pytest.mark.parametrize("option", ["--at", "--length"])
def test_json_takes_no_option_for_the_angles_that_it_leaves_out(rope, option):
    result = rope("--json", option, 3)
    assert result.exit_code == 2
    assert f"so {option} means nothing beside it" in result.output
    assert "angle at" not in result.output


def test_a_length_is_for_the_picture_beside_json(rope, tmp_path):
    pytest.importorskip("matplotlib")
    result = rope("--json", "--length", 64, "--plot", tmp_path / "lanes.png")
    assert "length must be None, got 64: these frequencies do not depend on it" in result.output


def test_a_width_that_contradicts_the_config_is_refused(rope):
    result = rope("--head-dim", 16, head_dim=8)
    assert result.exit_code == 2
    assert "head_dim must be None or 8, as 'head_dim' says, got 16; leave it out" in result.output
    assert rope("--head-dim", 8, head_dim=8).exit_code == 0


def test_of_two_widths_in_a_config_the_option_picks_one(rope):
    result = rope("--head-dim", 4, "--json", model_type="deepseek_v3", head_dim=8, qk_rope_head_dim=4)
    assert json.loads(result.stdout)["head_dim"] == 4


def test_the_longest_sequence_is_an_option_where_the_config_does_not_say_it(rope):
    result = rope("--max-position", 32, "--json", max_position_embeddings=None)
    assert json.loads(result.stdout)["max_position"] == 32
    assert "max_position must be None or 64" in rope("--max-position", 32).output
