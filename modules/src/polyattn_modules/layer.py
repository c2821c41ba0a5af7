"""What one layer of a model uses: a backend, and a structure that may still lack its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyattn import AttentionBackend, ConfigError, RopeSpec
from polyattn_modules.gqa import GroupedQueryAttention
from polyattn_modules.spec import AttentionSpec, QKNorm, value_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What one layer uses. All but ``backend`` is as in :class:`AttentionSpec`.

    Attributes:
        backend: the resolved backend object.
        rope: the rotary spec, or ``None`` for none.
        qk_norm: the norm of queries and keys, or ``None``.
        window: keys that a query sees, itself included, or ``None`` for all.
        dropout: of attention weights, in training.
        bias, output_bias: whether the projections have biases.
        softcap: of the scores, or ``None``.
        sinks: whether each query head has a learned sink logit.
        scale: of the scores, or ``None`` for ``head_dim ** -0.5``.
        hidden_size, num_heads, num_kv_heads, head_dim, v_head_dim: sizes, ``None`` where the config does not say them.
    """

    backend: AttentionBackend
    rope: RopeSpec | None = None
    qk_norm: QKNorm | None = None
    window: int | None = None
    dropout: float = 0.0
    bias: bool = False
    output_bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The structure of the layer.

        Raises:
            ConfigError: a size is missing, or fields contradict each other.
        """
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "backend"
        }
        missing = [name for name in ("hidden_size", "num_heads", "num_kv_heads") if fields[name] is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be given: the structure of a layer needs its sizes, got None")
        if self.head_dim is None:
            fields["head_dim"], rest = divmod(fields["hidden_size"], fields["num_heads"])
            if rest:
                raise ConfigError(
                    "hidden_size must be a multiple of num_heads when head_dim is not given, "
                    f"got hidden_size={self.hidden_size} and num_heads={self.num_heads}; give head_dim"
                )
        fields["v_head_dim"] = value_width(fields["head_dim"], self.v_head_dim)
        return AttentionSpec(**fields)

    def build(self, **rest: Any) -> GroupedQueryAttention:
        """The layer.

        Args:
            rest: ``fused_qkv``, ``device``, ``dtype``, see :class:`GroupedQueryAttention`.

        Raises:
            ConfigError: see :attr:`spec`.
        """
        return GroupedQueryAttention.from_spec(self.spec, backend=self.backend, **rest)
