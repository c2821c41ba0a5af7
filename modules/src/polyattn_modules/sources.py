"""Where the keys of a layer's forward come from, besides its own hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from polyattn import AttentionInputError
from polyattn_modules.cache import KVCache

#: Keys ``[B, Hkv, K, D]`` and values ``[B, Hkv, K, Dv]``.
Pair = tuple[Tensor, Tensor]


class KeySource(NamedTuple):
    """At most one of the first four.

    Attributes:
        kv_hidden: ``[B, C, input_size]``, projected by the layer; before its own keys.
        past: projected keys and values; before its own.
        keys_values: projected keys and values; instead of its own.
        cache: of the layer; takes its own and gives all.
        positions: of the keys of one of the first three.
    """

    kv_hidden: Tensor | None = None
    past: Pair | None = None
    keys_values: Pair | None = None
    cache: KVCache | None = None
    positions: Tensor | None = None

    @property
    def name(self) -> str | None:
        """Which one is given.

        Raises:
            AttentionInputError: two are.
        """
        found = [name for name in self._fields[:4] if getattr(self, name) is not None]
        if len(found) > 1:
            raise AttentionInputError(
                f"at most one of {', '.join(self._fields[:4])} may be given, got {' and '.join(found)}: "
                "each says where the layer's keys come from"
            )
        return found[0] if found else None

    @property
    def pair(self) -> Pair | None:
        """The projected keys and values that were given."""
        return self.past if self.keys_values is None else self.keys_values

    def tensors(self) -> tuple[Tensor, ...]:
        """What was given besides positions, without a cache."""
        return (*(() if self.kv_hidden is None else (self.kv_hidden,)), *(self.pair or ()))

    def shape(self) -> Any:
        """What a request depends on."""
        if self.cache is not None:
            return "cache"
        return self.name, tuple([(x.shape, x.dtype, x.device) for x in self.tensors()])


#: No other keys than the layer's own.
NOTHING = KeySource()
