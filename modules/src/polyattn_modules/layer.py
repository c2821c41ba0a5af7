"""What one layer of a model uses: a backend, and a structure that may still lack its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyattn import AttentionBackend, ConfigError
from polyattn_modules.fields import SIZES, Structure, structure_of
from polyattn_modules.gqa import GroupedQueryAttention
from polyattn_modules.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAttention(Structure):
    """What one layer uses: the fields of :class:`Structure`, sizes ``None`` where the config does not say them.

    Attributes:
        backend: the resolved backend object.
    """

    backend: AttentionBackend

    @property
    def spec(self) -> AttentionSpec:
        """The structure of the layer.

        Raises:
            ConfigError: a size is missing, or fields contradict each other.
        """
        missing = [name for name in SIZES[:3] if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be given: the structure of a layer needs its sizes, got None")
        return AttentionSpec.of(structure_of(self))

    def build(self, **rest: Any) -> GroupedQueryAttention:
        """The layer.

        Args:
            rest: ``fused_qkv``, ``device``, ``dtype``, see :class:`GroupedQueryAttention`.

        Raises:
            ConfigError: see :attr:`spec`.
        """
        return GroupedQueryAttention.from_spec(self.spec, backend=self.backend, **rest)
