"""Linear scaling: positions divided by a factor (position interpolation, arXiv:2306.15595)."""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import at_least, check_spec, inverse_powers, number

__all__ = ["LinearRope"]


class LinearRope:
    """Plain RoPE at position ``p / factor``, as SGLang and vLLM compute it.

    transformers divides the frequencies instead: the same bits for powers of two, not for other factors.

    Parameters of the spec: ``factor`` >= 1.
    """

    name = "linear"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "factor": True,
    }

    def validate(self, spec: RopeSpec) -> None:
        """Refuse parameters other than a ``factor`` >= 1."""
        check_spec(spec, {"factor": at_least(1.0)})

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        inv_freq = 1.0 / inverse_powers(spec.theta, spec.rotary_dim)
        return RopeFrequencies(inv_freq.to(device), position_scaling=number(spec, "factor"))
