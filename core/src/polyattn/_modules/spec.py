"""The structure of an attention layer as a value: what a checkpoint must know to be read right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from polyattn._errors import ConfigError
from polyattn._rope import RopeSpec


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
            problems.append(f"qk_norm.position must be 'before' or 'after' the rotation, got {self.position!r}")
        if self.scope not in ("head", "projection"):
            problems.append(f"qk_norm.scope must be 'head' or 'projection', got {self.scope!r}")
        if not isinstance(self.weighted, bool):
            problems.append(f"qk_norm.weighted must be true or false, got {self.weighted!r}")
        if not _is_number(self.eps) or not 0 < self.eps < 1:
            problems.append(f"qk_norm.eps must be a small positive number such as 1e-6, got {self.eps!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        object.__setattr__(self, "eps", float(self.eps))


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
        problems = []
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                problems.append(f"{name} must be an int >= 1, got {getattr(self, name)!r}")
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} "
                f"and num_kv_heads={self.num_kv_heads}"
            )
        if self.window is not None and (not _is_int(self.window) or self.window < 1):
            problems.append(f"window must be an int >= 1 or None, got {self.window!r}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            problems.append(f"dropout must lie in [0, 1), got {self.dropout!r}")
        for name in ("softcap", "scale"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not math.isfinite(value) or value <= 0):
                problems.append(f"{name} must be a positive number or None, got {value!r}")
        for name in ("bias", "output_bias", "sinks"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.qk_norm is not None and not isinstance(self.qk_norm, QKNorm):
            problems.append(f"qk_norm must be a QKNorm or None, got {type(self.qk_norm).__name__}")
        if self.rope is not None and not isinstance(self.rope, RopeSpec):
            problems.append(f"rope must be a RopeSpec or None, got {type(self.rope).__name__}")
        elif self.rope is not None and self.rope.head_dim != self.head_dim:
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
            got = repr(version) if "schema_version" in data else "none"
            raise ConfigError(
                f"schema_version of an attention spec must be {cls.SCHEMA_VERSION}, got {got}; "
                "a transformers configuration is read by AttentionSpec.from_hf"
            )
        fields = _exact_fields(cls, {key: value for key, value in data.items() if key != "schema_version"}, "")
        if fields["rope"] is not None:
            fields["rope"] = RopeSpec.from_dict(fields["rope"])
        if fields["qk_norm"] is not None:
            fields["qk_norm"] = QKNorm(**_exact_fields(QKNorm, fields["qk_norm"], "qk_norm."))
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
        from polyattn._modules.hf import read_spec

        return read_spec(config, layer, convention=convention)

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
        from polyattn._modules.hf import write_spec
        from polyattn._modules.serving import require_servable

        if serving_target is not None:
            require_servable(self, serving_target)
        return write_spec(self, model_type, layers)


def _exact_fields(kind: type[Any], data: Any, prefix: str) -> dict[str, Any]:
    """``data`` as a dict, if it has exactly the fields of ``kind``."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'an attention spec'} must be a mapping, got {type(data).__name__}")
    wanted = [field.name for field in dataclasses.fields(kind)]
    problems = [f"{prefix}{name} is missing" for name in wanted if name not in data]
    problems += [f"{prefix}{name} is unknown" for name in data if name not in wanted]
    if problems:
        raise ConfigError(
            f"an attention spec must have exactly its fields: {'; '.join(problems)}; "
            f"the fields are {', '.join(prefix + name for name in wanted)}"
        )
    return dict(data)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
