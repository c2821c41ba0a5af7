"""Random attention calls for hypothesis: every kind of layout, size, dtype and feature, and all their mixtures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from polyattn._layout import MaskLayout, StructuredMask
from polyattn.testing.case import INFER, INFER_LSE, TRAIN, TRAIN_LSE, Case, Mode, make_case

#: name -> settings. ``ci`` is the same on every run; ``long`` looks for what nobody has seen yet.
PROFILES = {
    "ci": settings(max_examples=300, derandomize=True, deadline=None, database=None),
    "long": settings(
        max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    ),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Ways to describe a mask: any mixture of fields; packed documents; parts of a longer sequence; element by element.
KINDS = ("structured", "documents", "part", "dense", "mask_mod")


def tensors(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[Tensor]:
    """Int64 tensors with elements in ``low .. high``, inclusive."""
    seeds = st.integers(0, 2**16)
    return seeds.map(lambda seed: torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)))


def bools(shape: tuple[int, ...], likely: float = 0.7) -> st.SearchStrategy[Tensor]:
    """Boolean tensors, each element True with probability ``likely``."""
    return tensors(shape, 0, 99).map(lambda x: x < 100 * likely)


@st.composite
def structured_masks(draw: st.DrawFn, rows: int, q_len: int, kv_len: int) -> StructuredMask:
    """Any mixture of the fields of :class:`StructuredMask`."""

    def maybe(strategy: st.SearchStrategy[Tensor]) -> Tensor | None:
        return draw(st.none() | strategy)

    fields: dict[str, Tensor | None] = {"kv_valid": maybe(bools((rows, kv_len)))}
    causal = draw(st.booleans())
    if draw(st.booleans()):
        fields["q_positions"] = draw(tensors((rows, q_len), 0, 12))
        fields["kv_positions"] = draw(tensors((rows, kv_len), 0, 12))
    if draw(st.booleans()):
        fields["q_segments"] = draw(tensors((rows, q_len), 0, 2)).sort(-1).values
        fields["kv_segments"] = draw(tensors((rows, kv_len), 0, 2)).sort(-1).values
    if causal:
        fields["prefix_lengths"] = maybe(tensors((rows,), 0, kv_len))
    return StructuredMask(
        causal=causal,
        window=draw(st.none() | st.integers(1, 14)),
        chunk_size=draw(st.none() | st.integers(1, 6)),
        **fields,
    )


@st.composite
def documents(draw: st.DrawFn, rows: int, length: int) -> MaskLayout:
    """Packed documents, the form that lowerings are made for."""

    def lengths() -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)) & set(range(1, length)))
        return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]

    return MaskLayout.packed(
        [lengths() for _ in range(rows)], causal=draw(st.booleans()), window=draw(st.none() | st.integers(1, 6))
    )


@st.composite
def parts(draw: st.DrawFn, rows: int, q_len: int, kv_len: int) -> MaskLayout:
    """Some queries and some keys of longer packed documents, as a rank of a sequence-parallel group has them."""
    length = max(q_len, kv_len) + draw(st.integers(0, 6))
    whole = draw(documents(rows, length))
    first_query, first_key = draw(st.integers(0, length - q_len)), draw(st.integers(0, length - kv_len))
    queries = whole.select_queries(slice(first_query, first_query + q_len))
    return queries.select_keys(slice(first_key, first_key + kv_len))


def _from_table(table: Tensor) -> Callable[..., Tensor]:
    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b * (table.shape[0] > 1), h * (table.shape[1] > 1), q_idx, kv_idx]

    return mod


@st.composite
def layouts(
    draw: st.DrawFn, batch: int, heads: int, q_len: int, kv_len: int, kinds: Sequence[str] = KINDS
) -> MaskLayout:
    """Layouts of the given kinds; their batch and heads are 1 or those given."""
    rows = draw(st.sampled_from((1, batch)))
    kind = draw(st.sampled_from(kinds))
    if kind == "documents" and q_len > 0:
        return draw(documents(rows, q_len))
    if kind == "part" and q_len > 0 and kv_len > 0:
        return draw(parts(rows, q_len, kv_len))
    active = draw(st.none() | bools((rows, q_len)))
    if kind in {"dense", "mask_mod"} and q_len > 0 and kv_len > 0:
        mask = draw(bools((rows, draw(st.sampled_from((1, heads))), q_len, kv_len)))
        if kind == "dense":
            return MaskLayout.dense(mask, active_queries=active)
        return MaskLayout.from_mod(
            _from_table(mask), q_len=q_len, kv_len=kv_len, batch=rows, heads=mask.shape[1], active_queries=active
        )
    return MaskLayout(
        q_len=q_len,
        kv_len=kv_len,
        batch=rows,
        heads=1,
        visibility=draw(structured_masks(rows, q_len, kv_len)),
        active_queries=active,
    )


@st.composite
def biases(draw: st.DrawFn, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A bias of any shape that broadcasts to ``shape``, with some elements ``-inf``."""
    form = tuple(draw(st.sampled_from((1, size))) if size > 0 else size for size in shape)
    values = draw(tensors(form, -20, 20)).to(dtype) / 8
    return values.masked_fill(~draw(bools(form, 0.9)), -torch.inf)


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    bias: bool = True,
    softcap: bool = True,
) -> tuple[Case, Mode]:
    """A whole attention call and what is asked of it.

    Args:
        draw: hypothesis gives it.
        kinds: of layouts, some of :data:`KINDS`.
        dtypes: of the tensors.
        bias: whether to try one.
        softcap: whether to try one.
    """
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len = draw(st.integers(0, 12))
    kv_len = draw(st.just(q_len) | st.integers(0, 12))
    layout = draw(layouts(batch, kv_heads * group, q_len, kv_len, kinds))
    dtype = draw(st.sampled_from(dtypes))
    case = make_case(
        layout,
        dtype=dtype,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        v_head_dim=draw(st.none() | st.integers(1, 9)),
        seed=draw(st.integers(0, 2**16)),
        scale=draw(st.none() | st.sampled_from((0.3, 1.0, -0.7))),
        softcap=draw(st.none() | st.sampled_from((0.5, 4.0))) if softcap else None,
        sinks=draw(st.booleans()),
    )
    if bias and draw(st.booleans()):
        shape = (*case.q.shape[:3], layout.kv_len)
        case = case.change(bias=draw(biases(shape, dtype)))
        if draw(st.booleans()):
            case = case.change(leaves=("q", "k", "v", "sinks"))
    return case, draw(st.sampled_from((INFER, INFER_LSE, TRAIN, TRAIN_LSE)))
