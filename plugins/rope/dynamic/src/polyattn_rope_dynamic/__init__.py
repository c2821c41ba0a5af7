"""Dynamic NTK scaling of the base, at one fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.messages import is_float32
from polyattn.rope import above, at_least, check_spec, inverse_powers, number, optional

__all__ = ["DynamicRope"]


class DynamicRope:
    """NTK-aware RoPE: plain frequencies of a larger base.

    With ``d = rotary_dim``, ``L = original_max_position`` and the base of length ``s = factor * L``, as SGLang has it::

        base = theta * (factor * s / L - (factor - 1)) ** (d / (d - 2))
             = theta * (factor**2 - factor + 1) ** (d / (d - 2))

    or, in the form of Hunyuan models, ``base = theta * alpha ** (d / (d - 2))``. The base depends on no position and on
    no length that was seen, so a prompt is rotated the same way alone, beside a longer one, and after one.

    Parameters of the spec: ``factor`` >= 1; ``alpha`` > 0 or ``None``. With ``alpha``, ``factor`` must be 1.
    """

    name = "dynamic"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "factor": True,
        "alpha": False,
    }
    defaults: ClassVar[dict[str, object]] = {"alpha": None}

    def validate(self, spec: RopeSpec) -> None:
        """Refuse a spec whose parameters are absent, out of range or contradict each other."""
        rules = {"factor": at_least(1.0), "alpha": optional(above(0.0))}
        check_spec(spec, rules, _contradictions, needs_original=spec.parameters.get("alpha") is None)

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec``; ``length`` has no influence."""
        return RopeFrequencies((1.0 / inverse_powers(_base(spec), spec.rotary_dim)).to(device))


def _base(spec: RopeSpec) -> float:
    factor, dim = number(spec, "factor"), spec.rotary_dim
    growth = factor**2 - factor + 1 if spec.parameters["alpha"] is None else number(spec, "alpha")
    base: float = spec.theta * growth ** (dim / (dim - 2))
    return base


def _contradictions(spec: RopeSpec) -> Iterator[str]:
    if spec.parameters["alpha"] is not None and spec.parameters["factor"] != 1.0:
        yield f"parameters['factor'] must be 1 where alpha sets the base, got {spec.parameters['factor']}"
    if spec.rotary_dim < 4:
        yield f"rotary_dim must be at least 4, got {spec.rotary_dim}"
    elif not is_float32(_base(spec)):
        name = "factor" if spec.parameters["alpha"] is None else "alpha"
        yield f"parameters[{name!r}] must leave the base a float32 number, got {number(spec, name)} and {_base(spec):g}"
