"""From positions to tables of cosines and sines: the module that a model holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from polyattn._errors import AttentionInputError, RopeConfigError
from polyattn.messages import shown
from polyattn.registry.registry import rope_variants
from polyattn.rope.spec import RopeSpec
from polyattn.rope.variant import RopeVariant, host_frequencies

Rows: TypeAlias = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryTables:
    """Cosine and sine of every angle, attention scaling included.

    Attributes:
        cos: FP32 ``[B|1, S, rotary_dim / 2]``.
        sin: likewise.
        interleaved: the pairing that the angles were made for, as in the spec; ``None`` where it is not known, in
            tables made by hand, which then serve either.
        channels: what :meth:`per_channel` gives for that pairing, made once for all layers; or ``None``. It belongs to
            these cosines and sines: a copy with others has none, and neither is changed in place.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool | None = None
    channels: tuple[Tensor, Tensor] | None = dataclasses.field(default=None, init=False, repr=False)

    def per_channel(self, *, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Factors of each channel and of its partner, FP32 ``[B|1, S, rotary_dim]``."""
        if self.channels is not None and self.interleaved is interleaved:
            return self.channels
        return joined(self.cos, self.cos, interleaved), joined(-self.sin, self.sin, interleaved)


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The channels whose pairs these are."""
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


class _Rule(NamedTuple):
    """A frequency rule on the host, the source of truth.

    ``rows`` has one row per axis with zeros in the lanes of other axes, then a row with every lane. A sum over axes is
    then exact: in each lane all terms but one are zero.
    """

    rows: Rows
    attention_scaling: float
    position_scaling: float


class RotaryEmbedding(nn.Module):
    """Positions to FP32 tables, by the rule of a :class:`RopeSpec`.

    It has no parameters and no buffers: the frequencies are host numbers, computed once when it is built, and copies on
    devices are a cache. So casts, moves, ``to_empty``, pickling and meta construction cannot harm them, and none of it
    is in a state dict. An ``inv_freq`` that an older checkpoint carries for it is ignored.
    """

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        if not isinstance(spec, RopeSpec):
            raise RopeConfigError(f"spec must be a RopeSpec, got {type(spec).__name__}; RopeSpec.from_dict makes one")
        variant = rope_variants.get(spec.variant)
        self.spec = spec
        self._pure = getattr(variant, "pure", True)
        self._breakpoints = tuple(variant.breakpoints(spec)) if hasattr(variant, "breakpoints") else ()
        lengths = (*self._breakpoints, self._breakpoints[-1] + 1) if self._breakpoints else (None,)
        self._rules = tuple(_rule(variant, spec, length) for length in lengths)
        self._axes = 0 if spec.axes is None else len(spec.axes.sections)
        self._copies: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def needs_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return bool(self._breakpoints)

    def sharing_key(self) -> Hashable:
        """What embeddings of the same tables have in common: the spec, or the object where it may hold more state."""
        return self.spec if type(self) is RotaryEmbedding and self._pure else self

    def forward(self, positions: Tensor, *, length: int | None = None) -> RotaryTables:
        """The tables at ``positions``; no value of it is read on the host.

        Args:
            positions: Int ``[B|1, S]``, or ``[A, B|1, S]`` for a spec with A axes. A spec with axes takes ``[B|1, S]``
                for text, whose position is the same on all axes.
            length: length of the sequence (largest position + 1, cached keys included), for specs whose frequencies
                depend on it; ``None`` for all others.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # tables outlive it: a later training step saves them
                return self.forward(positions, length=length)
        angles, scaling = self.angles(positions, length=length)
        cos, sin = angles.cos(), angles.sin()
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        tables = RotaryTables(cos, sin, self.spec.interleaved)
        if not torch.compiler.is_compiling():
            object.__setattr__(tables, "channels", tables.per_channel(interleaved=self.spec.interleaved))
        return tables

    def angles(self, positions: Tensor, *, length: int | None = None) -> tuple[Tensor, float]:
        """The angles in radians, FP32 ``[B|1, S, rotary_dim / 2]``, and the factor of their cosine and sine."""
        axes, side = self._axes_of(positions), self._side(length)
        rule = self._rules[side]
        inv_freq = self._inv_freq(side, positions.device)
        scaled = positions.to(torch.float32).unsqueeze(-1)
        if rule.position_scaling != 1.0:
            scaled = scaled / rule.position_scaling
        # Products and sums of FP32, never a matmul: autocast would run that in half precision.
        angles = scaled[0] * inv_freq[0] if axes else scaled * inv_freq[-1]
        for axis in range(1, axes):
            angles = angles + scaled[axis] * inv_freq[axis]
        return angles, rule.attention_scaling

    def _axes_of(self, positions: Tensor) -> int:
        """How many axes ``positions`` has, 0 for none."""
        axes = self._axes
        need = "an integer tensor [B|1, S]" + (f" or [{axes}, B|1, S]" if axes else "")
        if not isinstance(positions, Tensor):
            raise AttentionInputError(f"positions must be {need}, got {type(positions).__name__}")
        dtype, shape = positions.dtype, positions.shape
        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            raise AttentionInputError(f"positions must be {need}, got {dtype}; floats cannot count beyond 2**24")
        if len(shape) == 2:
            return 0
        if len(shape) != 3 or not axes or shape[0] != axes:
            raise AttentionInputError(f"positions must be {need}, got {list(shape)}")
        return axes

    def _side(self, length: int | None) -> int:
        """Which rule serves ``length``."""
        if not self._breakpoints:
            if length is not None:
                raise AttentionInputError(
                    f"length must be None, got {shown(length)}: these frequencies do not depend on it"
                )
            return 0
        if isinstance(length, (bool, Tensor)) or not isinstance(length, (int, torch.SymInt)):
            raise AttentionInputError(
                f"length must be an int, the length of the sequence, for a '{self.spec.variant}' rope whose angles "
                f"change after {', '.join(map(str, self._breakpoints))}, got {type(length).__name__}; "
                "it is never read from positions; the spec can fix the choice instead"
            )
        if length < 0:
            raise AttentionInputError(f"length must be an int >= 0, got {length}")
        return sum(length > point for point in self._breakpoints)

    def _inv_freq(self, side: int, device: torch.device) -> Tensor:
        """Frequencies of one rule on ``device``: FP32 ``[axes + 1, rotary_dim / 2]``."""
        rows = self._rules[side].rows
        if torch.compiler.is_compiling():
            traced: Tensor = _constant(rows, device)
            return traced
        found = self._copies.get((side, device))
        if found is None:
            with torch.inference_mode(False):
                found = _constant(rows, device)
            if _is_ordinary(found):
                self._copies[side, device] = found
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        self._copies.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        unexpected_keys = rest[3]
        if f"{prefix}inv_freq" in unexpected_keys:
            unexpected_keys.remove(f"{prefix}inv_freq")

    def extra_repr(self) -> str:
        """The spec, for ``print(model)``."""
        spec = self.spec
        return f"{spec.variant!r}, theta={spec.theta:g}, rotary_dim={spec.rotary_dim}, interleaved={spec.interleaved}"


def _rule(variant: RopeVariant, spec: RopeSpec, length: int | None) -> _Rule:
    inv_freq, *scalings = host_frequencies(variant, spec, length)
    rows = [tuple(inv_freq)]
    if spec.axes is not None:
        owners, axes = spec.axes.lanes(), range(len(spec.axes.sections))
        rows[:0] = [tuple(f * (o == axis) for f, o in zip(inv_freq, owners, strict=True)) for axis in axes]
    return _Rule(tuple(rows), *scalings)


# While Dynamo traces, the result becomes a constant of the graph: on the device, without a copy per call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(rows: Rows, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether ``tensor`` may outlive this call: not fake, not wrapped by a transform, not seen by a dispatch mode.

    Selective activation checkpointing is such a mode: it counts operations, and a copy that the recomputation finds
    ready would be one operation less.
    """
    return (
        type(tensor) is Tensor
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
        and _get_current_dispatch_mode() is None
    )
