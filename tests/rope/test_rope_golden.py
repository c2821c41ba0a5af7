"""Our numbers are those of SGLang's serving code, to the bit wherever the machine has the recorder's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyattn import RotaryEmbedding, RotaryTables, apply_rotary, rope_variants
from polyattn.rope.variant import host_frequencies
from rope_golden import CASES, MULTI_AXIS, SAME_BITS, Case, ulps

SAMPLED = [name for name in CASES if "sample" in Case(name).about]


def assert_same(got, want, scale=1.0):
    if SAME_BITS:
        assert torch.equal(got, want)
    else:
        assert (got - want).abs().max() <= 2e-7 * scale


def test_every_recorded_case_is_read():
    assert len(CASES) == 36


@pytest.mark.parametrize("name", [name for name in CASES if name != "mrope_glm_interleaved_axis_map"])
def test_frequencies_are_within_two_ulp(name):
    case = Case(name)
    spec = case.spec()
    for side, length in case.sides.items():
        inv_freq, _, _ = host_frequencies(rope_variants.get(spec.variant), spec, length)
        assert ulps(torch.tensor(inv_freq), case.inv_freq(side)) <= 2


@pytest.mark.parametrize("name", [name for name in CASES if f"{Case(name).model}.cos" in Case(name)])
def test_tables_equal_the_recorded_ones_when_they_start_from_the_same_frequencies(name):
    case = Case(name)
    with case.recorded_frequencies():
        embedding = RotaryEmbedding(case.spec())
    tables = embedding(case.table_positions())
    scaling = embedding.angles(case.table_positions())[1]
    assert_same(tables.cos[0], case.ours("cos"), scaling)
    assert_same(tables.sin[0], case.ours("sin"), scaling)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("longrope")])
@pytest.mark.parametrize("side", ["_short", "_long"])
def test_longrope_tables_equal_the_recorded_ones_on_both_sides(name, side):
    case = Case(name)
    with case.recorded_frequencies():
        embedding = RotaryEmbedding(case.spec())
    positions, length = case.table_positions(side), case.sides[side]
    scaling = embedding.angles(positions, length=length)[1]
    assert_same(embedding(positions, length=length).cos[0], case.ours(f"cos{side}"), scaling)
    assert_same(embedding(positions, length=length).sin[0], case.ours(f"sin{side}"), scaling)


@pytest.mark.parametrize("name", [name for name in MULTI_AXIS if f"{Case(name).model}.cos_sample" in Case(name)])
def test_multi_axis_tables_equal_the_recorded_ones(name):
    case = Case(name)
    with case.recorded_frequencies():
        tables = RotaryEmbedding(case.spec())(case.sample_positions())
    assert_same(tables.cos.flatten(0, 1), case.ours("cos_sample"), 1.2)
    assert_same(tables.sin.flatten(0, 1), case.ours("sin_sample"), 1.2)


@pytest.mark.parametrize("name", [name for name in MULTI_AXIS if "sg.axis_map" in Case(name)])
def test_lanes_follow_the_recorded_axes(name):
    case = Case(name)
    assert list(case.spec().axes.lanes()) == case["sg.axis_map"].tolist()


@pytest.mark.parametrize("name", ["mrope_ernie45vl_22_22_20_d128", "mrope_bailing_16_24_24_d128"])
def test_ernie_and_bailing_alternate_height_and_width(name):
    case = Case(name)
    assert "".join("thw"[axis] for axis in case.spec().axes.lanes()) == case.about["expected"]["axis_map"]


def rotated(case, side, interleaved, dtype):
    """q and k of the sample, rotated from the recorded frequencies."""
    with case.recorded_frequencies():
        tables = RotaryEmbedding(case.spec(interleaved=interleaved))(
            case.sample_positions(side), length=case.sides[side]
        )
    return apply_rotary(case.q(dtype), case.k(dtype), tables, interleaved=interleaved)


@pytest.mark.parametrize(
    ("name", "pairing", "side"),
    [
        (name, pairing, side)
        for name in SAMPLED
        for pairing in ("half", "inter")
        for side in Case(name).sides
        if f"{Case(name).model}.q_{pairing}{side}_f32" in Case(name)
    ],
)
def test_rotated_float32_samples_are_exact(name, pairing, side):
    case = Case(name)
    for tensor, which in zip(rotated(case, side, pairing == "inter", "f32"), "qk", strict=True):
        array = f"{case.model}.{which}_{pairing}{side}_f32"
        if array in case:  # one case has no k
            assert_same(tensor, case[array], 20)


@pytest.mark.skipif(not SAME_BITS, reason="bfloat16 samples need the recorder's cos and sin bits (AVX2 or AVX-512)")
@pytest.mark.parametrize(
    ("name", "pairing"),
    [(name, pairing) for name in SAMPLED for pairing in ("half", "inter") if f"sgk.q_{pairing}_bf16" in Case(name)],
)
def test_bfloat16_is_rounded_once(name, pairing):
    """FP32 table, FP32 products and sum without FMA, one rounding: 0 elements differ."""
    case = Case(name)
    q, _ = rotated(case, "", pairing == "inter", "bf16")
    assert q.dtype is torch.bfloat16
    assert torch.equal(q.float(), case[f"sgk.q_{pairing}_bf16"])


def test_rotating_in_bfloat16_rounds_three_times_and_differs():
    """What serving on a CPU and transformers do: two to four elements in ten differ, by at most one step."""
    case = Case("default_d128_b1000000")
    q, _ = rotated(case, "", False, "bf16")
    difference = (q.float() - case["sg.q_half_bf16"]).abs()
    assert 0.15 < (difference > 0).float().mean() < 0.45
    assert difference.max() <= 0.0156251


def test_sglang_reads_the_wrong_row_at_the_boundary_of_longrope_and_we_do_not():
    """At position == original alone SGLang takes the long table's row 0; ours is the position's own row."""
    case = Case("longrope_d128_o4096_m131072_mscale")
    with case.recorded_frequencies():
        embedding = RotaryEmbedding(case.spec())
    at = embedding(torch.tensor([[4096]]), length=4097).cos[0]
    long = case["sg.cos_long"][case.table_positions("_long")[0].tolist().index(4096)]
    assert_same(at[0], long, 1.3)
    assert (case["sg.cos_boundary"][1] - long).abs().max() > 2.0


@pytest.mark.parametrize(
    ("name", "theirs", "ratio"),
    [
        ("dynamic_f4_o8192_d128_b10000", "tf.inv_freq_at_init", "13 times"),
        ("dynamic_f2_o4096_d64_b10000", "tf.inv_freq_at_init", "3 times"),
        ("dynamic_alpha1000_d128_b10000", "tf.inv_freq_after_exceeding_max", "1000 times"),
        ("longrope_d128_o4096_m131072_mscale", "sg.inv_freq_short", "22 times"),
        ("mrope_yarn_f4_16_24_24_d128", "vl.inv_freq", "2.2 times"),
    ],
)
def test_peers_that_disagree_do_so_by_what_the_document_says(name, theirs, ratio):
    case = Case(name)
    apart = case[theirs] / case.inv_freq("_long" if name.startswith("longrope") else "")
    assert apart.max() == pytest.approx(float(ratio.split()[0]), rel=0.02)
    assert ratio in (Path(__file__).parents[2] / "docs" / "rope-conventions.md").read_text(encoding="utf-8")


def test_an_integer_factor_is_a_number_like_any_other():
    """SGLang raises TypeError for an integer linear factor."""
    case = Case("linear_f2_d64_b10000")
    assert case.spec(factor=2) == case.spec(factor=2.0)


def test_deepseek_output_order_is_a_permutation_that_leaves_scores_alone():
    """transformers leaves rotated DeepSeek tensors with even lanes first; ours stay in place, scores are the same."""
    case = Case("yarn_f40_o4096_d64_b10000_mscale1_1")
    q, k = rotated(case, "", True, "f32")
    theirs = case["tfds.q_deint_f32"], case["tfds.k_deint_f32"]
    for ours, other in zip((q, k), theirs, strict=True):
        assert_same(torch.cat((ours[..., 0::2], ours[..., 1::2]), -1), other, 20)
    assert torch.allclose(q @ k.mT, theirs[0] @ theirs[1].mT, atol=1e-4)


def test_tables_are_a_value_object_without_tensor_equality():
    tables = RotaryTables(torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert tables == tables  # noqa: PLR0124
    assert tables != RotaryTables(tables.cos, tables.sin)
