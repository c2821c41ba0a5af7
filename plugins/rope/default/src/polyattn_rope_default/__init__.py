"""Plain RoPE: lane ``i`` turns by ``theta ** (-2 i / rotary_dim)`` radians per position (arXiv:2104.09864)."""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import check_spec, inverse_powers

__all__ = ["DefaultRope"]


class DefaultRope:
    """Plain RoPE, without parameters. Partial rotary is ``rotary_dim < head_dim``; the exponents use ``rotary_dim``."""

    name = "default"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {}

    def validate(self, spec: RopeSpec) -> None:
        """Refuse parameters of any kind."""
        check_spec(spec, {})

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        return RopeFrequencies((1.0 / inverse_powers(spec.theta, spec.rotary_dim)).to(device))
