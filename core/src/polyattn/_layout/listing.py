"""Layouts of keys in slots and lists: caches, and keys that are listed for each query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.cached import CachedMask
from polyattn._layout.checks import check_int, on_host
from polyattn._layout.selected import SelectedMask
from polyattn._layout.trees import Trees
from polyattn._layout.windows import Window
from polyattn.messages import shown

if TYPE_CHECKING:
    from typing_extensions import Self


class Listing(Trees):
    """A layout with the constructors of caches and of listed keys."""

    @classmethod
    def cached(
        cls,
        lengths: Tensor,
        q_len: int,
        capacity: int,
        *,
        window: Window = None,
        ring: bool = False,
        finite: bool = False,
    ) -> Self:
        """Queries that are the newest tokens of their rows, over the slots of a cache with their keys in it already.

        Args:
            lengths: ``Int[B]``, tokens of each row, the ``q_len`` new ones included. Never copied from a device.
            q_len: number of queries; query i stands at position ``lengths - q_len + i``.
            capacity: number of slots K. The key of position ``p`` lies in slot ``p``.
            window: how many positions a query sees, its own included.
            ring: the key of position ``p`` lies in slot ``p % capacity`` instead, where an older one lay. Needs a
                window, and ``capacity >= window - 1 + q_len``: the first query still needs what the last may overwrite.
            finite: a promise that slots which a query does not see hold neither NaN nor Inf. Without it keys and values
                are copied at each call to hide them.

        Raises:
            LayoutError: a number does not fit; of ``lengths`` where they are on the CPU.
        """
        check_int("q_len", q_len)
        check_int("capacity", capacity, 1)
        mask = CachedMask(lengths, window, ring, finite)
        if ring and not isinstance(mask.window, int):
            raise LayoutError(f"window must be given with ring=True, which keeps no older keys, got {shown(window)}")
        if ring and isinstance(mask.window, int) and capacity < mask.window - 1 + q_len:
            raise LayoutError(
                f"capacity must be at least window - 1 + q_len = {mask.window - 1 + q_len} in a ring, got {capacity}: "
                "new keys would overwrite some that the first query sees"
            )
        known = on_host(lengths, sync=False)
        if known is not None and known.numel():
            least, most = int(known.min()), int(known.max())
            if least < q_len or (most > capacity and not ring):
                upper = "" if ring else f" .. capacity={capacity}"
                raise LayoutError(
                    f"lengths must lie in q_len={q_len}{upper}, the new tokens included, got {least} .. {most}"
                )
        return cls(q_len, capacity, visibility=mask, validate=False)

    @classmethod
    def selected(
        cls,
        indices: Tensor,
        kv_len: int,
        *,
        block: int = 1,
        causal: bool = False,
        active_queries: Tensor | None = None,
        validate: bool = True,
    ) -> Self:
        """Each query sees the keys that are listed for it.

        Args:
            indices: ``Int[B|1, H|1, Q, N]``, the keys of each query; -1 stands for none, so that a query with nothing
                else is fully masked. A key that is listed twice counts once.
            kv_len: number of keys K.
            block: what is listed are blocks of so many keys, ``0 .. ceil(K / block) - 1``; the last may be shorter.
            causal: whether later keys are hidden although they are listed; the queries are the last of K positions.
            active_queries: ``Bool[B|1, Q]``.
            validate: see :class:`MaskLayout`; a number that is out of range and not checked is an error of the device.

        Raises:
            LayoutError: a number is neither -1 nor one of a key or block.
        """
        check_int("kv_len", kv_len)
        mask = SelectedMask(indices, block, causal)
        values, count = on_host(indices, sync=validate), -(-kv_len // block)
        if values is not None and values.numel():
            least, most = int(values.min()), int(values.max())
            if least < -1 or most >= count:
                what = "keys" if block == 1 else f"blocks of {block} of {kv_len} keys"
                raise LayoutError(f"indices must be {what}, 0 .. {count - 1}, or -1 for none, got {least} .. {most}")
        length = indices.shape[2]
        return cls(length, kv_len, visibility=mask, active_queries=active_queries, validate=validate)
