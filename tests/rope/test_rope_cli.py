"""``polyattn rope``: the resolved spec, a few angles, and a picture."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from polyattn import RopeSpec
from polyattn_cli import cli
from rope_golden import DATA

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}


@pytest.fixture
def config(tmp_path):
    def write(name="config.json", **changes):
        path = tmp_path / name
        path.write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
        return str(path)

    return write


def rope(*arguments):
    return CliRunner().invoke(cli, ["rope", *map(str, arguments)], prog_name="polyattn")


def test_it_prints_the_resolved_spec_and_angles(config):
    path = config()
    said = rope(path, "--at", "0,1,8").output
    spec = RopeSpec.from_hf(LLAMA)
    assert json.dumps(spec.to_dict(), indent=2) in said
    assert "radians; cos and sin are multiplied by 1\n" in said
    rows = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert rows == [
        ["0", "0", "0", "0", "0"],
        ["1", "0.25", "0.025", "0.0025", "0.00025"],
        ["8", "2", "0.2", "0.02", "0.002"],
    ]


def test_json_is_the_canonical_form_and_nothing_else(config):
    assert RopeSpec.from_dict(json.loads(rope(config(), "--json").output)) == RopeSpec.from_hf(LLAMA)
    for other in ("other.json", "config.json"):
        assert len(json.loads(rope(config(), config(other), "--json").output)) == 2


def test_a_canonical_file_is_read_too():
    path = DATA / "specs" / "yarn.json"
    assert rope(path, "--json").output == path.read_text(encoding="utf-8")


def test_what_the_config_does_not_say_is_an_option(config):
    path = config(model_type="mine", hidden_size=None)
    assert "pass head_dim=" in rope(path).output
    said = rope(path, "--head-dim", 16, "--interleaved", "--json")
    assert (json.loads(said.output)["head_dim"], json.loads(said.output)["interleaved"]) == (16, True)
    assert json.loads(rope(path, "--head-dim", 16, "--halves", "--json").output)["interleaved"] is False


def test_a_spec_that_depends_on_the_length_takes_it(config):
    path = DATA / "specs" / "longrope.json"
    assert "length must be an int" in rope(path).output
    assert "radians" in rope(path, "--length", 5000).output


def test_it_draws_wavelengths_of_several_configs(config, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "wavelengths.svg"
    result = rope(config(), DATA / "specs" / "proportional.json", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert f"written to {picture}" in result.output
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_drawing_without_matplotlib_says_what_to_install(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = rope(config(), "--plot", tmp_path / "w.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib, got none; install it with pip install 'polyattn[viz]'" in result.output


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_scaling": {"type": "linear"}}, "config.json: config of model_type 'llama': 'factor' is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "variant": 1}}, "canonical-only keys 'variant'"),
    ],
)
def test_a_refusal_names_the_file_and_the_key(config, changes, text):
    result = rope(config(**changes))
    assert result.exit_code == 2
    assert text in result.output


def test_a_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("rope: yes", encoding="utf-8")
    result = rope(path)
    assert result.exit_code == 2
    assert f"{path} is not a JSON file" in result.output


def test_positions_must_be_integers(config):
    for given, text in (("1,two", "must be integers between commas, got '1,two'"), (f"0,{2**63}", "less than 2**63")):
        result = rope(config(), "--at", given)
        assert result.exit_code == 2
        assert text in result.output


def test_a_canonical_file_takes_no_option_that_says_how_to_read(config):
    path = DATA / "specs" / "yarn.json"
    for option in (
        ("--head-dim", 16),
        ("--interleaved",),
        ("--halves",),
        ("--convention", "eagle"),
        ("--layer-type", "full"),
    ):
        result = rope(path, *option)
        assert result.exit_code == 2
        assert f"canonical form, which says everything; leave out {option[0]}" in result.output


def test_a_picture_that_cannot_be_written_is_refused_by_its_path(config, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name in ("no/folder.png", "picture.zzz"):
        result = rope(config(), "--plot", name)
        assert result.exit_code == 2
        assert f"--plot cannot write '{name}': " in result.output
    assert rope(config(), "--plot", tmp_path / "bare").exit_code == 0
    assert (tmp_path / "bare").read_bytes()[1:4] == b"PNG"
