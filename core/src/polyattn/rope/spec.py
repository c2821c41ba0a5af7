"""The rotary spec: everything that decides the numbers of a rotary embedding, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from polyattn._errors import RopeConfigError
from polyattn.messages import is_float32, listed, shortened, shown
from polyattn.registry.registry import readers, rope_variants
from polyattn.rope.axes import RopeAxes

#: Keys of the canonical form that no transformers dictionary has: one that carries them is not what it says it is.
CANONICAL_ONLY = ("axes", "interleaved", "original_max_position", "rotary_dim", "schema_version", "variant")
#: The ``max_position`` of a rope that says no longest sequence.
UNBOUNDED = 2**31 - 1

ParameterValue: TypeAlias = float | bool | str | tuple[float, ...] | None


class Parameters(Mapping[str, ParameterValue]):
    """The parameters of a variant: a mapping that is immutable, hashable and sorted by name.

    Numbers are floats and lists are tuples of floats, so that equal parameters have one written form.
    """

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise RopeConfigError(f"parameters must be a mapping from names to values, got {shown(values)}")
        self._items = {name: _parameter(name, values[name]) for name in sorted(values)}

    def __getitem__(self, name: str) -> ParameterValue:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Everything that decides the numbers of a rotary embedding. A value: frozen, hashable, one canonical JSON form.

    The schema is provisional until release 1.0; from then on a new required field raises ``SCHEMA_VERSION``.
    Building a spec resolves its variant, which must be installed or registered, and lets it check the parameters.

    Attributes:
        variant: name of the frequency rule, as in the config (``"default"``, ``"yarn"``, ...).
        theta: base of the frequencies, greater than 1. Like all numbers here it must be one that FP32 can hold.
        head_dim: width D of a head.
        rotary_dim: leading channels of a head that rotate; even, at most ``head_dim``. The rest passes through.
        interleaved: which channels form a pair: adjacent ones ``(2i, 2i+1)`` if true, ``(i, i + rotary_dim/2)`` if not.
        max_position: longest sequence that the model is meant for.
        original_max_position: longest sequence before context extension; ``None`` where the variant has no use for it.
        parameters: what else the variant needs. Parameters that have a default may be left out here and are filled in;
            in the canonical dictionary all are required.
        axes: lanes of each axis for positions ``[A, B, S]`` (a :class:`RopeAxes` or its dictionary), or ``None``.

    Raises:
        RopeConfigError: a field is missing, of the wrong type or out of range, or the variant refuses the parameters.
        UnknownRopeVariantError: the variant is not installed; the message says what to install.
    """

    variant: str
    theta: float
    head_dim: int
    rotary_dim: int
    # Left out, the pairing is refused by name like any other wrong value: no default would be right for every model.
    interleaved: bool = None  # type: ignore[assignment]
    max_position: int
    original_max_position: int | None
    parameters: Mapping[str, ParameterValue]
    axes: RopeAxes | None = None

    SCHEMA_VERSION = 1

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise RopeConfigError("; ".join(problems))
        object.__setattr__(self, "theta", float(self.theta))
        axes = None if self.axes is None else RopeAxes.of(self.axes)
        if axes is not None and 2 * sum(axes.sections) != self.rotary_dim:
            raise RopeConfigError(
                f"axes['sections'] must add up to rotary_dim / 2 = {self.rotary_dim // 2}, "
                f"got {list(axes.sections)} = {sum(axes.sections)}"
            )
        object.__setattr__(self, "axes", axes)
        given = Parameters(self.parameters)
        object.__setattr__(self, "parameters", Parameters({**_defaults(self.variant), **given}))
        rope_variants.get(self.variant).validate(self)

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.variant, str):
            yield f"variant must be the name of a rotary variant, got {shown(self.variant)}"
        if not is_float32(self.theta) or self.theta <= 1:
            yield f"theta must be a finite float32 number greater than 1, got {shown(self.theta)}"
        if not isinstance(self.interleaved, bool):
            yield (
                f"interleaved must be True (adjacent channels form a pair) or False (channel i pairs with "
                f"i + rotary_dim/2), got {shown(self.interleaved)}; a model class fixes it"
            )
        for name in ("head_dim", "rotary_dim", "max_position", "original_max_position"):
            size = getattr(self, name)
            if size is None and name == "original_max_position":
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                yield f"{name} must be an int >= 1, got {shown(size)}"
            elif size >= 2**63:
                yield f"{name} must be less than 2**63, as positions are, got {shown(size)}"
            elif name == "rotary_dim" and size % 2:
                yield f"rotary_dim must be even, got {size}"
            elif name == "rotary_dim" and isinstance(self.head_dim, int) and size > self.head_dim:
                yield f"rotary_dim must be at most head_dim = {self.head_dim}, got {size}"

    def to_dict(self) -> dict[str, Any]:
        """The canonical form: a JSON object whose keys stand in a fixed order."""
        values = {name: getattr(self, name) for name in _FIELDS}
        given = self.parameters.items()
        values["parameters"] = {name: list(value) if isinstance(value, tuple) else value for name, value in given}
        values["axes"] = None if self.axes is None else self.axes.to_dict()
        return {"schema_version": self.SCHEMA_VERSION, **values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RopeSpec:
        """Read the canonical form, which :meth:`to_dict` writes; nothing is defaulted and nothing is skipped.

        Raises:
            RopeConfigError: the version is unknown or absent, or a field or parameter is absent or extra.
        """
        if not isinstance(data, Mapping):
            raise RopeConfigError(f"a rotary spec must be a JSON object, got {type(data).__name__}")
        version = data.get("schema_version")
        if type(version) is not int or version != cls.SCHEMA_VERSION:
            got = shown(version) if "schema_version" in data else "none"
            raise RopeConfigError(
                f"schema_version must be {cls.SCHEMA_VERSION}, got {got}; "
                "a transformers config is read by RopeSpec.from_hf"
            )
        faults = [f"{shown(name)} is missing" for name in _FIELDS if name not in data]
        unknown = sorted(data.keys() - {"schema_version", *_FIELDS}, key=str)
        faults += [f"{shown(name)} is unknown" for name in unknown]
        if faults:
            raise RopeConfigError(f"a rotary spec: {shortened(', '.join(faults))}; the keys are {', '.join(_FIELDS)}")
        fields = {name: data[name] for name in _FIELDS}
        variant, parameters = fields["variant"], fields["parameters"]
        if isinstance(variant, str) and isinstance(parameters, Mapping):
            # Here, and not left to the variant: what it would fill in must be written too.
            unwritten = [name for name in _defaults(variant) if name not in parameters]
            if unwritten:
                fault = (
                    f"parameters of variant '{variant}': {listed(unwritten)} must be written too, although building "
                    f"a spec fills in the default, got {listed(parameters) or 'no parameters'}"
                )
                try:
                    cls(**fields)
                except RopeConfigError as error:
                    fault += f"; and beside those: {error}"
                raise RopeConfigError(fault)
        return cls(**fields)

    @classmethod
    def from_hf(
        cls,
        config: Any,
        *,
        layer_type: str | None = None,
        head_dim: int | None = None,
        interleaved: bool | None = None,
        convention: str = "serving",
        max_position: int | None = None,
    ) -> RopeSpec:
        """Read the rotary part of a transformers configuration, in the style of version 4 or 5.

        Args:
            config: a configuration object or its dictionary (``config.json``), which is not changed: the rotary keys
                where the class keeps them, ``model_type``, ``max_position_embeddings`` and the width of a head.
            layer_type: which entry to read where each layer type has a rope of its own.
            head_dim: width of a head, where the configuration does not say it; for multi-head latent attention that of
                the part which goes through the rope alone (``qk_rope_head_dim``).
            interleaved: pairing, where the configuration has no ``model_type`` or one that is not known.
            convention: what the keys cannot say. ``"serving"`` gives ``dynamic`` its fixed length, as SGLang does.
                ``"dflash"`` and ``"eagle"`` read older draft models: halves pair, and a base that is left out is the
                class's own; ``"eagle"`` refuses ``dynamic``, whose table followed what was decoded before.
            max_position: longest sequence, where the configuration does not say it.

        Raises:
            RopeConfigError: a key is unknown, missing, contradictory or canonical-only, or speaks of the rope where
                nothing reads it; the pairing is not known; or the model, or this layer type, does not rotate, or in a
                way that no spec describes.
        """
        said = {"layer_type": layer_type, "head_dim": head_dim, "interleaved": interleaved}
        spec: RopeSpec = readers.get("hf_rope").read(config, **said, convention=convention, max_position=max_position)
        return spec

    def to_hf(self, model_type: str) -> dict[str, Any]:
        """Write the rotary keys of a transformers 5 configuration for one model class; :meth:`from_hf` reads them back.

        Args:
            model_type: the class that will read them. It fixes the pairing, which the keys do not carry.

        Returns:
            ``model_type``, ``head_dim`` (``qk_rope_head_dim`` for classes with latent attention),
            ``max_position_embeddings``, ``rope_parameters`` and, for classes that have the field, ``rope_interleave``.

        Raises:
            RopeConfigError: the class has the other pairing or is not known, or would not read the same spec.
        """
        written: dict[str, Any] = readers.get("hf_rope").write(self, model_type)
        return written


_FIELDS = tuple(field.name for field in dataclasses.fields(RopeSpec))


def _defaults(variant: str) -> Mapping[str, ParameterValue]:
    defaults: Mapping[str, ParameterValue] = getattr(rope_variants.get(variant), "defaults", {})
    return defaults


def _parameter(name: str, value: Any) -> ParameterValue:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (list, tuple)) and all(map(is_float32, value)):
        return tuple(map(float, value))
    if is_float32(value):
        return float(value)
    raise RopeConfigError(
        f"parameters[{shown(name)}] must be a finite float32 number, a list of such, a bool, a string or None, "
        f"got {shown(value)}"
    )
