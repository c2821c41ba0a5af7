"""Every mask that transformers can ask for becomes a layout that says exactly the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers import masking_utils as hf

import polyattn_transformers
from polyattn import LayoutError, MaskLayout, StructuredMask
from polyattn_transformers import packed
from polyattn_transformers._attention import attention_forward
from polyattn_transformers._layout_mask import LayoutMask
from polyattn_transformers._mask_function import layout_mask
from tiny_models import DECODER, TOKENS, ids

ROWS, NEW, WINDOW, CHUNK = 2, 6, 4, 3


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def config_of(implementation, **changes):
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    config.sliding_window, config.attention_chunk_size = WINDOW, CHUNK
    config._attn_implementation = implementation
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def vertical(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx % 3 == 0


BLOCKS = torch.tensor([[-1, 0, 0, -1, 1, 1], [0, 0, 0, -1, -1, -1]])
FACTORIES = {
    "causal": (hf.create_causal_mask, {}),
    "window": (hf.create_sliding_window_causal_mask, {}),
    "chunked": (hf.create_chunked_causal_mask, {}),
    "bidirectional": (hf.create_bidirectional_mask, {}),
    "bidirectional window": (hf.create_bidirectional_sliding_window_mask, {}),
    "blocks": (hf.create_causal_mask, {"block_sequence_ids": BLOCKS}),
    "window, blocks": (hf.create_sliding_window_causal_mask, {"block_sequence_ids": BLOCKS}),
    "causal or custom": (hf.create_causal_mask, {"or_mask_function": vertical}),
    "window and custom": (hf.create_sliding_window_causal_mask, {"and_mask_function": vertical}),
    "bidirectional and custom": (hf.create_bidirectional_mask, {"and_mask_function": vertical}),
}
UNSTRUCTURED = {"window, blocks", "causal or custom", "window and custom", "bidirectional and custom"}
PADDING = {
    "no mask": lambda total: None,
    "all ones": lambda total: torch.ones(ROWS, total, dtype=torch.long),
    "left": lambda total: torch.stack([torch.arange(total) >= 2, torch.arange(total) >= 0]).long(),
    "right": lambda total: torch.stack([torch.arange(total) < total - 2, torch.arange(total) >= 0]).long(),
    "holes": lambda total: torch.stack([torch.arange(total) % 3 != 1, torch.arange(total) >= 1]).long(),
}


def embeddings():
    return torch.zeros(ROWS, NEW, 8)


def cache_of(kind, past, sliding):
    """A cache that holds ``past`` tokens, as a model would have filled it."""
    config = config_of("eager")
    config.layer_types = ["sliding_attention" if sliding else "full_attention"]
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=20)
    if past:
        cache.update(*torch.zeros(2, ROWS, 2, past, 4), 0)
    return cache


def both(factory, arguments, *, changes=None, **given):
    """The mask that polyattn makes, and transformers' own dense one."""
    masks = [
        factory(config_of(name, **(changes or {})), embeddings(), **given, **arguments)
        for name in ("polyattn_eager", "eager")
    ]
    q_len = NEW
    oracle = masks[1]
    kv_len = masks[0].layout.kv_len
    dense = torch.ones(ROWS, 1, q_len, kv_len, dtype=torch.bool) if oracle is None else oracle == 0
    return masks[0], dense


def assert_same(mask, oracle):
    assert isinstance(mask, LayoutMask)
    assert mask.shape == oracle.shape
    assert torch.equal(mask.layout.to_dense().expand_as(oracle), oracle)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FACTORIES)
def test_without_a_cache_the_layout_equals_the_mask_of_transformers(name, padding):
    factory, arguments = FACTORIES[name]
    mask, oracle = both(factory, arguments, attention_mask=PADDING[padding](NEW), past_key_values=None)
    assert_same(mask, oracle)
    assert isinstance(mask.layout.visibility, StructuredMask) is (name not in UNSTRUCTURED)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("past", [0, 3, 9])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["causal", "window", "chunked", "causal or custom"])
def test_offsets_of_caches_are_honoured(name, kind, past, padding):
    factory, arguments = FACTORIES[name]
    given = {"attention_mask": PADDING[padding](past + NEW)}
    caches = [cache_of(kind, past, sliding=name in ("window", "chunked")) for _ in range(2)]
    masks = [
        factory(config_of(implementation), embeddings(), past_key_values=cache, **given, **arguments)
        for implementation, cache in zip(("polyattn_eager", "eager"), caches, strict=True)
    ]
    assert_same(masks[0], masks[1] == 0)
    if name != "causal or custom":
        assert isinstance(masks[0].layout.visibility, StructuredMask)


@pytest.mark.parametrize("name", ["causal", "window", "chunked", "blocks", "causal or custom"])
def test_restarting_positions_become_documents(name):
    factory, arguments = FACTORIES[name]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]])
    mask, oracle = both(factory, arguments, attention_mask=None, past_key_values=None, position_ids=positions)
    assert_same(mask, oracle)
    assert isinstance(mask.layout.visibility, StructuredMask) is (name not in UNSTRUCTURED)


def test_blocks_across_documents_are_kept_as_a_function():
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])  # the first block of row 0 spans two documents
    mask, oracle = both(
        hf.create_causal_mask,
        {"block_sequence_ids": BLOCKS},
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    assert_same(mask, oracle)
    assert not isinstance(mask.layout.visibility, StructuredMask)


def test_a_block_in_two_pieces_is_kept_as_a_function():
    pieces = torch.tensor([[0, 0, -1, 0, -1, -1], [-1, 1, 1, -1, -1, 1]])
    mask, oracle = both(
        hf.create_causal_mask, {"block_sequence_ids": pieces}, attention_mask=None, past_key_values=None
    )
    assert_same(mask, oracle)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_config_that_is_not_causal_sees_both_ways(name):
    factory, _ = FACTORIES[name]
    changes = {"is_causal": False}
    mask, oracle = both(factory, {}, changes=changes, attention_mask=PADDING["left"](NEW), past_key_values=None)
    assert_same(mask, oracle)
    assert not mask.layout.visibility.causal


def test_cross_attention_sees_the_encoder_and_its_padding():
    keys = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    given = {"attention_mask": keys, "encoder_hidden_states": torch.zeros(ROWS, 8, 8)}
    mask, oracle = both(hf.create_bidirectional_mask, {}, **given)
    assert mask.shape == (ROWS, 1, NEW, 8)
    assert_same(mask, oracle)


def test_a_causal_window_is_its_size_and_a_bidirectional_one_counts_both_ends():
    causal = layout_mask(1, 8, 8, mask_function=hf.sliding_window_causal_mask_function(3))
    both_ways = layout_mask(1, 8, 8, mask_function=hf.sliding_window_bidirectional_mask_function(2))
    assert causal.layout.visibility.window == 3
    assert causal.layout.to_dense().sum(-1).flatten().tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert both_ways.layout.visibility.window == 3
    assert both_ways.layout.to_dense().sum(-1).flatten().tolist() == [3, 4, 5, 5, 5, 5, 4, 3]


@pytest.mark.parametrize(
    "function",
    [
        hf.sliding_window_overlay(3),  # one-sided: without the causal rule it is not a rule about distance
        hf.or_masks(hf.causal_mask_function, hf.sliding_window_overlay(3)),
        hf.and_masks(hf.causal_mask_function, vertical),
        hf.and_masks(
            hf.chunked_overlay(3, torch.zeros(2, dtype=int)), hf.chunked_overlay(2, torch.zeros(2, dtype=int))
        ),
        hf.add_offsets_to_mask_function(hf.causal_mask_function, 1, 0),
        hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(torch.arange(12).expand(2, 12) != 5)),
        hf.and_masks(hf.sliding_window_overlay(4), hf.and_masks(hf.sliding_window_overlay(2), hf.causal_mask_function)),
    ],
)
@pytest.mark.parametrize("offsets", [(0, 0), (2, 0), (3, 1)])
def test_any_function_is_honoured(function, offsets):
    q_offset, kv_offset = offsets
    arguments = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": function}
    oracle = hf.sdpa_mask(ROWS, 5, 8, **arguments, allow_is_causal_skip=False)
    assert_same(layout_mask(ROWS, 5, 8, **arguments), oracle)


def test_plain_causal_attention_keeps_no_mask():
    for padding in ("no mask", "all ones"):
        mask, _ = both(hf.create_causal_mask, {}, attention_mask=PADDING[padding](NEW), past_key_values=None)
        assert mask.layout.device is None


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_offsets_are_never_read(shape):
    with FakeTensorMode():  # a read of its values would raise
        offset = torch.zeros(shape, dtype=torch.int64)
        for function in (hf.causal_mask_function, hf.sliding_window_causal_mask_function(3), vertical):
            padding = torch.ones(ROWS, 12, dtype=torch.bool)
            mask = layout_mask(ROWS, 3, 12, q_offset=offset, mask_function=function, attention_mask=padding)
            assert mask.layout.to_dense().shape[2:] == (3, 12)


@pytest.mark.parametrize("offset", [3, torch.tensor(3), torch.tensor([3])])
def test_offsets_may_be_numbers_or_tensors(offset):
    for function in (hf.causal_mask_function, vertical):
        oracle = hf.sdpa_mask(ROWS, 2, 8, q_offset=3, mask_function=function, allow_is_causal_skip=False)
        assert_same(layout_mask(ROWS, 2, 8, q_offset=offset, mask_function=function), oracle)


def test_a_mask_may_be_handed_back():
    mask = layout_mask(ROWS, NEW, NEW)
    assert mask.contiguous() is mask
    assert layout_mask(ROWS, NEW, NEW, attention_mask=mask) is mask
    cache = cache_of("static", 3, sliding=False)
    ahead = hf.create_causal_mask(config_of("polyattn_eager"), embeddings(), None, cache)
    again = hf.create_causal_mask(config_of("polyattn_eager"), embeddings(), ahead.contiguous(), cache)
    assert again is ahead


def test_a_mask_handed_back_to_a_forward_of_another_size_is_refused():
    mask = layout_mask(ROWS, NEW, NEW)
    with pytest.raises(LayoutError, match=r"got 6 queries and 6 keys in the mask, 1 and 7 in the forward"):
        layout_mask(ROWS, 1, 7, attention_mask=mask)


@pytest.mark.parametrize("shape", [(NEW,), (ROWS, 1, NEW)])
def test_a_mask_of_a_wrong_rank_is_refused(shape):
    with pytest.raises(
        LayoutError, match=r"attention_mask must be \[B, K\] with 1 where a token is, or \[B, 1, Q, K\]"
    ):
        layout_mask(ROWS, NEW, NEW, attention_mask=torch.ones(shape))


def test_a_mask_of_another_batch_is_refused():
    with pytest.raises(LayoutError, match="attention_mask must have 2 rows or 1, got 3"):
        layout_mask(ROWS, NEW, NEW, attention_mask=torch.ones(3, NEW))


def test_an_unknown_argument_of_a_mask_is_refused():
    with pytest.raises(LayoutError, match="unknown arguments of a mask: prefix_size"):
        layout_mask(ROWS, NEW, NEW, prefix_size=3)


def test_documents_shorter_than_the_call_are_refused():
    function = hf.packed_sequence_mask_function(torch.zeros(ROWS, 4, dtype=torch.int64))
    with pytest.raises(LayoutError, match="packed sequence mask must cover tokens 0 to 5, got 4 tokens"):
        layout_mask(ROWS, NEW, NEW, mask_function=function)


@pytest.mark.parametrize("make", [lambda: layout_mask(ROWS, NEW, NEW), lambda: packed([3, 3])["attention_mask"]])
def test_a_model_that_treats_the_mask_as_a_tensor_is_told(make):
    mask = make()
    with pytest.raises(AttributeError, match="not a tensor and has no attribute 'tril'"):
        mask.tril(-1)
    with pytest.raises(TypeError, match="not a tensor and cannot be indexed"):
        mask[:, :, :, :2]
    with pytest.raises(TypeError, match="not a tensor and cannot be given to torch's where"):
        torch.where(mask, 0.0, 1.0)


@pytest.mark.parametrize("operate", [lambda m: m + 1, lambda m: 1 - m, lambda m: ~m, lambda m: m > 0, list])
def test_a_model_that_computes_with_the_mask_is_told(operate):
    with pytest.raises(TypeError, match="is not a tensor and cannot be computed with: this model changes masks on"):
        operate(layout_mask(ROWS, NEW, NEW))


def test_chunks_of_packed_documents_count_from_the_start_of_each():
    config, inputs = config_of("polyattn_sdpa"), torch.zeros(1, NEW, 8)
    mask = hf.create_chunked_causal_mask(
        config=config, inputs_embeds=inputs, attention_mask=packed([2, 4])["attention_mask"], past_key_values=None
    )
    alone = [MaskLayout.chunked(CHUNK, length).to_dense()[0, 0] for length in (2, 4)]
    assert torch.equal(mask.layout.to_dense()[0, 0], torch.block_diag(*alone).bool())
    assert isinstance(mask.layout.visibility, StructuredMask)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (hf.sliding_window_causal_mask_function(0), r"sliding_window must be at least 1, or None .*, got 0"),
        (hf.sliding_window_causal_mask_function(-1), r"got -1 in the .* set config.sliding_window = None"),
        (hf.sliding_window_bidirectional_mask_function(-1), r"sliding_window must be at least 0, or None .*, got -1"),
        (
            hf.chunked_causal_mask_function(0, torch.zeros(2, dtype=torch.int64)),
            r"attention_chunk_size must be at least 1, or None .*, got 0",
        ),
    ],
)
def test_a_layer_whose_window_or_chunk_leaves_no_key_is_refused(function, text):
    # The mask itself is made: models make one for a kind of layer that they may not have (Qwen2-MoE).
    for packing in (None, packed([2, 4])["attention_mask"]):
        mask = layout_mask(ROWS, NEW, NEW, mask_function=function, attention_mask=packing)
        q = torch.zeros(ROWS, 1, NEW, 8)
        with pytest.raises(LayoutError, match=text):
            attention_forward(nn.Module(), q, q, q, mask, polyattn_backend="eager")


@pytest.mark.parametrize("window", [0, -1])
@pytest.mark.parametrize(
    "rest",
    [{}, {"use_cache": False}, packed([TOKENS]), {"attention_mask": torch.ones(1, TOKENS)}],
    ids=["cache", "no_cache", "packed", "padding"],
)
def test_a_model_whose_window_leaves_no_key_is_refused_for_that_reason(window, rest):
    # transformers' caches are cut by the window too, so that the lengths no longer fit: a consequence, not the reason.
    config = transformers.MistralConfig(**DECODER, sliding_window=window)
    model = transformers.MistralModel._from_config(config, attn_implementation="polyattn_eager")
    with pytest.raises(LayoutError, match=f"sliding_window must be at least 1, .*, got {window} "):
        model(ids(rows=1), **rest)


@pytest.mark.parametrize(("found", "past"), [(NEW - 1, 0), (NEW + 2, 0), (NEW, 3)])
def test_a_mask_of_a_wrong_length_is_refused_by_name(found, past):
    cache = cache_of("dynamic", past, sliding=False) if past else None
    text = rf"attention_mask must be \[B, K\] with one entry for each of {past} cached and 6 new tokens, got {found} "
    with pytest.raises(LayoutError, match=text):
        hf.create_causal_mask(config_of("polyattn_eager"), embeddings(), torch.ones(ROWS, found), cache)


def test_a_mask_moves_to_a_device_once_for_all_layers():
    padding = PADDING["left"](NEW)
    mask = layout_mask(ROWS, NEW, NEW, attention_mask=padding)
    assert mask.to("cpu") is mask
    assert mask.to(torch.float16) is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved is mask.to(torch.device("meta"))
    assert moved.device == torch.device("meta")
    plain = layout_mask(ROWS, NEW, NEW)
    assert plain.to("meta") is plain


def test_padding_of_every_pattern_gives_the_same_layout_as_transformers():
    # All 64 paddings of one row, among them rows without any token.
    for bits in itertools.product([0, 1], repeat=NEW):
        padding = torch.tensor([bits, [1] * NEW])
        mask, oracle = both(hf.create_sliding_window_causal_mask, {}, attention_mask=padding, past_key_values=None)
        assert_same(mask, oracle)
