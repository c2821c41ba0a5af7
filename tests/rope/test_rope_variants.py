"""The frequency rules: small numbers by hand, and what each variant refuses."""

from __future__ import annotations

import math

import pytest
import torch

from polyattn import RopeConfigError, RopeSpec, RotaryEmbedding, rope_variants
from polyattn.testing import RopeConformance
from polyattn_rope_yarn import ramp_ends


def spec_of(variant, parameters=None, **fields):
    standard = {
        "theta": 10000.0,
        "head_dim": 8,
        "rotary_dim": 8,
        "interleaved": False,
        "max_position": 64,
        "original_max_position": 16,
    }
    return RopeSpec(variant=variant, parameters=parameters or {}, **{**standard, **fields})


def turns(spec, length=None):
    """Angle of every lane at position 1: the frequencies, whatever scales positions."""
    angles, _ = RotaryEmbedding(spec).angles(torch.tensor([[1]]), length=length)
    return angles[0, 0]


def close(got, want):
    return torch.allclose(got, torch.tensor(want), rtol=1e-6, atol=0)


def test_default_is_a_power_of_theta():
    assert close(turns(spec_of("default")), [1.0, 0.1, 0.01, 0.001])


def test_partial_rotary_uses_the_rotary_width_in_the_exponent():
    assert close(turns(spec_of("default", head_dim=16, rotary_dim=4)), [1.0, 0.01])


def test_linear_divides_positions():
    assert close(turns(spec_of("linear", {"factor": 4.0})), [0.25, 0.025, 0.0025, 0.00025])


def test_linear_by_three_rounds_the_position_and_not_the_frequency():
    """At position 6 the divided position is exactly 2, so the angles are those of plain rope at 2."""
    linear, plain = RotaryEmbedding(spec_of("linear", {"factor": 3.0})), RotaryEmbedding(spec_of("default"))
    assert torch.equal(linear(torch.tensor([[6]])).cos, plain(torch.tensor([[2]])).cos)


def test_dynamic_takes_the_base_of_its_fixed_length():
    base = 10000.0 * (2 * 32 / 16 - 1) ** (8 / 6)
    assert close(turns(spec_of("dynamic", {"factor": 2.0})), [base ** (-i / 4) for i in range(4)])


def test_dynamic_with_alpha_multiplies_the_base():
    spec = spec_of("dynamic", {"factor": 1.0, "alpha": 1000.0}, original_max_position=None)
    base = 10000.0 * 1000.0 ** (8 / 6)
    assert close(turns(spec), [base ** (-i / 4) for i in range(4)])


def test_dynamic_rotates_a_prompt_the_same_before_during_and_after_a_long_one():
    spec = spec_of("dynamic", {"factor": 2.0})
    used, fresh = RotaryEmbedding(spec), RotaryEmbedding(spec)
    short, long = torch.arange(20)[None], torch.arange(20, 40)[None]
    used(torch.arange(40)[None])
    assert torch.equal(used(short).cos, fresh(short).cos)
    assert torch.equal(used(torch.cat((short, long))).cos[0], fresh(short).cos[0])
    assert torch.equal(used(torch.cat((long, short))).cos[1], fresh(short).cos[0])


@pytest.mark.parametrize(("truncate", "ends"), [(False, (8.0927791, 17.3980245)), (True, (8, 18))])
def test_yarn_rounds_the_ends_of_its_ramp_only_when_told_to(truncate, ends):
    yarn = {"factor": 32.0, "truncate": truncate}
    spec = spec_of("yarn", yarn, head_dim=64, rotary_dim=64, theta=150000.0, original_max_position=4096)
    assert ramp_ends(spec) == pytest.approx(ends, rel=1e-7)


def test_yarn_truncates_by_default_and_it_matters():
    def spec(**truncate):
        fields = {"head_dim": 64, "rotary_dim": 64, "theta": 150000.0, "original_max_position": 4096}
        return turns(spec_of("yarn", {"factor": 32.0, **truncate}, **fields))

    assert torch.equal(spec(), spec(truncate=True))
    ratio = spec(truncate=True) / spec(truncate=False)
    assert ratio.argmax() == 17
    assert ratio.max() == pytest.approx(1.76, abs=0.005)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.0}, 0.0707 * math.log(40) + 1),
        ({"mscale": 0.707, "mscale_all_dim": 0.707, "attention_factor": 1.1}, 1.1),
    ],
)
def test_yarn_scales_cos_and_sin_by_the_most_explicit_parameter(parameters, scaling):
    embedding = RotaryEmbedding(spec_of("yarn", {"factor": 40.0, **parameters}))
    assert embedding.angles(torch.tensor([[0]]))[1] == pytest.approx(scaling, rel=1e-12)
    assert embedding(torch.tensor([[0]])).cos[0, 0, 0] == pytest.approx(scaling, rel=1e-6)


def test_yarn_without_extension_scales_nothing():
    assert RotaryEmbedding(spec_of("yarn", {"factor": 1.0})).angles(torch.tensor([[0]]))[1] == 1.0


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    spec = spec_of("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0})
    assert close(turns(spec)[[0, 2, 3]], [1.0, 0.01 / 8, 0.001 / 8])  # wavelengths 6, 628, 6283 against 8 and 16


def test_llama3_blends_inside_the_band():
    spec = spec_of("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    share = (16 / (2 * math.pi) - 1) / 3
    assert close(turns(spec)[:1], [(1 - share) / 8 + share])


def test_llama3_without_a_band_has_no_lane_between():
    spec = spec_of("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0})
    assert close(turns(spec), [1.0, 0.1 / 8, 0.01 / 8, 0.001 / 8])


LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "attention_factor": 1.0}


@pytest.mark.parametrize(("length", "first"), [(15, 1.0), (16, 1.0), (17, 0.25)])
def test_longrope_by_length_changes_after_the_original_length(length, first):
    assert turns(spec_of("longrope", {**LONG, "switch": "length"}), length)[0] == first


@pytest.mark.parametrize(("switch", "first"), [("short", 1.0), ("long", 0.25)])
def test_longrope_fixed_by_the_spec_takes_no_length(switch, first):
    assert turns(spec_of("longrope", {**LONG, "switch": switch}))[0] == first


def test_longrope_never_looks_at_positions():
    """Decoding from 16 to 17 under one length keeps the frequencies, so cached keys stay right."""
    embedding = RotaryEmbedding(spec_of("longrope", {**LONG, "switch": "length"}))
    assert embedding(torch.tensor([[16]]), length=16).cos[0, 0, 0] == torch.tensor(16.0).cos()
    assert embedding(torch.tensor([[1]]), length=17).cos[0, 0, 0] == torch.tensor(0.25).cos()


@pytest.mark.parametrize(
    ("parameters", "short", "long"),
    [
        ({}, math.sqrt(1 + math.log(4) / math.log(16)), math.sqrt(1 + math.log(4) / math.log(16))),
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(16)), math.sqrt(1 + math.log(2) / math.log(16))),
        ({"attention_factor": 1.3}, 1.3, 1.3),
        ({"short_mscale": 1.05, "long_mscale": 1.25}, 1.05, 1.25),
        ({"long_mscale": 1.25}, math.sqrt(1 + math.log(4) / math.log(16)), 1.25),
    ],
)
def test_longrope_scales_cos_and_sin_by_the_most_explicit_parameter(parameters, short, long):
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "switch": "length"}
    embedding = RotaryEmbedding(spec_of("longrope", {**lists, **parameters}))
    assert embedding.angles(torch.tensor([[0]]), length=16)[1] == pytest.approx(short, rel=1e-12)
    assert embedding.angles(torch.tensor([[0]]), length=17)[1] == pytest.approx(long, rel=1e-12)


def test_longrope_that_is_not_extended_scales_nothing():
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "switch": "short"}
    assert RotaryEmbedding(spec_of("longrope", lists, max_position=16)).angles(torch.tensor([[0]]))[1] == 1.0


def test_proportional_lanes_stand_still_after_their_share():
    assert close(turns(spec_of("proportional", {"partial_rotary_factor": 0.5})), [1.0, 0.1, 0.0, 0.0])
    assert close(turns(spec_of("proportional", {"partial_rotary_factor": 0.5, "factor": 8.0})), [0.125, 0.0125, 0, 0])


REFUSED = [
    ("default", {"factor": 2.0}, {}, "parameters['factor'] is unknown; accepted are none"),
    ("linear", {}, {}, "parameters['factor'] is missing; it must be a number >= 1"),
    ("linear", {"factor": 0.5}, {}, "parameters['factor'] must be a number >= 1, got 0.5"),
    ("linear", {"factor": "2"}, {}, "parameters['factor'] must be a number >= 1, got '2'"),
    ("linear", {"factor": True}, {}, "parameters['factor'] must be a number >= 1, got True"),
    ("linear", {"factor": [2.0]}, {}, "parameters['factor'] must be a number >= 1, got (2.0,)"),
    ("linear", {"factor": None}, {}, "parameters['factor'] must be a number >= 1, got None"),
    ("linear", {"factor": 2.0, "alpha": 1.0}, {}, "parameters['alpha'] is unknown; accepted are factor"),
    ("dynamic", {"factor": 0.5}, {}, "parameters['factor'] must be a number >= 1, got 0.5"),
    ("dynamic", {"factor": 2.0, "alpha": 0.0}, {}, "parameters['alpha'] must be None or a number > 0, got 0.0"),
    ("dynamic", {"factor": 2.0, "alpha": 9.0}, {}, "parameters['factor'] must be 1 where alpha sets the base, got 2.0"),
    (
        "dynamic",
        {"factor": 2.0},
        {"original_max_position": None},
        "original_max_position must be an int >= 1, got None",
    ),
    ("dynamic", {"factor": 1e30}, {}, "parameters['factor'] must leave the base a float32 number, got 1e+30 and 1e+84"),
    ("dynamic", {"factor": 1.0, "alpha": 1e30}, {}, "parameters['alpha'] must leave the base a float32 number"),
    ("dynamic", {"factor": 2.0}, {"rotary_dim": 2}, "rotary_dim must be at least 4, got 2"),
    ("yarn", {"factor": 0.5}, {}, "parameters['factor'] must be a number >= 1, got 0.5"),
    ("yarn", {"factor": 4.0, "truncate": 1.0}, {}, "parameters['truncate'] must be one of True, False, got 1.0"),
    ("yarn", {"factor": 4.0, "beta_fast": 0.5}, {}, "parameters['beta_fast'] must be at least beta_slow = 1, got 0.5"),
    ("yarn", {"factor": 4.0, "mscale": 1.0}, {}, "must be given together: only their ratio acts, got 1.0 and None"),
    ("yarn", {"factor": 4.0, "attention_factor": 0}, {}, "must be None or a number > 0, got 0.0"),
    ("yarn", {"factor": 4.0}, {"original_max_position": None}, "original_max_position must be an int >= 1, got None"),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0}, {}, "parameters['high_freq_factor'] is missing"),
    (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {},
        "parameters['high_freq_factor'] must be at least low_freq_factor = 4, got 1",
    ),
    (
        "longrope",
        {"short_factor": [1.0] * 3, "long_factor": [4.0] * 10, "switch": "long"},
        {},
        "must be a list of 4 positive numbers (rotary_dim / 2), got (1.0, 1.0, 1.0); parameters['long_factor'] must be",
    ),
    ("longrope", {**LONG, "switch": "auto"}, {}, "must be one of 'short', 'long', 'length', got 'auto'"),
    ("longrope", LONG, {}, "parameters['switch'] is missing; it must be one of 'short', 'long', 'length'"),
    ("longrope", {**LONG, "switch": "long", "long_mscale": 1.2}, {}, "must be None beside an mscale, got 1.0"),
    ("longrope", {**LONG, "switch": "long"}, {"original_max_position": 1}, "must be at least 2, got 1"),
    ("proportional", {"partial_rotary_factor": 1.5}, {}, "must be a number in (0, 1], got 1.5"),
    ("proportional", {"partial_rotary_factor": 0.5}, {"rotary_dim": 4}, "rotary_dim must be head_dim = 8, got 4"),
]


@pytest.mark.parametrize(("variant", "parameters", "fields", "text"), REFUSED)
def test_a_variant_refuses_what_it_cannot_honour_by_name(variant, parameters, fields, text):
    with pytest.raises(RopeConfigError) as caught:
        spec_of(variant, parameters, **fields)
    assert str(caught.value).startswith(f"rope variant '{variant}': ")
    assert text in str(caught.value)


def test_frequencies_have_the_same_bits_on_every_cpu(run_python):
    """Whatever instructions torch uses: the power is evaluated in FP64 and rounded once."""
    code = """
import torch
from polyattn import RopeSpec, rope_variants
for dim in (64, 96, 128):
    for theta in (1e4, 5e5, 1e6):
        spec = RopeSpec(variant="yarn", theta=theta, head_dim=dim, rotary_dim=dim, interleaved=False,
                        max_position=131072, original_max_position=4096, parameters={"factor": 32.0})
        print(rope_variants.get("yarn").frequencies(spec, device=torch.device("cpu")).inv_freq.tolist())
"""
    levels = ("default", "avx2", "avx512")
    mine = torch.backends.cpu.get_cpu_capability().lower()
    known = levels[: levels.index(mine) + 1] if mine in levels else ("default", mine)
    said = {run_python(code, env={"ATEN_CPU_CAPABILITY": level}).stdout for level in known}
    assert len(said) == 1


def test_all_first_party_variants_are_installed():
    names = {"default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"}
    assert names <= set(rope_variants.names())


class TestDefault(RopeConformance):
    variant = "default"
    refused = ({"factor": 2.0},)


class TestPartial(RopeConformance):
    variant = "default"
    fields = {"rotary_dim": 8}


class TestLinear(RopeConformance):
    variant = "linear"
    parameters = {"factor": 3.0}
    refused = ({}, {"factor": 0.5})


class TestDynamic(RopeConformance):
    variant = "dynamic"
    parameters = {"factor": 2.0}
    refused = ({}, {"factor": 2.0, "alpha": 3.0})


class TestYarn(RopeConformance):
    variant = "yarn"
    parameters = {"factor": 4.0}
    refused = ({}, {"factor": 4.0, "mscale_all_dim": 1.0})


class TestYarnOverThreeAxes(RopeConformance):
    variant = "yarn"
    parameters = {"factor": 4.0}
    fields = {"axes": {"sections": [2, 3, 3], "layout": "contiguous"}, "interleaved": True}


class TestLlama3(RopeConformance):
    variant = "llama3"
    parameters = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    refused = ({}, {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0})


class TestLongRope(RopeConformance):
    variant = "longrope"
    parameters = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "switch": "length"}
    refused = ({"short_factor": [1.0] * 8, "long_factor": [4.0] * 7, "switch": "length"},)


class TestProportional(RopeConformance):
    variant = "proportional"
    parameters = {"partial_rotary_factor": 0.25}
    refused = ({}, {"partial_rotary_factor": 0.0})
