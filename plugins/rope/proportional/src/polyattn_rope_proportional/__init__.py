"""Proportional RoPE (Gemma 4): plain exponents over the whole head, and only the first lanes turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import at_least, check_spec, inverse_powers, number, within

__all__ = ["ProportionalRope"]


class ProportionalRope:
    """The first ``partial_rotary_factor * head_dim / 2`` lanes turn, by ``theta ** (-2 i / head_dim) / factor``.

    The channels of a pair lie as in full rotary, so ``rotary_dim`` is ``head_dim`` and the lanes that do not turn are
    part of the table: this is not partial rotary, where the pairs lie closer together.

    Parameters of the spec: ``partial_rotary_factor`` in (0, 1], ``factor`` >= 1 (1).
    """

    name = "proportional"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "partial_rotary_factor": True,
        "factor": False,
    }
    defaults: ClassVar[dict[str, object]] = {"factor": 1.0}

    def validate(self, spec: RopeSpec) -> None:
        """Refuse parameters out of range and a ``rotary_dim`` that is not the whole head."""
        check_spec(spec, {"partial_rotary_factor": within(0.0, 1.0), "factor": at_least(1.0)}, _contradictions)

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        turning = int(number(spec, "partial_rotary_factor") * spec.head_dim // 2)
        inv_freq = torch.zeros(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
        inv_freq[:turning] = 1.0 / inverse_powers(spec.theta, spec.head_dim, 2 * turning) / number(spec, "factor")
        return RopeFrequencies(inv_freq.to(device))


def _contradictions(spec: RopeSpec) -> Iterator[str]:
    if spec.rotary_dim != spec.head_dim:
        yield f"rotary_dim must be head_dim = {spec.head_dim}, got {spec.rotary_dim}"
