"""Every form of a layout against a plain Python loop over the formula, on random small layouts."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from polyattn._layout import MaskLayout, StructuredMask

EXTREMES = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}


@dataclasses.dataclass
class Plain:
    """A layout as nested lists: ``see[b][h][i][j]``, and the positions by which a later window measures."""

    see: list
    q_positions: list
    kv_positions: list

    def map(self, function):
        see = [
            [
                [[x and function(b, h, i, j) for j, x in enumerate(row)] for i, row in enumerate(rows)]
                for h, rows in enumerate(heads)
            ]
            for b, heads in enumerate(self.see)
        ]
        return dataclasses.replace(self, see=see)

    def window(self, size):
        return self.map(lambda b, _, i, j: abs(self.q_positions[b][i] - self.kv_positions[b][j]) < size)

    def both(self, other):
        return self.map(lambda b, h, i, j: other.see[b % len(other.see)][h % len(other.see[0])][i][j])

    def queries(self, index):
        return Plain(
            [[[rows[i] for i in index] for rows in heads] for heads in self.see],
            [[row[i] for i in index] for row in self.q_positions],
            self.kv_positions,
        )

    def keys(self, index):
        return Plain(
            [[[[row[j] for j in index] for row in rows] for rows in heads] for heads in self.see],
            self.q_positions,
            [[row[j] for j in index] for row in self.kv_positions],
        )


@dataclasses.dataclass
class Case:
    layout: MaskLayout
    plain: Plain

    def shape(self):
        return self.layout.batch, self.layout.heads, self.layout.q_len, self.layout.kv_len

    def seen(self):
        return torch.tensor(self.plain.see, dtype=torch.bool).reshape(self.shape())


def row(value, b):
    return value[b % len(value)]


def formula(mask, q_len, kv_len, batch, active):
    """The documented formula, element by element, in Python's unbounded ints."""
    fields = {name: value.tolist() for name, value in mask.tensors().items()}
    q_positions = fields.get("q_positions", [list(range(kv_len - q_len, kv_len))])
    kv_positions = fields.get("kv_positions", [list(range(kv_len))])

    def visible(b, i, j):
        q, k = row(q_positions, b)[i], row(kv_positions, b)[j]
        seen = active is None or row(active, b)[i]
        if "kv_valid" in fields:
            seen = seen and row(fields["kv_valid"], b)[j]
        if "q_segments" in fields:
            seen = seen and row(fields["q_segments"], b)[i] == row(fields["kv_segments"], b)[j]
        if mask.chunk_size is not None:
            seen = seen and q // mask.chunk_size == k // mask.chunk_size
        if mask.window is not None:
            seen = seen and abs(q - k) < mask.window
        if mask.causal:
            prefix = row(fields["prefix_lengths"], b) if "prefix_lengths" in fields else None
            if isinstance(prefix, list):
                prefix = prefix[row(fields["q_segments"], b)[i]]
            seen = seen and (k <= q or (prefix is not None and k < prefix))
        return seen

    return Plain(
        [[[[visible(b, i, j) for j in range(kv_len)] for i in range(q_len)]] for b in range(batch)],
        [row(q_positions, b) for b in range(batch)],
        [row(kv_positions, b) for b in range(batch)],
    )


def bools(draw, rows, width):
    return torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows)),
        dtype=torch.bool,
    ).reshape(rows, width)


def ints(draw, rows, width, low, high, dtype=torch.int64):
    values = st.lists(st.integers(low, high), min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(values, min_size=rows, max_size=rows)), dtype=dtype).reshape(rows, width)


def positions(draw, rows, width, dtype):
    kind = draw(st.sampled_from(["run", "runs", "any", "extreme"]))
    limit = EXTREMES[dtype]
    if kind == "run":
        start = ints(draw, rows, 1, -3, 9, dtype)
        return start + torch.arange(width, dtype=dtype)
    if kind == "runs":
        cut = draw(st.integers(0, width))
        return torch.cat([torch.arange(cut), torch.arange(width - cut) + draw(st.integers(0, 9))])[None].to(dtype)
    if kind == "any":
        return ints(draw, rows, width, -4, 9, dtype)
    ends = st.sampled_from([-limit - 1, -limit, -limit + 1, -2, -1, 0, 1, limit - 1, limit])
    values = draw(st.lists(ends, min_size=rows * width, max_size=rows * width))
    return torch.tensor(values, dtype=dtype).reshape(rows, width)


def segments(draw, rows, width, count):
    ids = ints(draw, rows, width, 0, count - 1, draw(st.sampled_from([torch.int32, torch.int64])))
    return ids.sort(1).values if draw(st.booleans()) else ids


SIZES = st.integers(0, 7)


@st.composite
def structured(draw, q_len=None, kv_len=None):
    q_len = draw(SIZES) if q_len is None else q_len
    kv_len = draw(SIZES) if kv_len is None else kv_len
    batch = draw(st.sampled_from([1, 1, 2, 3, 0]))

    def rows():
        return draw(st.sampled_from([1, batch]))

    mask = {"causal": draw(st.booleans())}
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    limit = EXTREMES[dtype]
    if draw(st.booleans()):
        mask["q_positions"] = positions(draw, rows(), q_len, dtype)
        if draw(st.booleans()):
            mask["kv_positions"] = positions(draw, rows(), kv_len, dtype)
    if draw(st.booleans()):
        mask["window"] = draw(st.one_of(st.integers(1, 9), st.sampled_from([limit - 1, limit])))
    if draw(st.booleans()):
        mask["kv_valid"] = bools(draw, rows(), kv_len)
    if draw(st.booleans()):
        mask["q_segments"] = segments(draw, rows(), q_len, 3)
        same = q_len == kv_len and draw(st.booleans())
        mask["kv_segments"] = mask["q_segments"] if same else segments(draw, rows(), kv_len, 3)
    if mask["causal"] and draw(st.booleans()):
        per_segment = "q_segments" in mask and draw(st.booleans())
        prefixes = ints(draw, rows(), 3, 0, 8)
        mask["prefix_lengths"] = prefixes if per_segment else prefixes[:, 0]
    if draw(st.booleans()):
        mask["chunk_size"] = draw(st.one_of(st.integers(1, 5), st.sampled_from([limit, limit + 1])))
    active = bools(draw, rows(), q_len) if draw(st.booleans()) else None
    layout = MaskLayout(
        q_len=q_len, kv_len=kv_len, batch=batch, visibility=StructuredMask(**mask), active_queries=active
    )
    plain = formula(layout.visibility, q_len, kv_len, batch, None if active is None else active.tolist())
    return Case(layout, plain)


@st.composite
def unstructured(draw, q_len=None, kv_len=None):
    q_len = draw(SIZES) if q_len is None else q_len
    kv_len = draw(SIZES) if kv_len is None else kv_len
    batch, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    mask = bools(draw, batch * heads * q_len, kv_len).reshape(batch, heads, q_len, kv_len)
    active = bools(draw, 1, q_len) if draw(st.booleans()) else None
    if draw(st.booleans()):
        layout = MaskLayout.dense(mask, active_queries=active)
    else:
        layout = MaskLayout.from_mod(
            lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx],
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            heads=heads,
            active_queries=active,
        )
    active = [[True] * q_len] * batch if active is None else active.tolist() * batch
    see = (mask & torch.tensor(active, dtype=torch.bool).reshape(batch, 1, q_len, 1)).tolist()
    positions = [list(range(kv_len - q_len, kv_len))] * batch, [list(range(kv_len))] * batch
    return Case(layout, Plain(see, *positions))


def indices(draw, size):
    if draw(st.booleans()):
        part = slice(
            *(draw(st.one_of(st.none(), st.integers(-9, 9))) for _ in range(2)), draw(st.sampled_from([None, 1, 2, -1]))
        )
        return part, list(range(size))[part]
    index = draw(st.lists(st.integers(0, size - 1), max_size=8)) if size else []
    return (index if draw(st.booleans()) else torch.tensor(index, dtype=torch.int64)), index


@st.composite
def worked(draw):
    """A layout after up to three operations."""
    case = draw(st.one_of(structured(), unstructured()))
    for _ in range(draw(st.integers(0, 3))):
        layout, plain = case.layout, case.plain
        operation = draw(st.sampled_from(["queries", "keys", "heads", "window", "and", "to", "expand"]))
        if operation == "queries":
            index, picked = indices(draw, layout.q_len)
            case = Case(layout.select_queries(index), plain.queries(picked))
        elif operation == "keys":
            index, picked = indices(draw, layout.kv_len)
            case = Case(layout.select_keys(index), plain.keys(picked))
        elif operation == "heads":
            part = slice(draw(st.integers(0, 2)), None)
            heads = [rows[part] if layout.heads > 1 else rows for rows in plain.see]
            case = Case(layout.select_heads(part), dataclasses.replace(plain, see=heads))
        elif operation == "window":
            size = draw(st.integers(1, 9))
            case = Case(layout.with_window(size), plain.window(size))
        elif operation == "and":
            kind = draw(st.sampled_from([structured, unstructured]))
            other = draw(kind(layout.q_len, layout.kv_len).filter(functools.partial(fits, layout)))
            # A later window measures by the positions that the structure kept; it is not drawn after an intersection.
            return Case(layout & other.layout, broadcast(plain, layout, other).both(other.plain))
        elif operation == "to":
            case = Case(layout.to("cpu"), plain)
        elif layout.batch == 1:
            case = Case(
                layout.expand(2),
                dataclasses.replace(
                    plain,
                    see=plain.see * 2,
                    q_positions=plain.q_positions * 2,
                    kv_positions=plain.kv_positions * 2,
                ),
            )
    return case


def fits(a, case):
    b = case.layout
    return all(x == y or 1 in {x, y} for x, y in ((a.batch, b.batch), (a.heads, b.heads)))


def broadcast(plain, layout, other):
    batch = other.layout.batch if layout.batch == 1 else 1
    heads = other.layout.heads if layout.heads == 1 else 1
    see = [rows * heads for rows in plain.see] * batch
    return dataclasses.replace(plain, see=see)


def flex_mask(layout):
    """The mask_mod as FlexAttention evaluates it: four nested vmaps over single indices, in a mode of its own."""
    mod = layout.to_mask_mod()
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with TransformGetItemToIndex():
        return mod(*(torch.arange(n) for n in (layout.batch, layout.heads, layout.q_len, layout.kv_len)))


def painted(layout):
    """The mask that the table of blocks describes, by its documented rule."""
    batch, _, q_len, kv_len = layout.batch, 1, layout.q_len, layout.kv_len
    mask = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b, q_start, q_stop, k_start, k_stop, shift, causal in layout.to_blocks().tolist():
        for i, j in itertools.product(range(q_start, q_stop), range(k_start, k_stop)):
            d = (i - q_start) - (j - k_start) + shift
            window = layout.visibility.window
            assert not mask[b, 0, i, j]
            mask[b, 0, i, j] = (d >= 0 or not causal) and (window is None or abs(d) < window)
    return mask


@settings(max_examples=200, deadline=None)
@given(worked())
def test_every_form_equals_the_formula(case):
    layout, seen = case.layout, case.seen()
    dense = layout.to_dense()
    assert dense.dtype is torch.bool
    assert dense.shape[2:] == seen.shape[2:]
    assert torch.equal(dense.expand(seen.shape), seen)
    assert torch.equal(layout.rows_without_keys().expand(seen.shape[:3]), ~seen.any(3))
    unseen = layout.unseen_keys()
    assert torch.equal(unseen.expand(*seen.shape[:2], layout.kv_len), ~seen.any(2))
    assert layout.may_have_fully_masked_rows or seen.any(3).all()
    assert layout.may_have_unseen_keys or seen.any(2).all()
    if seen.numel():
        assert torch.equal(flex_mask(layout), seen)


@settings(max_examples=200, deadline=None)
@given(st.one_of(structured(), worked()))
def test_painted_blocks_equal_the_formula(case):
    layout, seen = case.layout, case.seen()
    table = layout.to_blocks()
    if table is None:
        return
    assert table.dtype is torch.int64
    assert table.shape[0] >= 2
    assert not table[0].any()
    active = layout.active_queries
    covered = painted(layout)
    assert torch.equal(covered if active is None else covered & active[:, None, :, None], seen)
    blocks = [tuple(block) for block in table[1:].tolist() if any(block)]
    assert blocks == sorted(blocks)
    for b, q_start, q_stop, k_start, k_stop, *_ in blocks:
        assert 0 <= q_start < q_stop <= layout.q_len
        assert 0 <= k_start < k_stop <= layout.kv_len
        assert 0 <= b < layout.batch
    if layout.active_queries is None:
        assert layout.may_have_fully_masked_rows == (not seen.any(3).all())
        assert layout.may_have_unseen_keys == (not seen.any(2).all())


@st.composite
def regular(draw):
    """Layouts of the constructors with structure, cut by slices."""
    length = draw(st.integers(1, 12))
    window = draw(st.one_of(st.none(), st.integers(1, 13)))
    causal = draw(st.booleans())
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
    q_len = draw(st.integers(1, 12))
    count, width = draw(st.integers(0, length)), draw(st.integers(1, 13))
    layout = draw(
        st.sampled_from(
            [
                MaskLayout.full(q_len, length),
                MaskLayout.causal(q_len, length, window=window),
                MaskLayout.padded(lengths=[count, length], kv_len=length, causal=causal, window=window),
                MaskLayout.padded(lengths=[count, 1], kv_len=length, side="left", causal=causal, window=window),
                MaskLayout.padded(lengths=[count], kv_len=length, q_len=q_len, causal=causal, window=window),
                MaskLayout.packed([lengths, [length]], causal=causal, window=window),
                MaskLayout.prefix_lm([count, 0], length),
                MaskLayout.prefix_lm(count, q_len, length).with_window(window),
                MaskLayout.chunked(width, q_len, length, causal=causal),
                MaskLayout.packed(lengths, causal=False) & MaskLayout.prefix_lm(count, length),
                MaskLayout.packed(lengths) & MaskLayout.padded(lengths=[count], kv_len=length),
                MaskLayout.chunked(width, length) & MaskLayout.prefix_lm(count, length),
            ]
        )
    )
    start, stop = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    return layout.select_queries(slice(start, None)).select_keys(slice(None, stop))


@settings(max_examples=100, deadline=None)
@given(regular())
def test_regular_layouts_and_their_slices_always_have_blocks(layout):
    assert layout.to_blocks() is not None
    assert torch.equal(painted(layout), layout.to_dense().expand(layout.batch, -1, -1, -1))
