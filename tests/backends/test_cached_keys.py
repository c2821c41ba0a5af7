"""Attention over cached keys on every backend: the dense reference's numbers, without copies where that is promised."""

import pytest
import torch

import fa_stand_in
from polyattn import AttentionInputError, AttentionRequest, MaskLayout, UnsupportedAttentionError, attention, backends
from polyattn.select import prepare
from polyattn_fa2 import FlashOptions, paged_attention


def reference(q, k, v, layout):
    """In FP64, by the dense mask, hidden keys set to 0."""
    mask = layout.to_dense().expand(len(q), -1, -1, -1)
    group = q.shape[1] // k.shape[1]
    k, v = (torch.where(mask.any(2)[..., None], x.double(), 0.0).repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def drawn(layout, heads, kv_heads, dtype, widths=(8, 8), hidden=0.0):
    """Queries, keys and values; what nobody sees is ``hidden``."""
    torch.manual_seed(0)
    rows, seen = layout.batch, layout.to_dense().any(2)[..., None]
    q = torch.randn(rows, heads, layout.q_len, widths[0], dtype=dtype)
    k, v = (torch.randn(rows, kv_heads, layout.kv_len, width, dtype=dtype) for width in widths)
    return q, torch.where(seen, k, hidden), torch.where(seen, v, hidden)


LAYOUTS = {
    "one token, equal rows": ([7, 7], 1, 40, {}),
    "one token": ([5, 33], 1, 40, {}),
    "one token in a window": ([5, 33], 1, 40, {"window": 8}),
    "several tokens": ([5, 33], 4, 40, {"window": 8}),
    "a prompt": ([30, 36], 30, 40, {}),
    "a ring": ([5, 33], 1, 8, {"window": 8, "ring": True}),
    "a ring, several tokens": ([5, 33], 3, 12, {"window": 8, "ring": True}),
}


def layout_of(name, **rest):
    lengths, q_len, capacity, more = LAYOUTS[name]
    return MaskLayout.cached(torch.tensor(lengths), q_len, capacity, **more, **rest)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_layout_gives_the_numbers_of_the_dense_reference(backend, group, name):
    for finite, hidden in ((True, 1e4), (False, torch.nan)):
        for widths in ((8, 8), (8, 6)):
            layout = layout_of(name, finite=finite)
            q, k, v = drawn(layout, 4, 4 // group, torch.float64, widths, hidden)
            output, lse = reference(q, k, v, layout)
            got = attention(q, k, v, layout, backend=backend, return_lse=True)
            torch.testing.assert_close(got.output, output)
            torch.testing.assert_close(got.lse, lse)
            torch.testing.assert_close(attention(q, k, v, layout, backend=backend).output, output)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_graph_gives_the_same_numbers_without_reading_lengths(name):
    layout = layout_of(name, finite=True)
    _, q_len, capacity, more = LAYOUTS[name]
    q, k, v = drawn(layout, 4, 2, torch.float64)
    both = [backends.get("eager"), backends.get("sdpa")]

    def step(lengths, q, k, v):
        inside = MaskLayout.cached(lengths, q_len, capacity, **more, finite=True)
        return [attention(q, k, v, inside, backend=backend).output for backend in both]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for output in compiled(layout.visibility.lengths, q, k, v):
        torch.testing.assert_close(output, reference(q, k, v, layout)[0])


def test_sinks_and_queries_before_the_first_position():
    layout = MaskLayout.cached(torch.tensor([3, 6]), 2, 8, finite=True)
    q, k, v = drawn(layout, 4, 2, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    one, two = (attention(q, k, v, layout, backend=name, sinks=sinks).output for name in ("sdpa", "eager"))
    torch.testing.assert_close(one, two)

    sdpa = backends.get("sdpa")

    def step(lengths):  # in a graph nobody says that there are as many tokens as queries
        return attention(q, k, v, MaskLayout.cached(lengths, 2, 8, finite=True), backend=sdpa, return_lse=True)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(torch.tensor([1, 0]))
    assert not got.output[0, :, 0].any()
    assert not got.output[1].any()
    assert torch.equal(got.lse.isneginf(), torch.tensor([[True, False], [True, True]])[:, None].expand(2, 4, 2))
    torch.testing.assert_close(got.output[0, :, 1], v[0, :, 0].repeat_interleave(2, 0))


def test_sdpa_says_what_it_runs_and_takes_tiles_for_prompts():
    said = {}
    for name in ("one token in a window", "a prompt"):
        layout = layout_of(name, finite=True)
        request = AttentionRequest.of(*drawn(layout, 16, 4, torch.float32))
        said[name] = backends.get("sdpa").describe(prepare(backends.get("sdpa"), layout, request))
    assert said["one token in a window"] == "one fused call over 33 slots of a cache, heads folded into rows"
    assert said["a prompt"].startswith("fused calls over 2 blocks")


@pytest.mark.parametrize(
    "name", ["one token, equal rows", "one token", "one token in a window", "several tokens", "a ring"]
)
@pytest.mark.parametrize("group", [1, 4])
def test_fa_uses_the_key_lengths_of_the_kernel_on_the_cache_as_it_is(name, group):
    layout = layout_of(name, finite=True)
    q, k, v = drawn(layout, 4, 4 // group, torch.bfloat16, hidden=100.0)
    with fa_stand_in.stand_in() as calls:
        got = attention(q, k, v, layout, backend="fa", return_lse=True)
        unsure = attention(
            *drawn(layout, 4, 4 // group, torch.bfloat16, hidden=torch.nan), layout_of(name), backend="fa"
        )
    assert torch.equal(unsure.output, got.output)
    (call,) = calls.forward[:1]
    assert call["cache_seqlens"].tolist() == [min(n, layout.kv_len) for n in LAYOUTS[name][0]]
    assert call["k_cache"].data_ptr() == k.data_ptr()
    assert call["v_cache"].data_ptr() == v.data_ptr()
    output, lse = reference(q, k, v, layout)
    torch.testing.assert_close(got.output.double(), output, atol=0.02, rtol=0.02)
    torch.testing.assert_close(got.lse.double(), lse, atol=0.02, rtol=0.02)


def test_fa_refuses_what_its_kernel_cannot_say():
    ring = MaskLayout.cached(torch.tensor([5, 33], device="meta"), 3, 12, window=8, ring=True)
    request = AttentionRequest.of(*(torch.zeros(2, 2, n, 8, dtype=torch.bfloat16) for n in (3, 12, 12)))
    with fa_stand_in.stand_in():
        reasons = backends.get("fa").unsupported(ring, request)
        assert [reason.code for reason in reasons] == ["not_sequences"]
    varlen = backends.get("fa").configure({"provider": "torch_varlen"})
    refused = pytest.raises(UnsupportedAttentionError, match="ability 'kv_lengths', which 'fa' does not have")
    with fa_stand_in.stand_in("torch_varlen"), refused:
        prepare(varlen, layout_of("one token"), request)


def paged(lengths, q_len=1, page=256, width=8, dtype=torch.bfloat16):
    """Queries, pages in a random order, and keys and values as they lie in the rows, ``[B, H, K, D]``."""
    generator = torch.Generator().manual_seed(0)
    count = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * count + 2, generator=generator)[: len(lengths) * count].view(-1, count).int()
    k, v = (torch.randn(len(lengths) * count + 2, page, 2, width, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(len(lengths), 4, q_len, width, generator=generator).to(dtype)
    rows = [x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v)]
    return (q, k, v, table, torch.tensor(lengths)), rows


@pytest.mark.parametrize(("q_len", "window"), [(1, None), (3, None), (3, 300)])
def test_fa_finds_pages_by_the_kernels_block_table_and_copies_none(q_len, window):
    given, (k, v) = paged([700, 3, 256], q_len)
    sinks = torch.randn(4)
    with fa_stand_in.stand_in() as calls:
        got = paged_attention(*given, window=window, sinks=sinks, return_lse=True)
    (call,) = calls.forward
    assert call["k_cache"].data_ptr() == given[1].data_ptr()
    assert call["v_cache"].data_ptr() == given[2].data_ptr()
    layout = MaskLayout.cached(given[4], q_len, k.shape[2], window=window, finite=True)
    want = attention(given[0].float(), k.float(), v.float(), layout, backend="eager", sinks=sinks, return_lse=True)
    torch.testing.assert_close(got.output.float(), want.output, atol=0.02, rtol=0.02)
    torch.testing.assert_close(got.lse, want.lse, atol=0.02, rtol=0.02)


def test_fa_refuses_pages_that_its_kernel_cannot_read():
    def codes(provider="flash_attn", **sizes):
        with fa_stand_in.stand_in(provider), pytest.raises(UnsupportedAttentionError) as error:
            paged_attention(*paged([40], **sizes)[0], options=FlashOptions(provider=provider))
        return [reason.code for reason in error.value.reasons]

    assert codes(page=16) == ["page_size"]
    assert codes(width=12) == ["page_width"]
    assert codes(dtype=torch.float32) == ["no_float32"]
    assert codes("torch_varlen") == ["no_kv_lengths"]
    q, *rest = paged([40])[0]
    with fa_stand_in.stand_in(), pytest.raises(UnsupportedAttentionError, match="the kernel has no backward"):
        paged_attention(q.requires_grad_(), *rest)
    with pytest.raises(UnsupportedAttentionError, match="cuda device"):
        paged_attention(q.detach(), *rest)


def test_paged_keys_that_do_not_fit_are_named():
    q, k, v, table, lengths = paged([40, 3])[0]
    with pytest.raises(
        AttentionInputError, match=r"block_table must be int32 .* got torch.int64 .*casts; lengths must"
    ):
        paged_attention(q, k, v, table.long(), lengths[:1])
    with pytest.raises(AttentionInputError, match="k_pages must be a tensor of 4 dimensions, got shape"):
        paged_attention(q, k[0], v, table, lengths)
    with pytest.raises(AttentionInputError, match=r"v_pages like it, got k_pages .* beside q"):
        paged_attention(q, k, v[:1], table, lengths)


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
def test_flex_gives_the_same_numbers_uncompiled():
    flex = backends.get("flex_attention").configure({"compiled": False})
    for name in LAYOUTS:
        layout = layout_of(name, finite=True)
        q, k, v = drawn(layout, 4, 2, torch.float64)
        torch.testing.assert_close(attention(q, k, v, layout, backend=flex).output, reference(q, k, v, layout)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_flex_gives_the_same_numbers_compiled(name):
    layout = layout_of(name, finite=True)
    q, k, v = drawn(layout, 4, 2, torch.float32, (16, 16))
    got = attention(q, k, v, layout, backend="flex_attention").output
    torch.testing.assert_close(got.double(), reference(q, k, v, layout)[0], atol=1e-5, rtol=1e-4)
