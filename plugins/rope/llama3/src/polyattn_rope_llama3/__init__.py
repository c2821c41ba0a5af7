"""The scaling of Llama 3.1 and later: long wavelengths divided, short ones kept, a smooth band between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import above, at_least, check_spec, inverse_powers, number, original

__all__ = ["Llama3Rope"]


class Llama3Rope:
    """Frequencies by wavelength ``w = 2 pi / f`` against the original length ``L = original_max_position``.

    ``w < L / high_freq_factor`` keeps ``f``; ``w > L / low_freq_factor`` makes it ``f / factor``; between them
    ``(1 - s) f / factor + s f`` with ``s = (L / w - low) / (high - low)``. Equal low and high leave no band between.

    Parameters of the spec: ``factor`` >= 1, ``low_freq_factor`` > 0, ``high_freq_factor`` >= ``low_freq_factor``.
    """

    name = "llama3"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": True,
    }

    def validate(self, spec: RopeSpec) -> None:
        """Refuse a spec whose parameters are absent, out of range or contradict each other."""
        rules = {"factor": at_least(1.0), "low_freq_factor": above(0.0), "high_freq_factor": above(0.0)}
        check_spec(spec, rules, _contradictions, needs_original=True)

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        factor, length_before = number(spec, "factor"), original(spec)
        low, high = number(spec, "low_freq_factor"), number(spec, "high_freq_factor")
        kept = 1.0 / inverse_powers(spec.theta, spec.rotary_dim)
        wavelength = 2 * math.pi / kept
        inv_freq = torch.where(wavelength > length_before / low, kept / factor, kept)
        if high > low:
            share = (length_before / wavelength - low) / (high - low)
            between = (wavelength >= length_before / high) & (wavelength <= length_before / low)
            inv_freq = torch.where(between, (1 - share) * inv_freq / factor + share * inv_freq, inv_freq)
        return RopeFrequencies(inv_freq.to(device))


def _contradictions(spec: RopeSpec) -> Iterator[str]:
    low, high = number(spec, "low_freq_factor"), number(spec, "high_freq_factor")
    if high < low:
        yield f"parameters['high_freq_factor'] must be at least low_freq_factor = {low:g}, got {high:g}"
