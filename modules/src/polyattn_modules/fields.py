"""The fields of an attention structure: name, default, and what each must be, written once.

A spec, a layer of a config, a config, the keys of its groups and the layer's constructor take theirs from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from polyattn import ConfigError, RopeSpec, StructuredMask
from polyattn.messages import is_number, shortened, shown


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """RMS normalisation of queries and keys.

    Attributes:
        position: ``"before"`` or ``"after"`` the rotation.
        scope: ``"head"`` normalises each head's width, ``"projection"`` all heads together.
        weighted: whether a learned weight multiplies the result (Llama-4 has none).
        eps: added to the mean of squares.
    """

    position: Literal["before", "after"]
    scope: Literal["head", "projection"]
    weighted: bool
    eps: float

    def __post_init__(self) -> None:
        problems = []
        if self.position not in ("before", "after"):
            problems.append(f"qk_norm.position must be 'before' or 'after' the rotation, got {shown(self.position)}")
        if self.scope not in ("head", "projection"):
            problems.append(f"qk_norm.scope must be 'head' or 'projection', got {shown(self.scope)}")
        if not isinstance(self.weighted, bool):
            problems.append(f"qk_norm.weighted must be true or false, got {shown(self.weighted)}")
        if not is_number(self.eps) or not 0 < self.eps < 1:
            problems.append(f"qk_norm.eps must be a small positive number such as 1e-6, got {shown(self.eps)}")
        if problems:
            raise ConfigError("; ".join(problems))
        object.__setattr__(self, "eps", float(self.eps))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QKNorm:
        """Read the canonical JSON object: exactly the fields above.

        Raises:
            ConfigError: a field is absent, extra or wrong; each is named.
        """
        return cls(**exact_fields(cls, data, "qk_norm."))


def _field(need: str, holds: Callable[[Any], bool], default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"need": need, "holds": holds})


def _or_none(need: str, holds: Callable[[Any], bool]) -> Any:
    return _field(f"{need} or None", lambda value: value is None or holds(value))


def _flag() -> Any:
    return _field("true or false", lambda value: isinstance(value, bool), default=False)


def _size() -> Any:
    # At most what a tensor can be wide. A size that was not given is None, which no structure can have.
    return _field("an int from 1 to 2147483647", _fits_a_size)


def _fits_a_size(value: object) -> bool:
    return isinstance(value, int) and _is_int(value) and 1 <= value < 2**31


def _later(neutral: object, feature: str) -> Any:
    """A field of the written form whose feature is not built yet: it holds the value that turns the feature off."""
    return _field(f"{neutral}: {feature} is not built yet", lambda value: value is neutral, default=neutral)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_window(value: object) -> bool:
    if not isinstance(value, (list, tuple)):
        return _is_int(value) and value >= 1  # type: ignore[operator]
    return len(value) == 2 and all(side is None or (_is_int(side) and side >= -1) for side in value)


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """The structure of an attention layer, whose sizes may still be unknown.

    Attributes:
        hidden_size: width of the hidden states.
        num_heads, num_kv_heads: query heads and KV heads; MHA when equal, MQA when ``num_kv_heads == 1``.
        head_dim: width of queries and keys per head; independent of ``hidden_size / num_heads``.
        v_head_dim: width of values per head.
        rope: the rotary spec, or ``None``.
        qk_norm: the norm of queries and keys, or ``None``.
        window: keys that a query sees, itself included; or ``(left, right)``, how many keys before and after it,
            where ``None`` and -1 mean all; or ``None`` for all.
        dropout: of attention weights, in training.
        bias: whether the projections of q, k and v have biases.
        output_bias: whether the output projection has one.
        softcap: ``c`` in ``c * tanh(scores / c)``, or ``None``.
        sinks: whether each query head has a learned sink logit.
        scale: factor of the scores, or ``None`` for ``head_dim ** -0.5``.
        input_size: width of what q, k and v are projected from; ``None`` for ``hidden_size``.
        layout: name of the layout of the scope that the layer uses; ``None`` for the only one.
        output_gate: a gate on the output before its projection, per ``"head"`` or ``"channel"``; ``None`` for no gate,
            which is all that is built yet.
        value_norm: a norm of the values; ``None`` for no norm, which is all that is built yet.
        shared_keys_values: whether keys and values come from an earlier layer; ``False`` is all that is built yet.
        query_scale: a factor of queries by their position; ``None`` for no such factor, which is all that is built yet.
    """

    hidden_size: int | None = _size()
    num_heads: int | None = _size()
    num_kv_heads: int | None = _size()
    head_dim: int | None = _size()
    v_head_dim: int | None = _size()
    rope: RopeSpec | None = _or_none("a RopeSpec", lambda value: isinstance(value, RopeSpec))  # noqa: RUF009
    qk_norm: QKNorm | None = _or_none("a QKNorm", lambda value: isinstance(value, QKNorm))  # noqa: RUF009
    window: int | tuple[int | None, int | None] | None = _or_none(
        "an int >= 1, a pair (left, right) of ints >= 0 (None or -1: no bound)", _is_window
    )
    dropout: float = _field("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1, default=0.0)
    bias: bool = _flag()
    output_bias: bool = _flag()
    softcap: float | None = _or_none("a positive number", _is_positive)
    sinks: bool = _flag()
    scale: float | None = _or_none("a positive number", _is_positive)
    input_size: int | None = _or_none("an int from 1 to 2147483647", _fits_a_size)
    layout: str | None = _or_none("a name", lambda value: isinstance(value, str) and value != "")
    output_gate: Literal["head", "channel"] | None = _later(None, "a gate on the output")
    value_norm: Mapping[str, Any] | None = _later(None, "a norm of the values")
    shared_keys_values: bool = _later(False, "a layer with the keys and values of another one")
    query_scale: Mapping[str, Any] | None = _later(None, "a factor of queries by their position")


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Structure)}
SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")


def problem_of(name: str, value: object) -> str:
    """What is wrong with the value of a field by itself; empty when nothing is."""
    return _problem(FIELDS[name], value)


def faults_of(holder: Any) -> dict[str, str]:
    """What is wrong with each field of a dataclass that is made of such fields; those that are right are left out."""
    found = {x.name: _problem(x, getattr(holder, x.name)) for x in dataclasses.fields(holder)}
    return {name: problem for name, problem in found.items() if problem}


def like(name: str, **rest: Any) -> Any:
    """A field of another dataclass that must be what the field ``name`` must be."""
    return dataclasses.field(metadata=FIELDS[name].metadata, **rest)


def keep_one_form(spec: Any) -> None:
    """Write equal values of a spec's numbers and window in one form."""
    for name in ("dropout", "softcap", "scale", "norm_eps"):
        value = getattr(spec, name, None)
        if value is not None:
            object.__setattr__(spec, name, float(value))
    object.__setattr__(spec, "window", written_window(spec.window))


def _problem(field: dataclasses.Field[Any], value: object) -> str:
    rule = field.metadata
    return "" if rule["holds"](value) else f"must be {rule['need']}, got {given(value)}"


def written_window(value: Any) -> int | tuple[int | None, int | None] | None:
    """A valid window in its one form: an int stays; a pair that says the same as an int or ``None`` becomes that."""
    return StructuredMask(window=value).window if isinstance(value, (list, tuple)) else value  # type: ignore[arg-type]


def structure_of(holder: Structure) -> dict[str, Any]:
    """The fields above of what has them, in their order."""
    return {name: getattr(holder, name) for name in FIELDS}


def given(value: object) -> str:
    """``value`` in a message: itself if it is short, else its type."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple))
    return shown(value) if plain else type(value).__name__


def exact_fields(kind: type[Any], data: Any, prefix: str) -> dict[str, Any]:
    """``data`` as a dict, if it has exactly the fields of ``kind``.

    Raises:
        ConfigError: names every field that is absent or extra.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'an attention spec'} must be a mapping, got {type(data).__name__}")
    wanted = [field.name for field in dataclasses.fields(kind)]
    problems = [f"{prefix}{name} is missing" for name in wanted if name not in data]
    problems += [f"{prefix}{name} is unknown" for name in data if name not in wanted]
    if problems:
        raise ConfigError(
            f"an attention spec must have exactly its fields: {shortened('; '.join(problems))}; "
            f"the fields are {', '.join(prefix + name for name in wanted)}"
        )
    return dict(data)
