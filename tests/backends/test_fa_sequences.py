"""From a mask to kernel calls: what the calls let be seen is what the mask says."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fa_stand_in import stand_in
from polyattn import AttentionRequest, MaskLayout, StructuredMask, backends
from polyattn_fa2._sequences import calls_of


def prepared(layout, *, batch=1, provider="flash_attn", **changes):
    request = AttentionRequest(
        batch=batch, heads=2, kv_heads=2, head_dim=8, v_head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    with stand_in(provider):
        return backends.resolve("fa", {"provider": provider}).prepare(layout, dataclasses.replace(request, **changes))


def plan_of(layout, **changes):
    return prepared(layout, **changes).state


def seen_by_kernel(plan, batch, q_len, kv_len):
    """Which key each query sees ``[B, Q, K]`` when the kernels do what they are documented to do with the calls."""
    s = plan.sequences
    seen = torch.zeros(batch * q_len, batch * kv_len, dtype=torch.bool)
    if s.cu_seqlens_q is None:
        (call,) = calls_of(s.calls)
        s = dataclasses.replace(
            s,
            cu_seqlens_q=torch.arange(batch + 1) * q_len,
            cu_seqlens_k=torch.arange(batch + 1) * kv_len,
        )
        assert (call.sequences, call.max_seqlen_q, call.max_seqlen_k) == (batch, q_len, kv_len)
    at = at_q = at_k = 0
    taken = set()
    for call in calls_of(s.calls):
        q_ends, k_ends = (x[at : at + call.sequences + 1].tolist() for x in (s.cu_seqlens_q, s.cu_seqlens_k))
        assert q_ends[-1] == call.slots
        assert k_ends[-1] == call.keys
        rows = torch.arange(batch * q_len) if call.all_queries else s.q_rows[at_q : at_q + call.queries]
        slots = torch.arange(call.queries) if call.slots == call.queries else s.q_slots[at_q : at_q + call.queries]
        keys = torch.arange(batch * kv_len) if call.all_keys else s.k_rows[at_k : at_k + call.keys]
        row_of_slot = torch.full((call.slots,), -1)
        row_of_slot[slots] = rows
        left, right = (x if x < call.max_seqlen_k else -1 for x in (call.left, call.right))
        if max(left, right) >= 0:
            left, right = (call.max_seqlen_k if x < 0 else x for x in (left, right))
        for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
            assert q1 - q0 <= call.max_seqlen_q
            assert k1 - k0 <= call.max_seqlen_k
            for slot in range(q0, q1):
                if row_of_slot[slot] < 0:
                    continue
                assert (call.part, int(row_of_slot[slot])) not in taken, "a query is in two sequences of a part"
                taken.add((call.part, int(row_of_slot[slot])))
                place = slot - q0 + (k1 - k0) - (q1 - q0)
                for key in range(k0, k1):
                    behind = place - (key - k0)
                    if (left < 0 or behind <= left) and (right < 0 or -behind <= right):
                        assert not seen[row_of_slot[slot], keys[key]], "a key is seen twice"
                        seen[row_of_slot[slot], keys[key]] = True
        at, at_q, at_k = at + call.sequences + 1, at_q + call.queries, at_k + call.keys
    grid = seen.view(batch, q_len, batch, kv_len)
    inside = torch.stack([grid[b, :, b] for b in range(batch)])
    assert inside.sum() == seen.sum(), "a query sees keys of another batch row"
    return inside if plan.rows is None else inside & ~plan.rows[:, 0]


def assert_same(layout, batch):
    try:
        plan = plan_of(layout, batch=batch)
    except ValueError:  # refused: not every random mask is one of sequences
        return False
    want = layout.to_dense()[:, 0].expand(batch, -1, -1)
    got = seen_by_kernel(plan, batch, layout.q_len, layout.kv_len)
    assert torch.equal(got, want), f"{layout.describe()}\n{want.int()}\n{got.int()}\n{plan.sequences}"
    return True


def runs(draw, rows, length):
    """Positions of a few runs, in no order."""

    def row():
        out = []
        while len(out) < length:
            start = draw.randrange(0, 14)
            out += range(start, start + draw.randrange(1, length + 1))
        return out[:length]

    return torch.tensor([row() for _ in range(rows)])


def random_layout(draw):
    rows, q_len, kv_len = draw.choice((1, 2)), draw.randrange(1, 11), draw.randrange(1, 11)
    some = lambda make, odds=0.3: make() if draw.random() < odds else None  # noqa: E731
    sort = lambda length: torch.tensor([sorted(draw.choices(range(3), k=length)) for _ in range(rows)])  # noqa: E731
    ends = [(draw.randrange(kv_len + 1), draw.randrange(kv_len + 1)) for _ in range(rows)]
    valid = torch.tensor([[start <= j < stop for j in range(kv_len)] for start, stop in ends])
    causal = draw.random() < 0.6
    fields = {"kv_valid": some(lambda: valid)}
    if draw.random() < 0.3:
        fields |= {"q_positions": runs(draw, rows, q_len), "kv_positions": runs(draw, rows, kv_len)}
    if draw.random() < 0.3:
        fields |= {"q_segments": sort(q_len), "kv_segments": sort(kv_len)}
    if causal:
        fields["prefix_lengths"] = some(lambda: torch.tensor(draw.choices(range(kv_len + 1), k=rows)), 0.2)
    mask = StructuredMask(
        causal=causal,
        window=some(lambda: draw.randrange(1, 9), 0.5),
        chunk_size=some(lambda: draw.randrange(1, 7), 0.2),
        **fields,
    )
    active = some(lambda: torch.rand(rows, q_len) < 0.7)
    return MaskLayout(q_len, kv_len, rows, 1, visibility=mask, active_queries=active)


@pytest.mark.parametrize("seed", range(4))
def test_calls_see_exactly_what_a_random_structure_shows(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lowered = 0
    for _ in range(150):
        layout = random_layout(draw)
        lowered += assert_same(layout, layout.batch if layout.batch > 1 else draw.choice((1, 3)))
    assert lowered > 60


@pytest.mark.parametrize("gap", [5, 10**6, 2**31, 2**40])
@pytest.mark.parametrize("side", [1, -1], ids=["queries before their keys", "queries behind their keys"])
def test_a_gap_between_queries_and_keys_costs_no_fillers_and_fits_int32(gap, side):
    ran = 0
    for q_len, kv_len, near in ((4, 6, 0), (7, 3, 1), (5, 5, 2), (1, 4, 0)):
        # Rows of unequal gaps share the calls.
        starts = torch.tensor([[side * gap], [side * (gap - near)], [near]])
        kv_positions = starts + torch.arange(kv_len)
        for window in range(max(1, gap - kv_len - 1), gap + q_len + kv_len):
            mask = StructuredMask(
                window=window, q_positions=torch.arange(q_len).expand(3, -1).clone(), kv_positions=kv_positions
            )
            layout = MaskLayout(q_len, kv_len, batch=3, visibility=mask)
            if not assert_same(layout, 3):
                continue
            ran += 1
            for call in calls_of(plan_of(layout, batch=3).sequences.calls):
                assert call.slots <= call.queries + call.sequences * (q_len + kv_len)
                assert max(call.left, call.right, call.max_seqlen_q, call.max_seqlen_k) <= 2 * (q_len + kv_len)
    assert ran > 20
