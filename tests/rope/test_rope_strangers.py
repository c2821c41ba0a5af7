"""The kit on variants of strangers: a right one passes, and each kind of fault is found."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyattn import RopeConfigError, RopeFrequencies, RopeSpec, RotaryEmbedding, rope_variants
from polyattn.testing import RopeConformance


class Cosine:
    """What a stranger writes: no helper of ours."""

    name = "cosine"
    api_version = 1

    def validate(self, spec):
        steep = spec.parameters.get("steep")
        if set(spec.parameters) != {"steep"} or not isinstance(steep, float) or steep <= 0:
            raise RopeConfigError(f"cosine needs exactly steep > 0, got {dict(spec.parameters)}")

    def frequencies(self, spec, *, device, length=None):
        lanes = torch.linspace(0, 1, spec.rotary_dim // 2, dtype=torch.float32, device=device)
        return RopeFrequencies((1.0 + torch.cos(torch.pi * lanes) * 0.999) / spec.parameters["steep"])


class TestAStranger(RopeConformance):
    variant = Cosine()
    parameters = {"steep": 2.0}
    refused = ({}, {"steep": -1.0})


class Doubled(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq.double())


class TooWide(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq.repeat(2))


class DefaultDevice(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(torch.ones(spec.rotary_dim // 2))


class Infinite(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq / 0)


class Backwards(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq, position_scaling=-1.0)


class Deafening(Cosine):
    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq, attention_scaling=1e300)


class Remembers(Cosine):
    def __init__(self):
        self.count = itertools.count(1)

    def frequencies(self, spec, *, device, length=None):
        return RopeFrequencies(super().frequencies(spec, device=device).inv_freq * next(self.count))


class AcceptsAnything(Cosine):
    def validate(self, spec):
        pass


class Descending(Cosine):
    def breakpoints(self, spec):
        return (16, 8)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Doubled, "test_frequencies_are_finite_float32_on_the_device_asked_for"),
        (TooWide, "test_frequencies_are_finite_float32_on_the_device_asked_for"),
        (DefaultDevice, "test_frequencies_are_finite_float32_on_the_device_asked_for"),
        (Infinite, "test_frequencies_are_finite_float32_on_the_device_asked_for"),
        (Backwards, "test_frequencies_are_finite_float32_on_the_device_asked_for"),
        (Remembers, "test_frequencies_are_a_pure_function"),
        (AcceptsAnything, "test_unknown_parameters_are_refused"),
        (AcceptsAnything, "test_wrongly_typed_parameters_are_refused"),
        (AcceptsAnything, "test_declared_refusals_are_refused"),
        (Descending, "test_breakpoints_ascend_and_ask_for_a_length"),
    ],
)
def test_the_kit_finds_a_fault(fault, check):
    class Suite(RopeConformance):
        variant = fault()
        parameters = {"steep": 2.0}
        refused = ({"steep": -1.0},)

    with (
        rope_variants.override("cosine", Suite.variant),
        pytest.raises((AssertionError, RopeConfigError, pytest.fail.Exception)),
    ):
        getattr(Suite(), check)()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Doubled, r"must return inv_freq as float32 \[8\] on the device asked, cpu, got torch.float64 \[8\] on cpu"),
        (TooWide, r"must return inv_freq as float32 \[8\] on the device asked, cpu, got torch.float32 \[16\] on cpu"),
        (Infinite, r"must return finite frequencies and positive scalings, got inv_freq \[inf"),
        (Backwards, r"position_scaling -1.0"),
        (Deafening, r"attention_scaling 1e\+300"),
    ],
)
def test_an_embedding_refuses_a_variant_that_breaks_its_contract(fault, text):
    with rope_variants.override("cosine", fault()):
        spec = cosine()
        with pytest.raises(RopeConfigError, match=f"rope variant 'cosine' .*{text}"):
            RotaryEmbedding(spec)


def cosine():
    return RopeSpec(
        variant="cosine",
        theta=10000.0,
        head_dim=16,
        rotary_dim=16,
        interleaved=False,
        max_position=64,
        original_max_position=None,
        parameters={"steep": 2.0},
    )


def test_an_impure_variant_shares_only_with_itself():
    rule = Remembers()
    rule.pure = False
    with rope_variants.override("cosine", rule):
        first, second = RotaryEmbedding(cosine()), RotaryEmbedding(cosine())
    assert first.sharing_key() is first
    assert second.sharing_key() is second


def test_an_embedding_works_after_its_variant_is_gone():
    with rope_variants.override("cosine", Cosine()):
        embedding = RotaryEmbedding(cosine())
    assert embedding(torch.tensor([[1]])).cos.shape == (1, 1, 8)
