"""Layouts of cached keys: queries are the newest tokens of their rows, over the slots of a cache."""

import pytest
import torch

from polyattn import AttentionRequest, LayoutError, MaskLayout
from polyattn._layout.cached import CachedMask
from polyattn.kernels import features_of


def loops(lengths, q_len, capacity, window, ring):
    """Which slot each query sees, counted one by one."""
    seen = torch.zeros(len(lengths), 1, q_len, capacity, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for position in range(max(0, length - capacity) if ring else 0, length):
            for i in range(q_len):
                distance = length - q_len + i - position
                if distance >= 0 and (window is None or distance < window):
                    seen[b, 0, i, position % capacity] = True
    return seen


def painted(layout):
    """How many bands hold each pair."""
    count = torch.zeros(layout.batch, layout.q_len, layout.kv_len, dtype=torch.int32)
    for b, q0, q1, k0, k1, low, high in layout.to_bands().tolist():
        apart = torch.arange(q1 - q0)[:, None] - torch.arange(k1 - k0)
        count[b, q0:q1, k0:k1] += (apart >= low) & (apart <= high)
    return count[:, None]


CASES = [
    (lengths, q_len, window, ring)
    for ring in (False, True)
    for window in ((None, 1, 3, 100) if not ring else (1, 3, 5))
    for q_len, lengths in ((1, (1, 9, 4)), (3, (3, 9, 8)), (4, (9, 4, 6)), (1, (9, 9, 9)))
]


@pytest.mark.parametrize(("lengths", "q_len", "window", "ring"), CASES)
def test_a_query_sees_the_keys_of_its_row_up_to_its_position_wherever_their_slots_are(lengths, q_len, window, ring):
    capacity = window - 1 + q_len if ring else 9
    want = loops(lengths, q_len, capacity, window, ring)
    layout = MaskLayout.cached(torch.tensor(lengths), q_len, capacity, window=window, ring=ring)
    assert torch.equal(layout.to_dense(), want)
    assert torch.equal(painted(layout), want.int())
    assert torch.equal(layout.token_positions(), torch.tensor(lengths)[:, None] - q_len + torch.arange(q_len))
    assert not layout.may_have_fully_masked_rows


@pytest.mark.parametrize("ring", [False, True])
def test_a_narrower_window_counts_positions_and_not_slots(ring):
    lengths = torch.tensor([13, 6] if ring else [6, 4])
    layout = MaskLayout.cached(lengths, 2, 6, window=5, ring=ring)
    narrow = layout.with_window(2)
    want = loops(lengths.tolist(), 2, 6, 2, ring) & layout.to_dense()
    assert torch.equal(narrow.to_dense(), want)
    assert torch.equal(painted(narrow), want.int())
    assert torch.equal(layout.with_window(9).to_dense(), layout.to_dense())


def test_lengths_on_a_device_are_never_read():
    lengths = torch.tensor([4, 7], device="meta")  # whose values nobody can read
    layout = MaskLayout.cached(lengths, 2, 8, window=3)
    assert layout.to_bands() is None
    assert layout.max_runs is None
    assert layout.may_have_unseen_keys
    assert layout.may_have_fully_masked_rows
    assert layout.to_dense().shape == (2, 1, 2, 8)


def test_inside_a_graph_the_mask_is_arithmetic_on_lengths():
    def dense(lengths):
        layout = MaskLayout.cached(lengths, 2, 6, window=4, ring=False, finite=True)
        return layout.to_dense(), layout.token_positions(), layout.with_window(2).to_dense()

    graph = torch.compile(dense, fullgraph=True, backend="eager")
    for lengths in (torch.tensor([2, 6]), torch.tensor([5, 3])):
        for got, want in zip(graph(lengths), dense(lengths), strict=True):
            assert torch.equal(got, want)


def test_a_promise_that_hidden_slots_are_finite_spares_their_copies():
    lengths = torch.tensor([3, 5])
    assert MaskLayout.cached(lengths, 1, 8).may_have_unseen_keys
    assert not MaskLayout.cached(lengths, 1, 8, finite=True).may_have_unseen_keys
    assert not MaskLayout.cached(lengths, 1, 8, finite=True).with_window(2).may_have_unseen_keys


def test_backends_are_asked_for_the_ability_kv_lengths():
    layout = MaskLayout.cached(torch.tensor([3]), 1, 8, window=4)
    request = AttentionRequest(
        heads=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype=torch.float32, device=torch.device("cpu"), batch=1
    )
    assert {"kv_lengths", "window"} <= features_of(layout, request).keys()
    assert "cache" in layout.describe()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MaskLayout.cached([3], 1, 8), "lengths must be a tensor Int[B], got list"),
        (lambda: MaskLayout.cached(torch.tensor([3.0]), 1, 8), "lengths must be Int[B] of dtype int32 or int64"),
        (lambda: MaskLayout.cached(torch.tensor([3]), 4, 8), "lengths must lie in q_len=4 .. capacity=8, the new"),
        (lambda: MaskLayout.cached(torch.tensor([9]), 1, 8), "the new tokens included, got 9 .. 9"),
        (lambda: MaskLayout.cached(torch.tensor([9]), 1, 8, ring=True), "window must be given with ring=True"),
        (
            lambda: MaskLayout.cached(torch.tensor([9]), 3, 6, window=5, ring=True),
            "capacity must be at least window - 1 + q_len = 7 in a ring, got 6",
        ),
        (lambda: MaskLayout.cached(torch.tensor([3]), 1, 0), "capacity must be an int >= 1, got 0"),
        (lambda: MaskLayout.cached(torch.tensor([3]), 1, 8, finite=1), "finite must be True or False, got 1"),
        (
            lambda: MaskLayout(1, 8, batch=3, visibility=CachedMask(torch.tensor([3, 4]))),
            "batch must be one number",
        ),
    ],
)
def test_wrong_arguments_are_named(make, text):
    with pytest.raises(LayoutError) as error:
        make()
    assert text in str(error.value)
