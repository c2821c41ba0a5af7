"""A layer's window over a layout that does not say where its queries and keys stand measures by the positions given."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyattn import (
    AttentionScope,
    AttentionSpec,
    GroupedQueryAttention,
    LayoutError,
    MaskLayout,
    RopeSpec,
    StructuredMask,
)
from polyattn.rope import RopeAxes

WINDOW = 5
ROPE = RopeSpec.from_dict({
    "schema_version": 1, "variant": "default", "theta": 1e4, "head_dim": 8, "rotary_dim": 8, "interleaved": False,
    "max_position": 64, "original_max_position": None, "parameters": {}, "axes": None,
})  # fmt: skip
TURNS = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 1]])


def layer(window, *, backend="sdpa", rope=ROPE):
    torch.manual_seed(0)
    return GroupedQueryAttention(16, 2, 1, 8, rope=rope, window=window, backend=backend, dtype=torch.float64)


def near(q, k):
    """Who sees whom by distance, Bool ``[B|1, 1, Q, K]``."""
    return ((q[:, :, None] - k[:, None, :]).abs() < WINDOW)[:, None]


def everything(layout):
    return layout.to_dense().expand(-1, -1, layout.q_len, layout.kv_len)


def _all(_b, _h, q_idx, _kv_idx):
    return q_idx >= 0


def layouts(q_len, kv_len):
    mask = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(1)) < 0.8
    return {
        "full": MaskLayout.full(q_len, kv_len),
        "dense": MaskLayout.dense(mask),
        "mask_mod": MaskLayout.from_mod(_all, q_len=q_len, kv_len=kv_len),
        "padding": MaskLayout.padded(torch.arange(kv_len)[None] != 1, q_len=q_len, causal=False),
    }


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", layouts(1, 1))
@pytest.mark.parametrize("context", [torch.tensor([[0, 1, 2, 3, 4, 5]]), torch.tensor([[0, 9, 2], [7, 1, 30]])],
                         ids=["consecutive", "scattered_rows"])  # fmt: skip
def test_context_keys_are_as_far_as_their_positions_say(backend, name, context):
    own = torch.tensor([[6, 7, 8]])
    keys = torch.cat((context, own.expand(len(context), -1)), 1)
    layout = layouts(3, keys.shape[1])[name]
    hidden, other = torch.randn(2, 3, 16).double(), torch.randn(2, context.shape[1], 16).double()
    found = layer(WINDOW, backend=backend)(hidden, AttentionScope(layout), own, other, kv_positions=context)
    by_hand = MaskLayout.dense(everything(layout) & near(own, keys))
    want = layer(None, backend="eager")(hidden, AttentionScope(by_hand), own, other, kv_positions=context)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", layouts(1, 1))
@pytest.mark.parametrize("at", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 3, 6, 9, 12, 13, 14, 15]], [[3, 2, 1, 0, 9, 8, 7, 6]]])
def test_tokens_are_as_far_as_their_positions_say(name, at):
    positions = torch.tensor(at)
    layout = layouts(8, 8)[name]
    hidden = torch.randn(2, 8, 16).double()
    found = layer(WINDOW)(hidden, AttentionScope(layout), positions)
    by_hand = MaskLayout.dense(everything(layout) & near(positions, positions))
    want = layer(None, backend="eager")(hidden, AttentionScope(by_hand), positions)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def test_a_dflash_draft_sees_the_context_within_its_window():
    config = {
        "model_type": "qwen3", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "attention_bias": False, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "max_position_embeddings": 64,
        "rope_theta": 1e4, "rope_scaling": None, "use_sliding_window": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"],
    }  # fmt: skip
    spec = AttentionSpec.from_hf(config, layer=0, convention="dflash")
    assert spec.window == WINDOW
    draft = GroupedQueryAttention.from_spec(spec, backend="sdpa", dtype=torch.float64)
    hidden, context = torch.randn(1, 1, 16).double(), torch.randn(1, 6, 16).double().requires_grad_()
    # One query at position 6 after six keys that the cache holds in reverse.
    at = torch.tensor([[5, 4, 3, 2, 1, 0]])
    output = draft(hidden, AttentionScope(MaskLayout.full(1, 7)), torch.tensor([[6]]), context, kv_positions=at)
    output.sum().backward()
    assert (context.grad[0].abs().sum(1) > 0).tolist() == [True, True, True, True, False, False]


def test_a_structure_stays_one_where_positions_step_by_one():
    scope = AttentionScope(MaskLayout.full(8))
    layer(WINDOW)(torch.randn(1, 8, 16).double(), scope, torch.arange(8)[None] + 3)
    (prepared,) = scope.kept("attention")
    assert prepared.layout.visibility.q_positions is None
    assert prepared.layout.to_blocks() is not None


def test_documents_that_restart_keep_their_structure():
    scope = AttentionScope(MaskLayout.packed([5, 3], causal=False))
    layer(3)(torch.randn(1, 8, 16).double(), scope, torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]))
    (prepared,) = scope.kept("attention")
    assert prepared.layout.visibility.q_positions is None


def test_a_layout_that_says_where_its_queries_stand_is_believed():
    positions = torch.tensor([[0, 10, 20, 30]])
    scope = AttentionScope(MaskLayout.causal(4))
    layer(2)(torch.randn(1, 4, 16).double(), scope, positions)
    (prepared,) = scope.kept("attention")
    assert (prepared.layout.to_dense() == MaskLayout.causal(4, window=2).to_dense()).all()


def test_layers_of_one_window_and_other_heads_share_the_narrowed_layout():
    scope, positions = AttentionScope(MaskLayout.full(8)), torch.arange(0, 16, 2)[None]
    hidden = torch.randn(1, 8, 16).double()
    layer(WINDOW)(hidden, scope, positions)
    GroupedQueryAttention(16, 4, 2, 8, rope=ROPE, window=WINDOW, backend="sdpa", dtype=torch.float64)(
        hidden, scope, positions
    )
    first, second = scope.kept("attention")
    assert first.layout is second.layout


def test_inside_a_graph_structures_count_by_index_and_other_positions_are_refused():
    attend = layer(WINDOW)
    hidden, layout = torch.randn(1, 8, 16).double(), MaskLayout.full(8)

    def forward(positions):
        return attend(hidden, AttentionScope(layout), positions)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    consecutive = torch.arange(8)[None]
    torch.testing.assert_close(compiled(consecutive), forward(consecutive), rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="positions must step by 1"):
        compiled(2 * consecutive)


def test_inside_a_graph_context_keys_are_as_far_as_their_positions_say():
    attend, layout = layer(WINDOW), MaskLayout.full(3, 6)
    hidden, other = torch.randn(1, 3, 16).double(), torch.randn(1, 3, 16).double()

    def forward(own, context):
        return attend(hidden, AttentionScope(layout), own, other, kv_positions=context)

    arguments = torch.tensor([[6, 7, 8]]), torch.tensor([[0, 9, 2]])
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), forward(*arguments), rtol=0, atol=1e-12)


def test_positions_of_a_dense_mask_are_what_its_window_measures_by():
    q, k = torch.tensor([[6, 7]]), torch.tensor([[0, 9, 2, 5]])
    seen = torch.ones(2, 4, dtype=torch.bool)
    for layout in (
        MaskLayout.dense(seen, q_positions=q, kv_positions=k),
        MaskLayout.from_drop_mask(~seen, q_positions=q, kv_positions=k),
        MaskLayout.from_mod(_all, q_len=2, kv_len=4, q_positions=q, kv_positions=k),
        MaskLayout.dense(seen).with_window(WINDOW, q_positions=q, kv_positions=k),
    ):
        assert (layout.with_window(WINDOW).to_dense() == near(q, k)).all()
        index = [3, 0, 1]
        part = layout.select_keys(index).select_queries(slice(1, 2))
        assert (part.with_window(WINDOW).to_dense() == near(q[:, 1:], k[:, index])).all()


def test_positions_that_do_not_fit_a_dense_mask_are_refused():
    seen, q, k = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[6, 7]]), torch.tensor([[0, 9, 2, 5]])
    for places, said in (
        ({"kv_positions": k}, "kv_positions must come with q_positions, got kv_positions alone"),
        ({"q_positions": q, "kv_positions": k.int()}, "must share one dtype, got torch.int64 and torch.int32"),
        ({"q_positions": k}, r"q_positions must fit q_len=2 and kv_len=4: shape \[1, 2\], got \[1, 4\]"),
        ({"q_positions": q.float()}, r"q_positions must be Int\[B\|1, Q\] of dtype int32 or int64, got torch.float32"),
    ):
        with pytest.raises(LayoutError, match=said):
            MaskLayout.dense(seen, **places)
    with pytest.raises(LayoutError, match="q_positions must be fields of the StructuredMask, got them beside it"):
        MaskLayout(2, 4, q_positions=q)


def test_context_on_several_axes_is_refused_where_the_layout_does_not_say_what_counts():
    axes = dataclasses.replace(ROPE, axes=RopeAxes(sections=(2, 2), layout="contiguous"))
    own, context = torch.arange(6, 9).expand(2, 1, 3), torch.arange(3).expand(2, 1, 3)
    hidden, other = torch.randn(1, 3, 16).double(), torch.randn(1, 3, 16).double()
    attend = layer(WINDOW, rope=axes)
    with pytest.raises(LayoutError, match=r"must be Int\[B\|1, S\] for a window .* shapes \[2, 1, 3\] and \[2, 1, 3\]"):
        attend(hidden, AttentionScope(MaskLayout.full(3, 6)), own, other, kv_positions=context)
    seen = torch.ones(3, 6, dtype=torch.bool)
    placed = MaskLayout.dense(seen, q_positions=own[0], kv_positions=torch.cat((context[0], own[0]), 1))
    attend(hidden, AttentionScope(placed), own, other, kv_positions=context)
    layer(WINDOW, rope=axes)(hidden, AttentionScope(MaskLayout.full(3)), own)


@pytest.mark.parametrize(
    ("layout", "at"),
    [
        (StructuredMask(q_segments=TURNS, kv_segments=TURNS), [0, 1, 0, 1, 2, 2, 3, 3]),
        (StructuredMask(kv_valid=torch.tensor([[1, 0, 0, 1, 1, 1, 1, 1]]).bool()), [0, 7, 7, 1, 2, 3, 4, 5]),
        (StructuredMask(kv_valid=torch.tensor([[1, 0, 0, 1, 1, 1, 1, 1]]).bool()), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_tokens_that_see_each_other_across_others_are_as_far_as_their_positions_say(layout, at):
    layout, positions = MaskLayout(8, 8, visibility=layout), torch.tensor([at])
    hidden = torch.randn(2, 8, 16).double()
    found = layer(2)(hidden, AttentionScope(layout), positions)
    near = ((positions[:, :, None] - positions[:, None, :]).abs() < 2)[:, None]
    by_hand = MaskLayout.dense(everything(layout) & near)
    want = layer(None, backend="eager")(hidden, AttentionScope(by_hand), positions)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
