"""What a rotary variant is: a frequency rule. The protocol, its result, and helpers for those who write one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from polyattn._errors import RopeConfigError
from polyattn.messages import is_float32, listed, shortened, shown
from polyattn.rope.spec import RopeSpec


@dataclasses.dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """What a variant makes of a spec. The angle of lane i at position p is ``(p / position_scaling) * inv_freq[i]``.

    Attributes:
        inv_freq: FP32 ``[rotary_dim / 2]``, radians per position.
        attention_scaling: factor of cos and sin; scores carry it squared.
        position_scaling: divisor of the positions.
    """

    inv_freq: Tensor
    attention_scaling: float = 1.0
    position_scaling: float = 1.0


@runtime_checkable
class RopeVariant(Protocol):
    """A frequency rule: a pure function of the spec, registered by name in the entry-point group ``polyattn.rope``.

    Four more attributes are optional:

    * ``defaults``: a mapping with the parameters that a spec may leave out.
    * ``hf_keys``: a mapping from each key that the variant reads in a Hugging Face rope dictionary, beside those of all
      type, to whether it is required. They become parameters of the same names; ``original_max_position_embeddings``
      becomes ``original_max_position``. Without this attribute no Hugging Face configuration names the variant.
    * ``breakpoints(spec) -> tuple[int, ...]``: ascending lengths after which the frequencies change. Where there are
      any, the caller must say the length of the sequence, a host int, and ``frequencies`` is asked once for each
      interval. Otherwise ``length`` is always ``None``.
    * ``pure``: ``False`` for a rule that depends on more than its arguments; its tables are never shared by spec.
    """

    name: str
    api_version: int

    def validate(self, spec: RopeSpec) -> None:
        """Raise :class:`RopeConfigError` when the variant cannot honour ``spec``; one message names every fault."""

    def frequencies(self, spec: RopeSpec, *, device: torch.device, length: int | None = None) -> RopeFrequencies:
        """The frequencies of a valid ``spec`` on ``device``."""


def inverse_powers(theta: float, dim: int, width: int | None = None) -> Tensor:
    """``theta ** (2 i / dim)`` for the lanes ``i = 0 .. width/2 - 1`` (``width``: ``dim``), FP32 on the CPU.

    The reciprocals of plain RoPE's frequencies. Base and exponent are rounded to FP32, as in the implementations that
    checkpoints were trained with; the power is taken in FP64 and rounded once: the same bits on every machine.
    """
    exponents = torch.arange(0, width or dim, 2, dtype=torch.float32, device="cpu") / dim
    base = torch.tensor(theta, dtype=torch.float32, device="cpu")
    return torch.pow(base.double(), exponents.double()).float()


Rule: TypeAlias = tuple[str, Callable[[Any], bool]]


def at_least(low: float) -> Rule:
    """A number >= ``low``."""
    return f"a number >= {low:g}", lambda value: isinstance(value, float) and value >= low


def above(low: float) -> Rule:
    """A number > ``low``."""
    return f"a number > {low:g}", lambda value: isinstance(value, float) and value > low


def within(low: float, high: float) -> Rule:
    """A number > ``low`` and <= ``high``."""
    return f"a number in ({low:g}, {high:g}]", lambda value: isinstance(value, float) and low < value <= high


def one_of(*choices: object) -> Rule:
    """One of ``choices``."""
    return f"one of {listed(choices)}", lambda value: value in choices and type(value) in map(type, choices)


def lanes(count: int) -> Rule:
    """A list of ``count`` positive numbers."""
    return (
        f"a list of {count} positive numbers (rotary_dim / 2)",
        lambda value: isinstance(value, tuple) and len(value) == count and all(item > 0 for item in value),
    )


def optional(rule: Rule) -> Rule:
    """``None``, or what ``rule`` asks for."""
    need, holds = rule
    return f"None or {need}", lambda value: value is None or holds(value)


def check_spec(
    spec: RopeSpec,
    rules: Mapping[str, Rule],
    contradictions: Callable[[RopeSpec], Iterator[str]] | None = None,
    *,
    needs_original: bool = False,
) -> None:
    """Refuse a spec whose parameters are not exactly those of ``rules``; one message names every fault.

    Args:
        spec: the spec under validation.
        rules: what each parameter must be.
        contradictions: yields what is wrong between fields; asked once every parameter by itself is right.
        needs_original: whether the variant needs ``original_max_position``.
    """
    faults = []
    for name in {**rules, **spec.parameters}:
        if name not in rules:
            faults.append(f"parameters[{shown(name)}] is unknown; accepted are {', '.join(rules) or 'none'}")
        elif name not in spec.parameters:
            faults.append(f"parameters[{shown(name)}] is missing; it must be {rules[name][0]}")
        elif not rules[name][1](spec.parameters[name]):
            faults.append(f"parameters[{shown(name)}] must be {rules[name][0]}, got {shown(spec.parameters[name])}")
    if needs_original and spec.original_max_position is None:
        faults.append("original_max_position must be an int >= 1, got None")
    if not faults and contradictions is not None:
        faults = list(contradictions(spec))
    if faults:
        raise RopeConfigError(f"rope variant '{spec.variant}': " + shortened("; ".join(faults)))


def number(spec: RopeSpec, name: str) -> float:
    """A numeric parameter of a valid spec."""
    value = spec.parameters[name]
    assert isinstance(value, float)
    return value


def original(spec: RopeSpec) -> int:
    """``original_max_position`` of a valid spec whose variant needs it."""
    assert spec.original_max_position is not None
    return spec.original_max_position


def host_frequencies(variant: RopeVariant, spec: RopeSpec, length: int | None) -> tuple[list[float], float, float]:
    """What ``variant`` makes of ``spec``, checked, as host numbers: ``inv_freq`` and the two scalings."""
    with unset_fake_temporarily():
        found = variant.frequencies(spec, device=torch.device("cpu"), length=length)
    inv_freq, shape = found.inv_freq, (spec.rotary_dim // 2,)
    if inv_freq.dtype is not torch.float32 or tuple(inv_freq.shape) != shape or inv_freq.device.type != "cpu":
        raise RopeConfigError(
            f"rope variant '{spec.variant}' must return inv_freq as float32 {list(shape)} on the device asked, cpu, "
            f"got {inv_freq.dtype} {list(inv_freq.shape)} on {inv_freq.device}"
        )
    values, scalings = inv_freq.tolist(), (float(found.attention_scaling), float(found.position_scaling))
    if not all(map(math.isfinite, values)) or not all(is_float32(scaling) and scaling > 0 for scaling in scalings):
        raise RopeConfigError(
            f"rope variant '{spec.variant}' must return finite frequencies and positive scalings, got inv_freq "
            f"{values}, attention_scaling {scalings[0]} and position_scaling {scalings[1]}"
        )
    return values, *scalings
