"""LongRoPE: each lane has its own divisor, one list for short sequences and one for long ones (arXiv:2402.13753)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from polyattn import RopeFrequencies, RopeSpec
from polyattn.rope import above, at_least, check_spec, inverse_powers, lanes, number, one_of, optional, original

__all__ = ["LongRope"]


class LongRope:
    """LongRoPE with an explicit switch: ``inv_freq[i] = 1 / (list[i] * theta ** (2 i / rotary_dim))``.

    ``switch`` says which list: ``"short"`` or ``"long"`` fix it, whatever the sequence; ``"length"`` takes the long
    list for sequences longer than ``original_max_position``, and the caller says the length. Say it once per sequence:
    keys cached under one list do not fit queries rotated under the other. Positions are never looked at, so a long row
    cannot change the other rows of its batch.

    cos and sin carry ``attention_factor`` if it is given, else the ``short_mscale`` or ``long_mscale`` of the list,
    else ``sqrt(1 + ln(factor) / ln(original_max_position))``, where ``factor``, unless given, is
    ``max_position / original_max_position``.

    Parameters of the spec: ``short_factor``, ``long_factor`` (``rotary_dim / 2`` positive numbers each), ``switch``;
    ``factor``, ``attention_factor``, ``short_mscale``, ``long_mscale`` (``None``).
    """

    name = "longrope"
    api_version = 1
    hf_keys: ClassVar[dict[str, bool]] = {
        "short_factor": True,
        "long_factor": True,
        "original_max_position_embeddings": True,
        "attention_factor": False,
        "factor": False,
        "short_mscale": False,
        "long_mscale": False,
    }
    defaults: ClassVar[dict[str, object]] = {
        "factor": None,
        "attention_factor": None,
        "short_mscale": None,
        "long_mscale": None,
    }

    def validate(self, spec: RopeSpec) -> None:
        """Refuse a spec whose parameters are absent, out of range or contradict each other."""
        rules = {
            "short_factor": lanes(spec.rotary_dim // 2),
            "long_factor": lanes(spec.rotary_dim // 2),
            "switch": one_of("short", "long", "length"),
            "factor": optional(at_least(1.0)),
            "attention_factor": optional(above(0.0)),
            "short_mscale": optional(above(0.0)),
            "long_mscale": optional(above(0.0)),
        }
        check_spec(spec, rules, _contradictions, needs_original=True)

    def breakpoints(self, spec: RopeSpec) -> tuple[int, ...]:
        """The original length, where the switch goes by length."""
        return (original(spec),) if spec.parameters["switch"] == "length" else ()

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of ``spec`` for sequences of ``length``, which only ``switch="length"`` asks for."""
        switch = spec.parameters["switch"]
        if switch == "length":
            switch = "long" if length is not None and length > original(spec) else "short"
        divisors = torch.tensor(spec.parameters[f"{switch}_factor"], dtype=torch.float32, device="cpu")
        inv_freq = 1.0 / (divisors * inverse_powers(spec.theta, spec.rotary_dim))
        return RopeFrequencies(inv_freq.to(device), attention_scaling=_attention_scaling(spec, f"{switch}_mscale"))


def _contradictions(spec: RopeSpec) -> Iterator[str]:
    given = spec.parameters
    if given["attention_factor"] is not None and (given["short_mscale"], given["long_mscale"]) != (None, None):
        yield f"parameters['attention_factor'] must be None beside an mscale, got {given['attention_factor']}"
    if spec.original_max_position == 1:
        yield "original_max_position must be at least 2, got 1"


def _attention_scaling(spec: RopeSpec, mscale: str) -> float:
    for name in ("attention_factor", mscale):
        if spec.parameters[name] is not None:
            return number(spec, name)
    if spec.parameters["factor"] is not None:
        factor = number(spec, "factor")
    else:
        factor = max(1.0, spec.max_position / original(spec))
    return math.sqrt(1 + math.log(factor) / math.log(original(spec)))
