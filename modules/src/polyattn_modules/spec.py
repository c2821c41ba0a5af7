"""The structure of an attention layer as a value: what a checkpoint must know to be read right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from polyattn import ConfigError, RopeSpec
from polyattn.messages import shown
from polyattn.registry import readers
from polyattn_modules.fields import (
    QKNorm,
    Structure,
    exact_fields,
    faults_of,
    keep_one_form,
    like,
    problem_of,
    structure_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(Structure):
    """Every structural field of an attention layer; :class:`Structure` says what each means.

    The JSON form (``to_dict``) requires every field and a ``schema_version``; nothing is defaulted when it is read. The
    schema is provisional until release 1.0; from then on a new required field raises ``SCHEMA_VERSION``. Fields whose
    feature is not built yet are part of it, and take the value that turns the feature off.

    Raises:
        ConfigError: one message with every fault.
    """

    hidden_size: int = like("hidden_size")
    num_heads: int = like("num_heads")
    num_kv_heads: int = like("num_kv_heads")
    head_dim: int = like("head_dim")
    v_head_dim: int = like("v_head_dim")

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        faults = faults_of(self)
        problems = [f"{name} {problem}" for name, problem in faults.items()]
        if not {"num_heads", "num_kv_heads"} & faults.keys() and self.num_heads % self.num_kv_heads:
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
        keep_one_form(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AttentionSpec:
        """The spec of fields that may leave out what has a default.

        Args:
            fields: by name. Where it is ``None`` or absent, ``head_dim`` is ``hidden_size / num_heads`` and
                ``v_head_dim`` is ``head_dim``.

        Raises:
            ConfigError: a field is faulty; see above.
        """
        fields = dict(fields)
        if fields.get("head_dim") is None:
            fields["head_dim"] = head_width(fields["hidden_size"], fields["num_heads"])
        if fields.get("v_head_dim") is None:
            width = fields["head_dim"]  # a fault is said once, of the argument that was given
            fields["v_head_dim"] = 1 if problem_of("head_dim", width) else width
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object."""
        own = structure_of(self)
        own["rope"] = None if self.rope is None else self.rope.to_dict()
        own["window"] = list(self.window) if isinstance(self.window, tuple) else self.window
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
        if type(version) is not int or version != cls.SCHEMA_VERSION:
            got = shown(version) if "schema_version" in data else "none"
            raise ConfigError(
                f"schema_version of an attention spec must be {cls.SCHEMA_VERSION}, got {got}; "
                "a transformers configuration is read by AttentionSpec.from_hf"
            )
        fields = exact_fields(cls, {key: value for key, value in data.items() if key != "schema_version"}, "")
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
        ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``qwen3_moe``, ``gemma2``, ``gemma3_text``, ``olmo2``, ``olmo3``,
        ``llama4_text``, ``gpt_oss``, ``smollm3``, ``cohere2``, ``exaone4``, ``glm4``, ``granite``, ``phi3``.

        Args:
            config: a configuration object or its dictionary (``config.json``), in the style of version 4 or 5. One of a
                composite model is read at its ``text_config``. It is not changed.
            layer: index of the layer, for classes whose layers differ.
            convention: see :meth:`RopeSpec.from_hf`. With ``"eagle"``, the first layer of a draft whose
                ``architectures`` name EAGLE-3 reads twice the hidden width (``input_size``).

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
        check_count(layers)
        return write_hf([self] * layers, model_type, serving_target)


def head_width(hidden_size: int, num_heads: int) -> int:
    """The width of a head that was not given.

    Raises:
        ConfigError: a size is faulty, or the heads do not share the hidden states evenly.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads}
    wrong = [f"{name} {problem}" for name, size in sizes.items() if (problem := problem_of(name, size))]
    if wrong:
        raise ConfigError("; ".join(wrong))
    if hidden_size % num_heads:
        raise ConfigError(
            "hidden_size must be a multiple of num_heads when head_dim is not given, "
            f"got hidden_size={hidden_size} and num_heads={num_heads}; give head_dim"
        )
    return hidden_size // num_heads


def write_hf(specs: list[AttentionSpec], model_type: str, serving_target: str | None) -> dict[str, Any]:
    """Write the attention part of a transformers configuration by the installed reader.

    Args:
        specs: of the layers, first to last.
        model_type: the class that will read it.
        serving_target: the engine that will serve the model, asked before anything is written.
    """
    reader = readers.get("hf_attention")
    written: dict[str, Any] = reader.write(specs, model_type, serving_target=serving_target)
    return written


def check_count(layers: object) -> None:
    """Refuse anything but a number of layers."""
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ConfigError(f"layers must be the number of layers, an int >= 1, got {shown(layers)}")
