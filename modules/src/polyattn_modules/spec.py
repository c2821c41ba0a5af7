"""The structure of an attention layer as a value: what a checkpoint must know to be read right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from polyattn import ConfigError, RopeSpec
from polyattn.messages import is_number, shortened, shown
from polyattn.registry import readers


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
        return cls(**_exact_fields(cls, data, "qk_norm."))


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Every structural field of an attention layer.

    The JSON form (``to_dict``) requires every field and a ``schema_version``; nothing is defaulted when it is read. The
    schema is provisional until release 1.0; from then on a new required field raises ``SCHEMA_VERSION``.

    Attributes:
        hidden_size: width of the hidden states.
        num_heads, num_kv_heads: query heads and KV heads; MHA when equal, MQA when ``num_kv_heads == 1``.
        head_dim: width of queries and keys per head; independent of ``hidden_size / num_heads``.
        v_head_dim: width of values per head.
        rope: the rotary spec, or ``None``.
        qk_norm: the norm of queries and keys, or ``None``.
        window: keys that a query sees, itself included, or ``None``.
        dropout: of attention weights, in training.
        bias: whether the projections of q, k and v have biases.
        output_bias: whether the output projection has one.
        softcap: ``c`` in ``c * tanh(scores / c)``, or ``None``.
        sinks: whether each query head has a learned sink logit.
        scale: factor of the scores, or ``None`` for ``head_dim ** -0.5``.

    Raises:
        ConfigError: one message with every fault.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: RopeSpec | None
    qk_norm: QKNorm | None
    window: int | None
    dropout: float
    bias: bool
    output_bias: bool
    softcap: float | None
    sinks: bool
    scale: float | None

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        problems = [f"{name} {problem}" for name in names if (problem := problem_of(name, getattr(self, name)))]
        counts = ("num_heads", "num_kv_heads")
        if not any(problem_of(name, getattr(self, name)) for name in counts) and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} "
                f"and num_kv_heads={self.num_kv_heads}"
            )
        if isinstance(self.rope, RopeSpec) and self.rope.head_dim != self.head_dim:
            problems.append(
                f"rope.head_dim must equal head_dim, got rope.head_dim={self.rope.head_dim} "
                f"and head_dim={self.head_dim}"
            )
        if problems:
            raise ConfigError("; ".join(problems))
        for name in ("dropout", "softcap", "scale"):  # one written form for equal numbers
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own["rope"] = None if self.rope is None else self.rope.to_dict()
        own["qk_norm"] = None if self.qk_norm is None else dataclasses.asdict(self.qk_norm)
        return {"schema_version": self.SCHEMA_VERSION, **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Read the canonical JSON object.

        Raises:
            ConfigError: the version is unknown, or a field is absent or extra; each is named.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"an attention spec must be a mapping, got {type(data).__name__}")
        version = data.get("schema_version")
        if version != cls.SCHEMA_VERSION or isinstance(version, bool):
            got = shown(version) if "schema_version" in data else "none"
            raise ConfigError(
                f"schema_version of an attention spec must be {cls.SCHEMA_VERSION}, got {got}; "
                "a transformers configuration is read by AttentionSpec.from_hf"
            )
        fields = _exact_fields(cls, {key: value for key, value in data.items() if key != "schema_version"}, "")
        if fields["rope"] is not None:
            fields["rope"] = RopeSpec.from_dict(fields["rope"])
        if fields["qk_norm"] is not None:
            fields["qk_norm"] = QKNorm.from_dict(fields["qk_norm"])
        return cls(**fields)

    @classmethod
    def from_hf(cls, config: Any, *, layer: int = 0, convention: str = "serving") -> AttentionSpec:
        """Read the attention of one layer of a transformers model.

        What a model class decides by itself is resolved by its name: Qwen3 normalises per head, weighted, before the
        rotation; OLMo-2 over the whole projection; Llama-4 without weight, after it, in layers that rotate. Families:
        ``llama``, ``mistral``, ``qwen3``, ``gemma3_text``, ``olmo2``, ``llama4_text``.

        Args:
            config: a configuration object or its dictionary (``config.json``), in the style of version 4 or 5. One of a
                composite model is read at its ``text_config``. It is not changed.
            layer: index of the layer, for classes whose layers differ.
            convention: see :meth:`RopeSpec.from_hf`.

        Raises:
            ConfigError: the class is not known, or a key is missing, contradictory or canonical-only, or says what no
                spec can say.
            RopeConfigError: likewise for the rotary keys.
        """
        spec: AttentionSpec = readers.get("hf_attention").read(config, layer=layer, convention=convention)
        return spec

    def to_hf(self, model_type: str, *, layers: int = 1, serving_target: str | None = None) -> dict[str, Any]:
        """Write the attention part of a transformers 5 configuration whose layers all are like this one.

        Args:
            model_type: the class that will read it; see :meth:`from_hf`.
            layers: how many layers the model has.
            serving_target: the engine that will serve the model; see :func:`polyattn.check_servable`.

        Returns:
            Keys that :meth:`from_hf` reads back as this spec.

        Raises:
            ConfigError: the target cannot serve the spec, or the class would not read back the same; each difference is
                named.
            RopeConfigError: the class cannot carry the rotary spec, for instance because it pairs other channels.
        """
        from polyattn_modules.serving import require_servable

        check_count(layers)
        if serving_target is not None:
            require_servable(self, serving_target)
        written: dict[str, Any] = readers.get("hf_attention").write([self] * layers, model_type)
        return written


def check_count(layers: object) -> None:
    """Refuse anything but a number of layers."""
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"layers must be the number of layers, an int >= 1, got {shown(layers)}")


def value_width(head_dim: int, v_head_dim: int | None) -> int:
    """``v_head_dim``, or what stands for it where it was not given: ``head_dim``, unless that is faulty itself."""
    if v_head_dim is not None:
        return v_head_dim
    return 1 if problem_of("head_dim", head_dim) else head_dim  # a fault is said once, of the argument that was given


def _exact_fields(kind: type[Any], data: Any, prefix: str) -> dict[str, Any]:
    """``data`` as a dict, if it has exactly the fields of ``kind``."""
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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or_none(need: str, holds: Callable[[Any], bool]) -> tuple[str, Callable[[Any], bool]]:
    return f"{need} or None", lambda value: value is None or holds(value)


_SIZE: tuple[str, Callable[[Any], bool]] = (
    "an int from 1 to 2147483647",  # a tensor of any of these widths must be possible
    lambda value: _is_int(value) and 1 <= value < 2**31,
)
_WINDOW: tuple[str, Callable[[Any], bool]] = ("an int >= 1", lambda value: _is_int(value) and value >= 1)
_POSITIVE: tuple[str, Callable[[Any], bool]] = ("a positive number", lambda value: is_number(value) and value > 0)
_FLAG: tuple[str, Callable[[Any], bool]] = ("true or false", lambda value: isinstance(value, bool))
#: What each field must be by itself.
_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hidden_size": _SIZE,
    "num_heads": _SIZE,
    "num_kv_heads": _SIZE,
    "head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "rope": _or_none("a RopeSpec", lambda value: isinstance(value, RopeSpec)),
    "qk_norm": _or_none("a QKNorm", lambda value: isinstance(value, QKNorm)),
    "window": _or_none(*_WINDOW),
    "dropout": ("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1),
    "bias": _FLAG,
    "output_bias": _FLAG,
    "softcap": _or_none(*_POSITIVE),
    "sinks": _FLAG,
    "scale": _or_none(*_POSITIVE),
}


def problem_of(name: str, value: object) -> str:
    """What is wrong with the value of a field of :class:`AttentionSpec` by itself; empty when nothing is."""
    need, holds = _NEEDS[name]
    return "" if holds(value) else f"must be {need}, got {given(value)}"


def given(value: object) -> str:
    """``value`` in a message: itself if it is short, else its type."""
    return shown(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
