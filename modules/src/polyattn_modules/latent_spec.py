"""The structure of a multi-head latent attention layer as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from polyattn import ConfigError, RopeSpec
from polyattn.messages import is_number, shown
from polyattn.registry import readers
from polyattn_modules.fields import QKNorm, exact_fields, faults_of, keep_one_form, like
from polyattn_modules.spec import AttentionSpec


def _own(need: str, holds: Any, **rest: Any) -> Any:
    return dataclasses.field(metadata={"need": need, "holds": holds}, **rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Every structural field of a :class:`LatentAttention` layer.

    Keys and values of all heads are projected from one latent of ``kv_rank`` channels. Beside it a token has one key of
    ``rope_dim`` channels, which is rotated and serves all heads. A head's query and key are ``nope_dim`` channels that
    stay and, behind them, ``rope_dim`` that rotate.

    The JSON form (``to_dict``) requires every field, a ``schema_version`` and ``kind: latent``.

    Attributes:
        hidden_size: width of the hidden states.
        num_heads: heads of queries, keys and values.
        q_rank: channels of the latent that queries are projected from; ``None``: from the hidden states themselves.
        kv_rank: channels of the latent of keys and values.
        nope_dim: channels of a head that are not rotated.
        rope_dim: channels of a head that are rotated.
        v_head_dim: width of values per head.
        rope: the rotary spec, of heads of ``rope_dim`` channels.
        norm_eps: added to the mean of squares in the norms of the latents.
        scale: factor of the scores, or ``None`` for ``(nope_dim + rope_dim) ** -0.5``.
        window, dropout, layout: as in :class:`AttentionSpec`.
        bias: whether the projections into the latents have biases.
        output_bias: whether the output projection has one.

    Raises:
        ConfigError: one message with every fault.
    """

    hidden_size: int = like("hidden_size")
    num_heads: int = like("num_heads")
    q_rank: int | None = like("input_size", default=None)
    kv_rank: int = like("head_dim")
    nope_dim: int = like("head_dim")
    rope_dim: int = like("head_dim")
    v_head_dim: int = like("v_head_dim")
    rope: RopeSpec = _own("a RopeSpec", lambda value: isinstance(value, RopeSpec))  # noqa: RUF009
    norm_eps: float = _own(
        "a small positive number such as 1e-6", lambda value: is_number(value) and 0 < value < 1, default=1e-6
    )
    scale: float | None = like("scale", default=None)
    window: int | tuple[int | None, int | None] | None = like("window", default=None)
    dropout: float = like("dropout", default=0.0)
    bias: bool = like("bias", default=False)
    output_bias: bool = like("output_bias", default=False)
    layout: str | None = like("layout", default=None)

    KIND: ClassVar[str] = "latent"
    SCHEMA_VERSION: ClassVar[int] = 1
    #: What a grouped-query layer may have and this one has not.
    qk_norm: ClassVar[QKNorm | None] = None
    softcap: ClassVar[float | None] = None
    sinks: ClassVar[bool] = False
    input_size: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        faults = faults_of(self)
        problems = [f"{name} {problem}" for name, problem in faults.items()]
        if not {"rope", "rope_dim"} & faults.keys() and self.rope.head_dim != self.rope_dim:
            problems.append(
                f"rope.head_dim must equal rope_dim, the channels that rotate, got rope.head_dim={self.rope.head_dim} "
                f"and rope_dim={self.rope_dim}"
            )
        if problems:
            raise ConfigError("; ".join(problems))
        keep_one_form(self)

    @property
    def head_dim(self) -> int:
        """Width of queries and keys per head."""
        return self.nope_dim + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """As many as query heads: each has keys and values of its own."""
        return self.num_heads

    @property
    def absorbed(self) -> AttentionSpec:
        """The attention over latents themselves: one KV head, whose values are the first channels of its keys.

        Queries are taken through the key projection, outputs through the value projection; the scores are the same.
        """
        return AttentionSpec(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim,
            v_head_dim=self.kv_rank,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            dropout=self.dropout,
            layout=self.layout,
        )

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own["rope"] = self.rope.to_dict()
        own["window"] = list(self.window) if isinstance(self.window, tuple) else self.window
        return {"schema_version": self.SCHEMA_VERSION, "kind": self.KIND, **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatentSpec:
        """Read the canonical JSON object.

        Raises:
            ConfigError: the version or kind is another one, or a field is absent, extra or faulty; each is named.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"a latent spec must be a mapping, got {type(data).__name__}")
        rest = dict(data)
        for name, need in (("schema_version", cls.SCHEMA_VERSION), ("kind", cls.KIND)):
            got = rest.pop(name, None)
            if type(got) is not type(need) or got != need:
                raise ConfigError(
                    f"{name} of a latent spec must be {shown(need)}, got {shown(got)}; a transformers configuration is "
                    "read by LatentSpec.from_hf"
                )
        fields = exact_fields(cls, rest, "")
        return cls(**{**fields, "rope": RopeSpec.from_dict(fields["rope"])})

    @classmethod
    def from_hf(cls, config: Any, *, layer: int = 0, convention: str = "serving") -> LatentSpec:
        """Read one layer of a transformers configuration.

        Args:
            config: a configuration, or its dictionary (``config.json``).
            layer: index of the layer.
            convention: how keys are read that readers understand differently; see :meth:`RopeSpec.from_hf`.

        Raises:
            ConfigError: the class is not known, or the layer has something that a spec cannot say, which is named.
        """
        found = readers.get("hf_latent").read(config, layer=layer, convention=convention)
        assert isinstance(found, cls)
        return found
