"""Random attention calls: every kind of layout, size, dtype, stride and feature, and all their mixtures."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from polyattn import FEATURES, MaskLayout, StructuredMask
from polyattn_conformance.case import INFER, INFER_LSE, TRAIN, TRAIN_LSE, Case, Mode, make_case
from polyattn_conformance.variants import ARRANGEMENTS, poisoned, rearranged

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: What the modes need.
_MODES = {INFER: (), INFER_LSE: ("lse",), TRAIN: ("grad",), TRAIN_LSE: ("grad", "lse", "lse_grad")}
#: Ids of three documents: only their equality counts.
_IDS = ((0, 1, 2), (-1, 0, 7), (3, 259, 65539), (-(2**40), 5, 2**40))
#: Where positions begin; the large ones lie beyond what FP32 and int32 tell apart.
_ORIGINS = (0, 0, -6, 1000, 2**25, 2**40)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What sizes to draw from.

    Attributes:
        q: lengths of queries.
        kv: lengths of keys; empty means those of the queries.
        batch: batches.
        kv_heads: KV heads.
        groups: query heads per KV head.
        widths: of queries, keys and values.
    """

    q: Sequence[int] = range(13)
    kv: Sequence[int] = range(13)
    batch: Sequence[int] = (1, 2, 3)
    kv_heads: Sequence[int] = (1, 2)
    groups: Sequence[int] = (1, 2, 3)
    widths: Sequence[int] = range(1, 10)


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draws one call.

    Attributes:
        random: where the numbers come from.
        features: words of :data:`polyattn.FEATURES` that the call may use.
        sizes: its sizes.
        device: where its tensors are.
    """

    random: Random
    features: Collection[str] = FEATURES
    sizes: Sizes = Sizes()
    device: torch.device | str = "cpu"

    def call(self) -> tuple[Case, Mode]:
        """A whole attention call and what is asked of it."""
        random, sizes = self.random, self.sizes
        batch, kv_heads = random.choice(sizes.batch), random.choice(sizes.kv_heads)
        group = random.choice(sizes.groups) if "gqa" in self.features else 1
        q_len = random.choice(sizes.q)
        kv_len = q_len if not sizes.kv or (random.random() < 1 / 3 and q_len in sizes.kv) else random.choice(sizes.kv)
        width = random.choice(sizes.widths)
        dtypes = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in self.features]
        case = make_case(
            self._layout(batch, kv_heads * group, q_len, kv_len),
            dtype=random.choice(dtypes),
            device=self.device,
            batch=batch,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=width,
            v_head_dim=random.choice((width, random.choice(sizes.widths)))
            if "unequal_width" in self.features
            else None,
            seed=random.randint(0, 2**16),
            scale=random.choice((None, None, 0.3, 1.0, -0.7)),
            softcap=random.choice((0.5, 4.0)) if self._uses("softcap") else None,
            sinks=self._uses("sinks"),
        )
        if self._uses("bias"):
            case = case.change(bias=self._bias((*case.q.shape[:3], case.k.shape[2]), case.q.dtype))
        if case.sinks is not None and random.random() < 1 / 4:
            case = case.change(sinks=case.sinks.float())
        if random.random() < 1 / 2:
            case = rearranged(case, lambda: random.choice((_as_it_is, *ARRANGEMENTS.values())))
        if random.random() < 1 / 4:
            case = poisoned(case, random.choice((torch.nan, torch.inf)))
        leaves = [name for name in case.tensors() if name != "bias" or "bias_grad" in self.features]
        if random.random() < 1 / 2:
            leaves = random.sample(leaves, random.randint(1, len(leaves)))
        modes = [mode for mode, needs in _MODES.items() if set(needs) <= set(self.features)]
        mode = random.choice(modes)
        if mode.lse_grad and not {"q", "k", "bias"} & set(leaves):
            leaves.append("q")  # the LSE depends on neither v nor sinks
        return case.change(leaves=tuple(leaves)), mode

    def _uses(self, feature: str) -> bool:
        return feature in self.features and self.random.random() < 1 / 3

    def _layout(self, batch: int, heads: int, q_len: int, kv_len: int) -> MaskLayout:
        random, can = self.random, self.features
        rows = random.choice((1, batch))
        active = self._bools((rows, q_len)) if "active_queries" in can and random.random() < 1 / 4 else None
        kinds: list[Callable[[], MaskLayout]] = [lambda: self._structured(rows, q_len, kv_len, active)] * 3
        if q_len and kv_len:
            per_head = random.choice((1, heads)) if "per_head_mask" in can else 1
            mask = (rows, per_head, q_len, kv_len)
            if "packed" in can:
                kinds += [lambda: self._part(rows, q_len, kv_len), lambda: self._documents(rows, q_len)]
            if {"packed", "positions", "tree"} <= {*can}:
                kinds += [lambda: self._tree(rows, q_len, kv_len)]
            if "union" in can:
                part = functools.partial(self._structured, rows, q_len, kv_len)
                kinds += [lambda: part(active) | part(None)]
            if "selected" in can:
                kinds += [lambda: self._selected((rows, per_head, q_len), kv_len, active)]
            if "dense" in can:
                kinds += [lambda: MaskLayout.dense(self._bools(mask), active_queries=active)]
            if "mask_mod" in can:
                kinds += [lambda: _from_table(self._bools(mask), active)]
        return random.choice(kinds)()

    def _structured(self, rows: int, q_len: int, kv_len: int, active: Tensor | None) -> MaskLayout:
        """Any mixture of the fields of :class:`StructuredMask`."""
        random, fields = self.random, dict[str, Tensor | None]()
        longest = max(q_len, kv_len, 1)
        if self._uses("padded"):
            fields["kv_valid"] = self._bools((rows, kv_len))
        if self._uses("positions"):
            start, dtype = random.choice(_ORIGINS), random.choice((torch.int32, torch.int64))
            start = min(start, 2**30) if dtype is torch.int32 else start
            for name, length in (("q_positions", q_len), ("kv_positions", kv_len)):
                fields[name] = (start + self._integers((rows, length), longest)).to(dtype)
        numbered = False
        if self._uses("packed"):
            ids, apart = torch.tensor(random.choice(_IDS)), random.random() < 1 / 3
            numbered = ids[0].item() == 0
            for name, length in (("q_segments", q_len), ("kv_segments", kv_len)):
                drawn = self._integers((rows, length), 2)
                fields[name] = segments = ids[drawn if apart else drawn.sort(-1).values]
            if self._uses("tree"):
                fields["kv_segment_ends"] = segments + self._integers((rows, kv_len), 2)
        causal = "causal" in self.features and random.random() < 1 / 2
        window = self._window(longest + 2)
        at = fields.get("q_positions")
        start = 0 if at is None or not at.numel() else int(at.min())
        shape = (rows, 3) if numbered and random.random() < 1 / 2 else (rows,)
        if causal and self._uses("prefix_lm"):
            fields["prefix_lengths"] = start + self._integers(shape, longest)
        if window is not None and self._uses("sink_tokens"):
            fields["sink_lengths"] = start + self._integers(shape, longest)
        mask = StructuredMask(
            causal=causal,
            window=window,
            chunk_size=random.randint(1, longest) if self._uses("chunked") else None,
            **fields,
        )
        return MaskLayout(q_len=q_len, kv_len=kv_len, batch=rows, heads=1, visibility=mask, active_queries=active)

    def _documents(self, rows: int, length: int) -> MaskLayout:
        """Packed documents, the form that lowerings are made for."""
        random = self.random

        def lengths() -> list[int]:
            ends = [*sorted({random.randint(1, length) for _ in range(random.randint(0, 4))} - {length}), length]
            return [end - start for start, end in zip([0, *ends], ends, strict=False)]

        causal, window = "causal" in self.features and random.random() < 1 / 2, self._window(length)
        sinks = random.randint(1, length) if self._uses("sink_tokens") and "positions" in self.features else 0
        return MaskLayout.packed(
            [lengths() for _ in range(rows)], causal=causal, window=window, sink_tokens=sinks if window else 0
        )

    def _window(self, most: int) -> int | tuple[int, int] | None:
        """No window, one number for both sides, or where it may be one for each."""
        random = self.random
        if not self._uses("window"):
            return None
        two = "two_sided_window" in self.features and random.random() < 1 / 2
        return (random.randint(0, most), random.randint(0, most)) if two else random.randint(1, most)

    def _tree(self, rows: int, q_len: int, kv_len: int) -> MaskLayout:
        """Some queries and some keys of a tree or several; a node may be empty."""
        random, length = self.random, max(q_len, kv_len) + self.random.randint(0, 6)
        count = random.randint(1, 6)
        cuts = [sorted(random.randint(0, length) for _ in range(count - 1)) for _ in range(rows)]
        lengths = [[b - a for a, b in itertools.pairwise([0, *ends, length])] for ends in cuts]
        parents = [[random.randint(-1, node - 1) for node in range(count)] for _ in range(rows)]
        causal = "causal" in self.features and random.random() < 2 / 3
        tree = MaskLayout.tree(parents, lengths, causal=causal, window=self._window(length))
        first_query, first_key = random.randint(0, length - q_len), random.randint(0, length - kv_len)
        part = tree.select_queries(slice(first_query, first_query + q_len))
        return part.select_keys(slice(first_key, first_key + kv_len))

    def _selected(self, shape: tuple[int, ...], kv_len: int, active: Tensor | None) -> MaskLayout:
        """Keys that are listed for each query, or blocks of keys, some twice and some none."""
        block = self.random.choice((1, 1, 2, 5))
        listed = self._integers((*shape, self.random.randint(0, 6)), -(-kv_len // block)) - 1
        causal = "causal" in self.features and self.random.random() < 1 / 2
        return MaskLayout.selected(listed, kv_len, block=block, causal=causal, active_queries=active)

    def _part(self, rows: int, q_len: int, kv_len: int) -> MaskLayout:
        """Some queries and some keys of longer packed documents, as a rank of a sequence-parallel group has them."""
        length = max(q_len, kv_len) + self.random.randint(0, 6)
        first_query, first_key = self.random.randint(0, length - q_len), self.random.randint(0, length - kv_len)
        queries = self._documents(rows, length).select_queries(slice(first_query, first_query + q_len))
        return queries.select_keys(slice(first_key, first_key + kv_len))

    def _bias(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A bias of any shape that broadcasts to ``shape``, with some elements ``-inf``."""
        random = self.random
        form = [random.choice((1, size)) if size else 0 for size in shape]
        form = form[random.choice((0, 0, 1, 2, 3)) :]
        values = (self._integers(form, 40) - 20).to(
            random.choice((dtype, dtype, torch.promote_types(dtype, torch.float32)))
        ) / 8
        values = values + random.choice((0, 0, 0, 100, -100))
        return values.masked_fill(~self._bools(form, 0.9), -torch.inf).to(self.device)

    def _integers(self, shape: Iterable[int], most: int) -> Tensor:
        """Int64, each element in ``0 .. most``."""
        generator = torch.Generator().manual_seed(self.random.randint(0, 2**16))
        return torch.randint(0, most + 1, tuple(shape), generator=generator)

    def _bools(self, shape: Iterable[int], likely: float = 0.7) -> Tensor:
        """Each element True with probability ``likely``."""
        return self._integers(shape, 99) < 100 * likely


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _from_table(table: Tensor, active: Tensor | None) -> MaskLayout:
    batch, heads, q_len, kv_len = table.shape

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table.to(q_idx.device)[b * (batch > 1), h * (heads > 1), q_idx, kv_idx]

    return MaskLayout.from_mod(mod, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, active_queries=active)
