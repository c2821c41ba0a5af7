"""The mask of block-diffusion drafts: the tree is what a plain loop says, and backends isolate the blocks."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn import AttentionScope, GroupedQueryAttention, MaskLayout, RopeSpec

# It is not a part of the workspace, so it is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "block_diffusion"))

import block_diffusion as example
from block_diffusion import block_diffusion, draft_positions

pytestmark = pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
BACKENDS = {"eager": None, "sdpa": None, "flex_attention": {"compiled": False}}
#: anchors, block size, context length, lengths of the context, padding blocks
CASES = {
    "one block": ([[3]], 4, 6, None, None),
    "several anchors": ([[0, 2, 5, 6]], 3, 6, None, None),
    "blocks of one": ([[1, 4, 2]], 1, 5, None, None),
    "a batch": ([[1, 3], [5, 2], [0, 5]], 2, 5, None, None),
    "padded context": ([[2, 5], [4, 3]], 2, 5, [5, 3], None),
    "padding blocks": ([[2, 0], [4, 1]], 3, 5, None, [[True, False], [True, True]]),
    "both": ([[2, 0], [4, 1]], 3, 5, [2, 4], [[True, False], [False, True]]),
    "no context": ([[0, 0]], 2, 0, None, None),
    "an anchor beyond the context": ([[9]], 2, 4, None, None),
}


@pytest.fixture(params=CASES)
def case(request):
    anchors, size, context, lengths, blocks = CASES[request.param]
    valid = None if lengths is None else torch.arange(context) < torch.tensor(lengths)[:, None]
    return torch.tensor(anchors), size, context, valid, None if blocks is None else torch.tensor(blocks)


def layout_of(case):
    anchors, size, context, valid, blocks = case
    return block_diffusion(anchors, size, context, context_valid=valid, block_valid=blocks)


def by_loop(case):
    anchors, size, context, valid, blocks = case
    batch, count = anchors.shape
    seen = torch.zeros(batch, 1, count * size, context + count * size, dtype=torch.bool)
    for b in range(batch):
        for n in range(count):
            if blocks is not None and not blocks[b, n]:
                continue
            for i in range(size):
                for k in range(context):
                    if k < anchors[b, n] and (valid is None or valid[b, k]):
                        seen[b, 0, n * size + i, k] = True
                for j in range(size):
                    seen[b, 0, n * size + i, context + n * size + j] = True
    return seen


def test_it_is_what_a_plain_loop_says(case):
    assert torch.equal(layout_of(case).to_dense(), by_loop(case))


def test_it_has_blocks_that_hold_every_visible_pair_and_no_other(case):
    layout = layout_of(case)
    bands, seen = layout.to_bands(), torch.zeros_like(by_loop(case))
    for row, q_start, q_stop, k_start, k_stop, low, high in bands.tolist():
        distance = torch.arange(q_stop - q_start)[:, None] - torch.arange(k_stop - k_start)
        seen[row, 0, q_start:q_stop, k_start:k_stop] |= (low <= distance) & (distance <= high)
    if layout.active_queries is not None:  # a table may cover inactive queries
        seen &= layout.active_queries[:, None, :, None]
    assert torch.equal(seen, by_loop(case))


def tensors_of(layout, batch):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, layout.q_len, 8), (batch, 2, layout.kv_len, 8), (batch, 2, layout.kv_len, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_gives_the_rows_of_the_dense_rule(case, name):
    backend, tensors = polyattn.backends.resolve(name, BACKENDS[name]), tensors_of(layout_of(case), len(case[0]))
    want = polyattn.attention(*tensors, MaskLayout.dense(by_loop(case)), backend="eager").output
    got = polyattn.attention(*tensors, layout_of(case), backend=backend).output
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_block_never_feels_another_block_or_the_context_behind_its_anchor(name):
    layout = block_diffusion(torch.tensor([[2, 5, 8]]), 3, 8)
    backend = polyattn.backends.resolve(name, BACKENDS[name])
    q, k, v = (x.requires_grad_() for x in tensors_of(layout, 1))
    output = polyattn.attention(q, k, v, layout, backend=backend).output
    output[:, :, 3:6].sum().backward()  # the second block
    seen = torch.tensor([True] * 5 + [False] * 3 + [False] * 3 + [True] * 3 + [False] * 3)
    assert not v.grad[:, :, ~seen].any()
    assert not k.grad[:, :, ~seen].any()
    assert v.grad[:, :, seen].abs().amin() > 0
    assert not q.grad[:, :, :3].any()
    assert not q.grad[:, :, 6:].any()


def test_sdpa_walks_its_blocks_and_fa_has_nothing_against_it():
    layout = block_diffusion(torch.arange(32, 512, 32)[None], 32, 512)
    q, k, v = tensors_of(layout, 1)
    sdpa = polyattn.backends.get("sdpa")
    prepared = sdpa.prepare(layout, polyattn.AttentionRequest.of(q, k, v))
    assert sdpa.describe(prepared) == "fused calls over 30 blocks, up to 2 runs of keys for a query"
    reasons = polyattn.explain(layout, polyattn.AttentionRequest.of(q, k, v)).candidates["fa"]
    assert {reason.feature for reason in reasons} <= {"device", "kernel", "float32"}


def test_a_window_of_a_layer_counts_positions_of_the_text():
    layout = block_diffusion(torch.tensor([[2, 5]]), 2, 6)
    at = torch.cat((torch.arange(6)[None], draft_positions(torch.tensor([[2, 5]]), 2)), 1)
    near = (draft_positions(torch.tensor([[2, 5]]), 2)[:, :, None] - at[:, None]).abs() < 3
    assert torch.equal(layout.with_window(3).to_dense(), layout.to_dense() & near[:, None])


ROPE = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=None,
    parameters={},
)


@pytest.mark.parametrize("name", BACKENDS)
def test_in_a_layer_a_block_is_drafted_as_if_it_were_alone(name):
    torch.manual_seed(0)
    layer = GroupedQueryAttention(32, 4, 2, rope=ROPE, backend=name, backend_options=BACKENDS[name])
    context, hidden, anchors = torch.randn(1, 8, 32), torch.randn(1, 9, 32), torch.tensor([[2, 5, 8]])
    scope = AttentionScope(block_diffusion(anchors, 3, 8))
    all_positions = torch.arange(8)[None]
    got = layer(hidden, scope, draft_positions(anchors, 3), context, kv_positions=all_positions)
    for block, anchor in enumerate(anchors[0].tolist()):
        own = slice(3 * block, 3 * block + 3)
        alone = AttentionScope(MaskLayout.full(3, anchor + 3))
        positions, before = torch.arange(anchor, anchor + 3)[None], torch.arange(anchor)[None]
        want = layer(hidden[:, own], alone, positions, context[:, :anchor], kv_positions=before)
        torch.testing.assert_close(got[:, own], want, rtol=1e-5, atol=1e-6)


def test_garbage_in_padding_reaches_nothing():
    anchors, valid = torch.tensor([[4, 2]]), torch.tensor([[True] * 3 + [False] * 2])
    layout = block_diffusion(anchors, 2, 5, context_valid=valid, block_valid=torch.tensor([[True, False]]))
    q, k, v = tensors_of(layout, 1)
    want = polyattn.attention(q, k, v, layout, backend="sdpa").output
    for x in (k, v):
        x[:, :, 3:5] = torch.nan
        x[:, :, 7:] = torch.nan
    q[:, :, 2:] = torch.nan
    got = polyattn.attention(q, k, v, layout, backend="sdpa").output
    assert torch.equal(got, want)
    assert not got[:, :, 2:].any()


def test_a_layout_of_it_travels_to_a_worker():
    layout = block_diffusion(torch.tensor([[2, 5]]), 3, 8)
    assert torch.equal(pickle.loads(pickle.dumps(layout)).to_dense(), layout.to_dense())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.tensor([2, 5]), 3, 8), r"anchors must be Int\[B, N\], got torch.int64 \(2,\)"),
        ((torch.tensor([[2.0]]), 3, 8), r"anchors must be Int\[B, N\], got torch.float32 \(1, 1\)"),
        ((torch.tensor([[2]]), 0, 8), "block_size must be >= 1 and context_len >= 0, got block_size=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        block_diffusion(*arguments)


@pytest.mark.parametrize(
    ("name", "valid", "text"),
    [
        ("context_valid", torch.ones(2, 8), r"context_valid must be Bool\[2, 8\], got torch.float32 \(2, 8\)"),
        ("context_valid", torch.ones(1, 8).bool(), r"context_valid must be Bool\[2, 8\], got torch.bool \(1, 8\)"),
        ("context_valid", torch.ones(2, 9).bool(), r"context_valid must be Bool\[2, 8\], got torch.bool \(2, 9\)"),
        ("block_valid", torch.ones(2, 3).bool(), r"block_valid must be Bool\[2, 1\], got torch.bool \(2, 3\)"),
    ],
)
def test_validity_of_another_shape_or_dtype_is_refused(name, valid, text):
    with pytest.raises(ValueError, match=text):
        block_diffusion(torch.tensor([[2], [5]]), 3, 8, **{name: valid})


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr(polyattn.backends, "names", lambda: ("eager", "fa", "sdpa"))  # flex would compile
    example.main()
    printed = capsys.readouterr().out
    assert "##------###------" in printed
    assert "sdpa differs from eager by at most" in printed
    assert "fa cannot:" in printed
