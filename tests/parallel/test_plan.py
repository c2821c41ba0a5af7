"""Plans are counted on the intervals of a mask; here against its rows."""

from __future__ import annotations

import pytest
import torch

from polyattn import AttentionRequest, MaskLayout
from polyattn_context_parallel import ContextParallelError, plan
from polyattn_context_parallel.balance import BALANCES
from polyattn_context_parallel.intervals import Demand

LAYOUTS = {
    "full": MaskLayout.full(46),
    "causal": MaskLayout.causal(46),
    "window": MaskLayout.causal(46, window=7, sink_tokens=3),
    "both sides": MaskLayout.full(46).with_window((3, 5)),
    "packed": MaskLayout.packed([20, 3, 9, 14]),
    "rows": MaskLayout.packed([[20, 3, 9, 14], [30, 16]]),
    "padded": MaskLayout.padded(lengths=[46, 17], kv_len=46, side="left"),
    "tree": MaskLayout.shared_prefix(10, [12, 24]),
    "union": MaskLayout.causal(46, window=4) | MaskLayout.packed([20, 26]),
}
DOCUMENTS = [97, 310, 55, 420, 260, 130, 75, 512, 190, 340, 45, 610, 230, 150, 88, 584]  # 4096 tokens


def request(heads=4, kv_heads=2, **changes):
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": 16, "v_head_dim": 16}
    return AttentionRequest(**{**sizes, "dtype": torch.float32, "device": torch.device("cpu"), **changes})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 60])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_one_owner_and_the_counts_are_those_of_the_rows(name, balance, ranks):
    layout = LAYOUTS[name]
    partition = BALANCES[balance](layout, ranks)
    rows = [partition.rows(rank) for rank in range(ranks)]
    assert torch.cat(rows).sort().values.tolist() == list(range(46))
    assert partition.counts().tolist() == list(map(len, rows))
    demand, seen = Demand.of(layout, partition), layout.to_dense()[:, 0]
    for rank, mine in enumerate(rows):
        own = seen[:, mine]
        assert own.sum() == demand.pairs[rank]
        assert own.any(0).any(0).nonzero()[:, 0].tolist() == demand.needed(rank).tolist()
        assert demand.keys[rank].tolist() == [own[:, :, other].any(0).any(0).sum().item() for other in rows]


@pytest.mark.parametrize(
    "layout, balance, share, imbalance",
    [
        (MaskLayout.causal(4096), "zigzag", 0.76, 1.01),
        (MaskLayout.causal(4096, window=256), "contiguous", 0.09, 1.05),
        (MaskLayout.packed(DOCUMENTS), "documents", 0.035, 1.15),
    ],
    ids=["causal", "window", "packed"],
)
def test_a_rank_sends_only_keys_that_others_see_and_the_work_is_even(layout, balance, share, imbalance):
    found = plan(layout, 4, request=request(), balance=balance)
    costs = {cost.method: cost for cost in found.costs}
    assert costs["all-gather"].sent == 2 * 3 * 1024 * 2 * 32 * 4
    assert costs["gather"].sent <= share * costs["all-gather"].sent
    assert found.imbalance <= imbalance


def test_documents_that_fit_stay_whole_so_that_nothing_is_sent():
    found = plan(MaskLayout.packed([8] * 8), 4, request=request())
    assert found.balance == "documents" or not (found.keys - found.keys.diagonal().diag()).any()
    assert {cost.method: cost.sent for cost in found.costs}["gather"] == 0


def test_a_plan_says_what_it_found():
    text = str(plan(MaskLayout.causal(64), 4, request=request(), balance="zigzag"))
    assert text.startswith("64 tokens on 4 ranks, balance zigzag, method gather\nvisible pairs: 2080, ")
    assert "ulysses" in text


def test_a_mask_without_structure_goes_by_heads_where_there_are_enough():
    dense = MaskLayout.dense(torch.eye(8, dtype=torch.bool)[None, None])
    assert plan(dense, 4, request=request()).method == "ulysses"
    assert plan(dense, 8, request=request()).method == "gather"


@pytest.mark.parametrize(
    "asked, says",
    [
        ({"balance": "best"}, "balance must be auto, contiguous, zigzag, documents, got 'best'"),
        ({"method": "usp"}, "method must be auto, gather, ulysses or ring, got 'usp'"),
        ({"ranks": 0}, "ranks must be an int >= 1, got 0"),
        ({"layout": MaskLayout.causal(2, 4)}, "layout must have q_len == kv_len"),
        ({"ranks": 5, "method": "ulysses"}, "method ulysses needs a query head for each of 5 ranks, got heads=4"),
    ],
)
def test_what_is_no_plan_is_refused(asked, says):
    asked = {"layout": LAYOUTS["causal"], "ranks": 2, "request": request(), **asked}
    with pytest.raises(ContextParallelError, match=says):
        plan(asked.pop("layout"), asked.pop("ranks"), **asked)


def test_layouts_have_one_fingerprint_if_and_only_if_they_are_alike():
    made = {name: layout.fingerprint() for name, layout in LAYOUTS.items()}
    assert len(set(made.values())) == len(made)
    assert MaskLayout.packed([20, 3, 9, 14]).fingerprint() == made["packed"]
    assert MaskLayout.packed([20, 3, 10, 13]).fingerprint() != made["packed"]
    assert MaskLayout.from_mod(lambda b, h, q, k: q >= k, q_len=4, kv_len=4).fingerprint() is None
