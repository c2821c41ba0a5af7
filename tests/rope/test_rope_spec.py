"""The rotary spec: one canonical form, nothing guessed, every refusal by the name of what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from polyattn import RopeConfigError, RopeSpec, UnknownRopeVariantError
from rope_golden import DATA

FIXTURES = sorted((DATA / "specs").glob("*.json"))
PLAIN = {
    "variant": "default",
    "theta": 10000.0,
    "head_dim": 16,
    "rotary_dim": 16,
    "interleaved": False,
    "max_position": 4096,
    "original_max_position": None,
    "parameters": {},
}
LINEAR = {**PLAIN, "variant": "linear"}


@pytest.fixture(params=FIXTURES, ids=lambda path: path.stem)
def written(request):
    return request.param.read_text(encoding="utf-8")


def test_a_written_spec_is_read_and_written_byte_for_byte(written):
    assert json.dumps(RopeSpec.from_dict(json.loads(written)).to_dict(), indent=2) + "\n" == written


def test_a_written_spec_without_any_one_field_is_refused_by_its_name(written):
    data = json.loads(written)
    for name in data:
        with pytest.raises(RopeConfigError, match=name):
            RopeSpec.from_dict({key: value for key, value in data.items() if key != name})


@pytest.mark.parametrize("group", ["parameters", "axes"])
def test_a_written_spec_without_any_one_part_of_a_field_is_refused_by_its_name(written, group):
    data = json.loads(written)
    for name in data[group] or ():
        fewer = {key: value for key, value in data[group].items() if key != name}
        with pytest.raises(RopeConfigError, match=name):
            RopeSpec.from_dict({**data, group: fewer})


def test_a_required_parameter_is_named_beside_the_defaults_that_are_not_written():
    data = {**RopeSpec(**PLAIN).to_dict(), "variant": "yarn", "original_max_position": 32, "parameters": {}}
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec.from_dict(data)
    text = str(caught.value)
    assert text.startswith("parameters of variant 'yarn': ")
    assert "'beta_fast'" in text
    assert "got no parameters" in text
    assert "parameters['factor'] is missing; it must be a number >= 1" in text


def test_every_variant_and_multi_axis_positions_have_a_written_example():
    written = [json.loads(path.read_text(encoding="utf-8")) for path in FIXTURES]
    assert {data["variant"] for data in written} == {
        *("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
    }
    assert any(data["axes"] for data in written)


def test_the_set_of_fields_belongs_to_the_schema_version():
    """Change the fields and you change what is written down: raise SCHEMA_VERSION, then this test."""
    fields = {field.name for field in dataclasses.fields(RopeSpec)}
    assert (RopeSpec.SCHEMA_VERSION, fields) == (1, {*PLAIN, "axes"})


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(RopeConfigError, match="'base' is unknown"):
        RopeSpec.from_dict({**RopeSpec(**PLAIN).to_dict(), "base": 1})


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_another_schema_version_is_refused(version):
    with pytest.raises(RopeConfigError, match=f"schema_version must be 1, got {version!r}"):
        RopeSpec.from_dict({**RopeSpec(**PLAIN).to_dict(), "schema_version": version})


def test_a_dictionary_without_version_is_sent_to_from_hf():
    with pytest.raises(RopeConfigError, match=r"schema_version must be 1, got none; .*from_hf"):
        RopeSpec.from_dict({"rope_type": "default"})


def test_reading_leaves_the_dictionary_alone(written):
    data = json.loads(written)
    before = copy.deepcopy(data)
    RopeSpec.from_dict(data)
    assert data == before


def test_a_spec_is_a_value():
    first, second = RopeSpec(**PLAIN), RopeSpec(**{**PLAIN, "theta": 10000})
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, RopeSpec(**{**PLAIN, "interleaved": True})}) == 2
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.theta = 1.0


def test_parameters_cannot_be_changed_from_outside():
    given = {"factor": 4}
    spec = RopeSpec(**{**LINEAR, "parameters": given})
    given["factor"] = 8
    assert spec.parameters == {"factor": 4.0}
    with pytest.raises(TypeError):
        spec.parameters["factor"] = 8.0


def test_equal_parameters_have_one_written_form():
    one, other = ({**LINEAR, "parameters": {"factor": factor}} for factor in (4, 4.0))
    assert json.dumps(RopeSpec(**one).to_dict()) == json.dumps(RopeSpec(**other).to_dict())


def test_parameters_with_a_default_are_filled_in_and_written():
    spec = RopeSpec(**{**PLAIN, "variant": "yarn", "original_max_position": 1024, "parameters": {"factor": 4.0}})
    assert spec.to_dict()["parameters"] == {
        "attention_factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    }


def test_a_spec_without_pairing_fails_when_it_is_built():
    with pytest.raises(RopeConfigError, match=r"interleaved must be True .* or False .*, got None"):
        RopeSpec(**{name: value for name, value in PLAIN.items() if name != "interleaved"})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("variant", 3, "variant must be the name of a rotary variant, got 3"),
        ("theta", 0.0, "theta must be a finite float32 number greater than 1, got 0.0"),
        ("theta", float("nan"), "theta must be a finite float32 number greater than 1, got nan"),
        ("theta", "1e4", "theta must be a finite float32 number greater than 1, got '1e4'"),
        ("theta", 10**400, "theta must be a finite float32 number greater than 1, got an int of 1329 bits"),
        ("head_dim", 0, "head_dim must be an int >= 1, got 0"),
        ("head_dim", 16.0, "head_dim must be an int >= 1, got 16.0"),
        ("rotary_dim", 7, "rotary_dim must be even, got 7"),
        ("rotary_dim", 18, "rotary_dim must be at most head_dim = 16, got 18"),
        ("interleaved", 1, "interleaved must be True"),
        ("max_position", -1, "max_position must be an int >= 1, got -1"),
        ("head_dim", 2**63, "head_dim must be less than 2**63, as positions are, got 9223372036854775808"),
        ("original_max_position", 0, "original_max_position must be an int >= 1, got 0"),
        ("parameters", None, "parameters must be a mapping from names to values, got None"),
        ("parameters", {"factor": object()}, "parameters['factor'] must be a finite float32 number"),
        ("parameters", {"factor": float("nan")}, "parameters['factor'] must be a finite float32 number"),
        ("parameters", {"factor": [10**400]}, "parameters['factor'] must be a finite float32 number"),
        ("parameters", {"factor": 2.0}, "parameters['factor'] is unknown; accepted are none"),
        ("axes", {"sections": [4, 2, 2]}, "axes must be None or have exactly the keys 'sections' and 'layout'"),
        ("axes", [4, 2, 2], "axes must be None or have exactly the keys 'sections' and 'layout'"),
        ("axes", {"sections": [4, 2], "layout": "contiguous"}, "must add up to rotary_dim / 2 = 8, got [4, 2] = 6"),
        ("axes", {"sections": [8], "layout": "contiguous"}, "axes['sections'] must list the lanes of at least two"),
        ("axes", {"sections": [9, -1], "layout": "contiguous"}, "must hold ints >= 0, not all of them 0, got [9, -1]"),
        ("axes", {"sections": [0, 0], "layout": "contiguous"}, "must hold ints >= 0, not all of them 0, got [0, 0]"),
        ("axes", {"sections": [4, 2, 2], "layout": "mixed"}, "axes['layout'] must be one of contiguous, interleaved"),
        ("axes", {"sections": [2, 4, 2], "layout": "ernie"}, "equally many lanes under layout 'ernie'"),
    ],
)
def test_a_wrong_field_is_refused_with_what_it_got_and_needs(field, value, text):
    with pytest.raises(RopeConfigError) as caught:
        RopeSpec(**{**PLAIN, field: value})
    assert text in str(caught.value)


def test_one_message_names_every_wrong_field():
    with pytest.raises(RopeConfigError, match=r"theta must .*; .*head_dim must .*; max_position must"):
        RopeSpec(**{**PLAIN, "theta": -1, "head_dim": 0, "max_position": None})


def test_a_variant_that_is_not_installed_is_refused_with_what_to_do():
    with pytest.raises(UnknownRopeVariantError, match="no RoPE variant named 'cosine'"):
        RopeSpec(**{**PLAIN, "variant": "cosine"})


def test_axes_are_given_as_an_object_or_a_dictionary():
    spec = RopeSpec(**{**PLAIN, "axes": {"sections": [4, 2, 2], "layout": "glm"}})
    assert RopeSpec(**{**PLAIN, "axes": spec.axes}) == spec
    assert spec.to_dict()["axes"] == {"sections": [4, 2, 2], "layout": "glm"}


@pytest.mark.parametrize(
    ("layout", "sections", "lanes"),
    [
        ("contiguous", (2, 1, 1), "tthw"),
        ("interleaved", (2, 1, 1), "thwt"),
        ("interleaved", (1, 4, 3), "thwthwth"),
        ("glm", (1, 2, 2), "thwhw"),
        ("glm", (1, 1, 3), "thwww"),
        ("ernie", (2, 2, 2), "hwhwtt"),
        ("contiguous", (3, 1), "ttth"),
    ],
)
def test_lanes_follow_their_axes(layout, sections, lanes):
    spec = RopeSpec(
        **{
            **PLAIN,
            "head_dim": 2 * sum(sections),
            "rotary_dim": 2 * sum(sections),
            "axes": {"sections": sections, "layout": layout},
        }
    )
    assert "".join("thw"[axis] for axis in spec.axes.lanes()) == lanes
