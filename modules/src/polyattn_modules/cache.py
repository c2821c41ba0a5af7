"""Keys and values of earlier tokens, kept for decoding.

A :class:`KVCache` holds those of one layer; the caches of a model's layers share their rows: how many tokens each batch
row has. Lengths lie on the device, and nothing here reads them there or while a graph is traced. A CPU tensor outside
a graph is read for checks; elsewhere torch's asynchronous assertions make them.

Hidden slots always hold finite numbers (those of the zeros that a cache begins with, or of tokens that were rolled
back), so that no backend copies keys to hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from polyattn import AttentionInputError, ConfigError, MaskLayout
from polyattn.messages import shown
from polyattn_modules.latent_spec import LatentSpec
from polyattn_modules.spec import AttentionSpec

Kind = Literal["static", "sliding", "growing"]
KINDS = ("static", "sliding", "growing")
#: Slots of a growing cache that was given no capacity.
FIRST_CAPACITY = 64


class KVCache:
    """The keys and values of one attention layer.

    The key of position p lies in slot p; in a sliding cache, for a layer with a window, in slot ``p % capacity``, where
    it overwrites one that no later query sees. A sequence's first token is at position 0. Rows may have different
    lengths: write prompts padded on the right and roll back, or use :meth:`append_packed`.

    It is for inference; ``past=`` of a layer takes keys that need gradients.

    Args:
        spec: of the layer. Of one with latents, the cache holds latents and rotated keys, ``Hkv`` being 1.
        batch: rows B.
        capacity: slots. Needed by a static cache; where a growing one begins; a sliding one derives it,
            ``window - 1 + max(max_new, max_rollback)``: fewer would be overwritten while they are still seen.
        device, dtype: of the keys and values.
        kind: ``"static"``, ``"sliding"`` or ``"growing"``, whose tensors are made anew, twice as large, when full.
        max_new: the most tokens at once that a sliding cache takes.
        max_rollback: how far behind the furthest token ever written a sliding cache may be rolled back.

    Attributes:
        spec, kind, max_new, max_rollback: as given.
        capacity: the number of slots.

    Raises:
        ConfigError: an argument does not fit; one message with every fault.
    """

    def __init__(
        self,
        spec: AttentionSpec | LatentSpec,
        batch: int,
        capacity: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kind: Kind = "static",
        max_new: int = 1,
        max_rollback: int = 0,
        _rows: _Rows | None = None,
    ) -> None:
        self._latent = isinstance(spec, LatentSpec)
        spec = spec.absorbed if isinstance(spec, LatentSpec) else spec
        _check_making(spec, batch, capacity, kind, max_new, max_rollback)
        if kind == "sliding":
            reach = _reach(spec)
            assert reach is not None
            capacity = reach + max(max_new, max_rollback)
        slots = FIRST_CAPACITY if capacity is None else capacity
        self.spec = spec
        self.kind: Kind = kind
        self.max_new = max_new
        self.max_rollback = max_rollback
        with torch.inference_mode(False):  # what is made there can only be written there
            # A row for each slot of each head: a graph writes such a tensor in place by one index.
            count = batch * spec.num_kv_heads * slots
            self.slots_of_keys = torch.zeros(count, spec.head_dim, device=device, dtype=dtype)
            # The values of a latent layer are the first channels of its keys, held once.
            width = 0 if self._latent else spec.v_head_dim
            self.slots_of_values = torch.zeros(count, width, device=device, dtype=dtype)
        self.capacity = slots
        self._rows = _Rows(batch, self.slots_of_keys.device) if _rows is None else _rows
        self._place = self._rows.join(self)

    @classmethod
    def for_layers(
        cls,
        specs: Sequence[AttentionSpec | LatentSpec],
        batch: int,
        capacity: int | None = None,
        *,
        device: torch.device | str | None = None,
        kind: Kind = "static",
        **rest: Any,
    ) -> tuple[KVCache, ...]:
        """The caches of a model's layers, which share their rows: one ``lengths`` for all.

        Lengths advance when each of them has appended. :meth:`rollback`, :meth:`reorder`, :meth:`reset` and :meth:`to`
        of one act on all.

        Args:
            specs: of the layers, in order; ``caches[i]`` is that of ``specs[i]``.
            batch: rows B.
            capacity: slots of the caches that are not sliding.
            device: of all.
            kind: with ``"sliding"``, layers without a window get a static cache.
            rest: the other arguments of :class:`KVCache`.
        """
        rows = _Rows(batch, torch.empty(0, device=device).device)
        caches = []
        for spec in specs:
            slides = kind == "sliding" and isinstance(spec, (AttentionSpec, LatentSpec)) and _reach(spec) is not None
            own: Kind = "static" if kind == "sliding" and not slides else kind
            slots = None if slides else capacity
            caches.append(cls(spec, batch, slots, device=device, kind=own, _rows=rows, **rest))
        return tuple(caches)

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, capacity, D]``, normed and rotated as the layer does."""
        return self.slots_of_keys.view(self._rows.batch, self.spec.num_kv_heads, self.capacity, self.spec.head_dim)

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, capacity, Dv]``."""
        if self._latent:
            return self.keys[..., : self.spec.v_head_dim]
        return self.slots_of_values.view(self._rows.batch, self.spec.num_kv_heads, self.capacity, self.spec.v_head_dim)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that hold keys and values, each once."""
        return (self.keys,) if self._latent else (self.keys, self.values)

    @property
    def lengths(self) -> Tensor:
        """``Int64[B]``: tokens of each row before the next call. Do not change it in place."""
        return self._rows.lengths

    def layout(self, q_len: int) -> MaskLayout:
        """What the next ``q_len`` tokens of each row see, themselves included; the same object until they are there.

        It has the layer's window only in a sliding cache: caches of another kind share one layout, which each layer
        narrows by its own.

        Raises:
            AttentionInputError: more tokens than the cache takes. Of lengths on a device, :meth:`append` asserts it.
        """
        capacity = self._room(q_len)
        ring = self.kind == "sliding"
        window = self.spec.window if ring else None
        made = self._rows.find("layout", q_len, capacity, window, ring)
        if made is None:
            lengths = self._rows.lengths + q_len
            if self.kind == "static" and _readable(lengths) and (most := int(lengths.max())) > capacity:
                raise AttentionInputError(
                    f"capacity must hold the tokens of each row, got {q_len} new ones after {most - q_len} in a cache "
                    f"of {capacity} slots; make it larger, or of kind='growing'"
                )
            made = MaskLayout.cached(lengths, q_len, capacity, window=window, ring=ring, finite=True)
            self._rows.keep(made, "layout", q_len, capacity, window, ring)
        return cast("MaskLayout", made)

    def positions(self, q_len: int) -> Tensor:
        """The positions of the next ``q_len`` tokens, ``Int64[B, q_len]``; the same object until they are there."""
        found = self._rows.find("positions", q_len)
        if found is None:
            lengths = self._rows.lengths
            found = lengths[:, None] + torch.arange(q_len, device=lengths.device)
            self._rows.keep(found, "positions", q_len)
        return cast("Tensor", found)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the next tokens of each row.

        Args:
            keys: ``[B, Hkv, N, D]``.
            values: ``[B, Hkv, N, Dv]``.

        Returns:
            All slots, ``[B, Hkv, capacity, D]`` and ``[B, Hkv, capacity, Dv]``, over which :meth:`layout` tells.

        Raises:
            AttentionInputError: tensors or their number do not fit, this layer has written and another one of its model
                has not yet, or the keys need gradients.
            RuntimeError: on a device or inside a graph: a row is full.
        """
        rows, count = self._rows, keys.shape[2]
        self._check(keys, values, (rows.batch, count))
        capacity = self._room(count)
        self._grow(capacity)
        at = rows.find("slots", count, capacity, self.kind, self.spec.num_kv_heads)
        if at is None:
            positions = self.positions(count)
            if self.kind == "sliding":
                positions = positions % capacity
            else:
                _require(rows.lengths + count <= capacity, "a row of the cache is full")
            row = torch.arange(rows.batch, device=positions.device)[:, None]
            at = self._at(row, positions).transpose(1, 2).flatten()
            rows.keep(at, "slots", count, capacity, self.kind, self.spec.num_kv_heads)
        self._write(at, keys, values)
        rows.wrote(self._place, count)
        return self.keys, self.values

    def append_packed(self, keys: Tensor, values: Tensor, cu_seqlens: Tensor) -> None:
        """Write different numbers of tokens to the rows, for instance prompts.

        Args:
            keys: ``[1, Hkv, T, D]``, the tokens of row 0, of row 1, and so on.
            values: ``[1, Hkv, T, Dv]``.
            cu_seqlens: ``Int[B + 1]`` on the device of the cache: row b gets tokens ``cu_seqlens[b]`` to before
                ``cu_seqlens[b + 1]``; the last is T.

        Raises:
            AttentionInputError: see :meth:`append`; and a sliding cache takes ``max_new`` tokens of a row at once.
            RuntimeError: on a device or inside a graph: likewise.
        """
        rows, total = self._rows, keys.shape[2]
        self._check(keys, values, (1, total))
        if cu_seqlens.shape != (rows.batch + 1,) or cu_seqlens.device != rows.lengths.device:
            raise AttentionInputError(
                f"cu_seqlens must be Int[{rows.batch + 1}] on {rows.lengths.device}, the offsets of {rows.batch} rows, "
                f"got {list(cu_seqlens.shape)} on {cu_seqlens.device}"
            )
        counts = cu_seqlens.diff().to(rows.lengths.dtype)
        covers = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & (counts >= 0).all()
        _require(covers, f"cu_seqlens must rise from 0 to the number of tokens, {total}")
        self._grow(self._room(total) if self.kind == "growing" else self.capacity)
        token = torch.arange(total, device=counts.device)
        row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
        slots = rows.lengths[row] + token - cu_seqlens[row]
        if self.kind == "sliding":
            _require(counts <= self.max_new, f"a sliding cache takes {self.max_new} new tokens of a row (max_new)")
            slots = slots % self.capacity
        else:
            _require(rows.lengths + counts <= self.capacity, "a row of the cache is full")
        self._write(self._at(row, slots).transpose(0, 1).flatten(), keys, values)
        rows.wrote(self._place, counts, most=total)

    def rollback(self, lengths: Tensor) -> None:
        """Forget the last tokens of each row; their slots are written again.

        Args:
            lengths: ``Int[B]``, tokens that each row keeps.

        Raises:
            AttentionInputError: a row has fewer, or a sliding cache would have lost what the next token sees: it goes
                back ``max_rollback`` tokens behind the furthest ever written.
            RuntimeError: on a device or inside a graph: likewise.
        """
        self._rows.rollback(lengths)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was, for the beams of a beam search.

        Args:
            index: ``Int[B]`` on the device of the cache.
        """
        self._rows.reorder(index)

    def reset(self) -> None:
        """Forget everything: lengths are 0 and slots hold zeros."""
        self._rows.reset()

    def to(self, device: torch.device | str) -> KVCache:
        """Move the cache, for instance to the host; returns it."""
        self._rows.to(torch.device(device))
        return self

    def hold_length(self, length: int | None) -> None:
        """One sequence length for the cache's life, for a rotary rule that depends on it.

        Raises:
            AttentionInputError: it was another one: keys in the cache are turned by another rule.
        """
        rows = self._rows
        if rows.rope_length is None:
            rows.rope_length = length
        elif length != rows.rope_length:
            raise AttentionInputError(
                f"length of the scope must stay {rows.rope_length} while a cache is used, whose keys are rotated for "
                f"it, got {shown(length)}; reset() the cache, or give the longest length from the first call on"
            )

    def _at(self, row: Tensor, slot: Tensor) -> Tensor:
        """Where the heads of a slot are, ``[..., Hkv]``."""
        heads = self.spec.num_kv_heads
        return ((row * heads)[..., None] + torch.arange(heads, device=slot.device)) * self.capacity + slot[..., None]

    def _write(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``[B, Hkv, N, width]``, in this order, where ``at`` says."""
        self.slots_of_keys.index_copy_(0, at, keys.reshape(-1, keys.shape[3]))
        if not self._latent:
            self.slots_of_values.index_copy_(0, at, values.reshape(-1, values.shape[3]))

    def _room(self, count: int) -> int:
        """The number of slots that ``count`` more tokens need."""
        rows = self._rows
        if self.kind == "sliding":
            if count > self.max_new:
                raise AttentionInputError(
                    f"a sliding cache made with max_new={self.max_new} takes so many new tokens at once, got {count}; "
                    "give them in pieces, or make the cache with a larger max_new"
                )
            return self.capacity
        if self.kind == "growing":
            return self.capacity if rows.most + count <= self.capacity else max(2 * self.capacity, rows.most + count)
        return self.capacity

    def _grow(self, capacity: int) -> None:
        more = capacity - self.capacity
        if self.kind == "growing" and more > 0:
            with torch.inference_mode(False):
                wide = [torch.cat([x, x.new_zeros(*x.shape[:2], more, x.shape[3])], 2) for x in self.stored]
            self.slots_of_keys = wide[0].flatten(0, 2)
            self.slots_of_values = self.slots_of_keys[:, :0] if self._latent else wide[1].flatten(0, 2)
            self.capacity = capacity

    def _check(self, keys: Tensor, values: Tensor, sizes: tuple[int, int]) -> None:
        spec, (batch, count) = self.spec, sizes
        problems = []
        for name, x, width in (("keys", keys, spec.head_dim), ("values", values, spec.v_head_dim)):
            need = (batch, spec.num_kv_heads, count, width)
            own = self.slots_of_keys
            if x.shape != need or x.dtype is not own.dtype or x.device != own.device:
                problems.append(
                    f"{name} must be {list(need)} of {own.dtype} on {own.device}, as the cache is, "
                    f"got {list(x.shape)} of {x.dtype} on {x.device}"
                )
            if torch.is_grad_enabled() and x.requires_grad:
                problems.append(f"{name} must not need gradients in a cache; call under torch.no_grad(), or use past=")
        if problems:
            raise AttentionInputError("; ".join(problems))
        self._rows.check_turn(self._place)


class _Rows:
    """What the caches of a model's layers share: the length of each row, and who has appended the tokens of this call.

    Attributes:
        lengths: ``Int64[B]``.
        furthest: ``Int64[B]``, the most tokens that each row ever had.
        most: on the host, at least the largest length; of growing caches.
        rope_length: see :meth:`KVCache.hold_length`.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch = batch
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            self.furthest = torch.zeros_like(self.lengths)
        self.most = 0
        self.rope_length: int | None = None
        self._caches: list[KVCache] = []
        self._written: list[bool] = []
        self._kept: list[tuple[Any, tuple[Any, ...]]] = []

    def join(self, cache: KVCache) -> int:
        """The place of another layer's cache."""
        self._caches.append(cache)
        self._written.append(False)
        return len(self._caches) - 1

    def find(self, *key: Any) -> Any:
        """What was kept for the next call under this key; symbolic sizes have no hash."""
        for value, known in self._kept:
            if known == key:
                return value
        return None

    def keep(self, value: Any, *key: Any) -> None:
        self._kept.append((value, key))

    def check_turn(self, place: int) -> None:
        if self._written[place]:
            others = [i for i, written in enumerate(self._written) if not written]
            raise AttentionInputError(
                f"the cache of layer {place} has the tokens of this call already, and those of the layers "
                f"{', '.join(map(str, others))} do not; append to each once, or rollback(cache.lengths) to begin anew"
            )

    def wrote(self, place: int, count: int | Tensor, *, most: int | None = None) -> None:
        """Layer ``place`` has written ``count`` tokens of each row; after the last one they are there."""
        self._written[place] = True
        if all(self._written):
            self.lengths.add_(count)
            if any(cache.kind == "growing" for cache in self._caches):  # a graph would hold for one number alone
                self.most += cast("int", count) if most is None else most
            torch.maximum(self.furthest, self.lengths, out=self.furthest)
            self._begin()

    def rollback(self, lengths: Tensor) -> None:
        if not isinstance(lengths, Tensor) or lengths.shape != self.lengths.shape or lengths.is_floating_point():
            raise AttentionInputError(f"lengths must be Int[{self.batch}], one for each row, got {shown(lengths)}")
        lengths = lengths.to(self.lengths)
        _require((lengths >= 0) & (lengths <= self.lengths), "rollback must keep 0 to all tokens of each row")
        for back in {cache.max_rollback for cache in self._caches if cache.kind == "sliding"}:
            text = f"a sliding cache goes back {back} tokens (max_rollback) behind the furthest ever written"
            _require((self.furthest - lengths <= back) | (lengths == self.lengths), text)
        self.lengths.copy_(lengths)
        if self.most and _readable(lengths):
            self.most = int(lengths.max()) if lengths.numel() else 0
        self._begin()

    def reorder(self, index: Tensor) -> None:
        if not isinstance(index, Tensor) or index.shape != (self.batch,) or index.is_floating_point():
            raise AttentionInputError(f"index must be Int[{self.batch}], a row for each row, got {shown(index)}")
        for cache in self._caches:
            for x in cache.stored:
                x.copy_(x.index_select(0, index))
        self.lengths.copy_(self.lengths.index_select(0, index))
        self.furthest.copy_(self.furthest.index_select(0, index))
        self._begin()

    def reset(self) -> None:
        for x in (self.lengths, self.furthest, *(x for cache in self._caches for x in cache.stored)):
            x.zero_()
        self.most, self.rope_length = 0, None
        self._begin()

    def to(self, device: torch.device) -> None:
        for cache in self._caches:
            cache.slots_of_keys, cache.slots_of_values = (
                x.to(device) for x in (cache.slots_of_keys, cache.slots_of_values)
            )
        self.lengths, self.furthest = self.lengths.to(device), self.furthest.to(device)
        self._begin()

    def _begin(self) -> None:
        """What was made for the next call is out of date, and no layer has appended its tokens."""
        self._kept = []
        self._written = [False] * len(self._caches)


def _readable(x: Tensor) -> bool:
    """Whether a value may be read: on the CPU, outside a graph."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def _require(holds: Tensor, text: str) -> None:
    """Refuse where ``holds`` is not true everywhere; on a device and in graphs by an asynchronous assertion."""
    if _readable(holds):
        if not bool(holds.all()):
            raise AttentionInputError(text)
    else:
        torch._assert_async(holds.all(), text)  # noqa: SLF001 - torch names it so


def _reach(spec: AttentionSpec | LatentSpec) -> int | None:
    """How many positions before its own a query sees; ``None`` where its window does not bound them."""
    window = spec.window
    return window[0] if isinstance(window, tuple) else None if window is None else window - 1


def _check_making(spec: Any, batch: Any, capacity: Any, kind: Any, max_new: Any, max_rollback: Any) -> None:
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(f"spec must be an AttentionSpec, such as layer.spec, got {shown(spec)}")
    problems = []
    if kind not in KINDS:
        problems.append(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
    for name, value, least in (("batch", batch, 1), ("max_new", max_new, 1), ("max_rollback", max_rollback, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(f"{name} must be an int >= {least}, got {shown(value)}")
    if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
        problems.append(f"capacity must be an int >= 1, got {shown(capacity)}")
    if kind == "static" and capacity is None:
        problems.append("capacity must be given for a static cache, the most tokens of a row, got None")
    if kind == "sliding" and capacity is not None:
        problems.append(
            "capacity of a sliding cache must not be given: it is window - 1 + max(max_new, max_rollback), "
            f"got {shown(capacity)}"
        )
    if kind == "sliding" and _reach(spec) is None:
        problems.append("kind must be static or growing for a layer without a window, got sliding")
    if problems:
        raise ConfigError("; ".join(problems))
