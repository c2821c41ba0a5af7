"""YaRN: slow lanes interpolated, fast lanes kept, a ramp between, and a factor on cos and sin (arXiv:2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import above, at_least, check_spec, inverse_powers, number, one_of, optional, original

__all__ = ["YarnRope"]

_RULES = {
    "factor": at_least(1.0),
    "beta_fast": above(0.0),
    "beta_slow": above(0.0),
    "truncate": one_of(True, False),
    "attention_factor": optional(above(0.0)),
    "mscale": optional(at_least(0.0)),
    "mscale_all_dim": optional(at_least(0.0)),
}


class YarnRope:
    """YaRN, DeepSeek's form included.

    A lane that turns ``beta_fast`` times or more within ``original_max_position`` keeps its frequency, one that turns
    ``beta_slow`` times or less has it divided by ``factor``, and a linear ramp lies between. The ends of the ramp are
    rounded outwards to whole lanes unless ``truncate`` is false.

    cos and sin carry ``attention_factor`` if it is given, else ``m(mscale) / m(mscale_all_dim)`` if these two are given
    (0 counts as given), else ``m(1)``, with ``m(x) = 0.1 x ln(factor) + 1``.

    Parameters of the spec: ``factor`` >= 1, ``beta_fast`` (32), ``beta_slow`` (1), ``truncate`` (true),
    ``attention_factor`` (``None``), ``mscale`` and ``mscale_all_dim`` (``None``, both or neither).
    """

    name = "yarn"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "factor": True,
        "original_max_position_embeddings": True,
        "attention_factor": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "truncate": False,
    }
    defaults: ClassVar[dict[str, object]] = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    }

    def validate(self, spec: RopeSpec) -> None:
        """Refuse a spec whose parameters are absent, out of range or contradict each other."""
        check_spec(spec, _RULES, _contradictions, needs_original=True)

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        factor = number(spec, "factor")
        powers = inverse_powers(spec.theta, spec.rotary_dim)
        low, high = ramp_ends(spec)
        lanes = torch.arange(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((lanes - low) / (high - low)).clamp(0, 1)
        inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
        return RopeFrequencies(inv_freq.to(device), attention_scaling=attention_scaling(spec))


def _contradictions(spec: RopeSpec) -> Iterator[str]:
    given = spec.parameters
    if (given["mscale"] is None) != (given["mscale_all_dim"] is None):
        yield (
            "parameters['mscale'] and parameters['mscale_all_dim'] must be given together: only their ratio acts, "
            f"got {given['mscale']} and {given['mscale_all_dim']}"
        )
    fast, slow = number(spec, "beta_fast"), number(spec, "beta_slow")
    if fast < slow:
        yield f"parameters['beta_fast'] must be at least beta_slow = {slow:g}, got {fast:g}"


def ramp_ends(spec: RopeSpec) -> tuple[float, float]:
    """The lanes between which the frequencies go from kept to divided; the second is greater than the first."""

    def lane(turns: float) -> float:
        """The lane that turns ``turns`` times within the original length."""
        return spec.rotary_dim * math.log(original(spec) / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = lane(number(spec, "beta_fast")), lane(number(spec, "beta_slow"))
    if spec.parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high if high > low else low + 0.001


def attention_scaling(spec: RopeSpec) -> float:
    """The factor of cos and sin."""
    factor = number(spec, "factor")

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if spec.parameters["attention_factor"] is not None:
        return number(spec, "attention_factor")
    if spec.parameters["mscale"] is not None:
        return scale(number(spec, "mscale")) / scale(number(spec, "mscale_all_dim"))
    return scale(1.0)
