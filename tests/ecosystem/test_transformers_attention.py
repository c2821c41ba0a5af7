"""What a layer asks for is honoured or refused, and prepared once for all layers of a kind."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import polyattn_transformers
from polyattn import AttentionInputError, LayoutError, MaskLayout, UnsupportedAttentionError, backends
from polyattn_conformance.reference import reference_attention
from polyattn_transformers import LayoutMask, packed
from polyattn_transformers._attention import attention_forward
from polyattn_transformers._mask_function import layout_mask
from tiny_models import ids, left_padding, model_of

ROWS, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, V_WIDTH = 2, 4, 2, 5, 7, 8, 6
BACKENDS = ("eager", "sdpa")


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


@pytest.fixture
def counted(monkeypatch):
    """Every (layout, request) that the eager backend prepares."""
    polyattn_transformers.register()  # forgets what earlier tests prepared
    found = []
    kind = type(backends.get("eager"))
    prepare = kind.prepare
    monkeypatch.setattr(
        kind, "prepare", lambda self, layout, request: found.append((layout, request)) or prepare(self, layout, request)
    )
    return found


class Layer(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def tensors(queries=QUERIES, keys=KEYS, v_width=WIDTH, kv_heads=KV_HEADS, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, HEADS, queries, WIDTH, generator=generator) * scale
    k = torch.randn(ROWS, kv_heads, keys, WIDTH, generator=generator) * scale
    return q, k, torch.randn(ROWS, kv_heads, keys, v_width, generator=generator)


def attend(*arguments, layer=None, backend="eager", mask=None, **kwargs):
    output, weights = attention_forward(
        layer or Layer(is_causal=True).eval(), *arguments, mask, polyattn_backend=backend, **kwargs
    )
    assert weights is None
    return output.transpose(1, 2)


def reference(q, k, v, layout, **kwargs):
    return reference_attention(q, k, v, layout.to_dense(), **kwargs)[0].to(q.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("passed", "meant"),
    [
        ({"scaling": 0.3}, {"scale": 0.3}),
        ({"s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0])}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}),
        (
            {"position_bias": torch.arange(140.0).reshape(1, HEADS, QUERIES, KEYS) / 50},
            {"bias": torch.arange(140.0).reshape(1, HEADS, QUERIES, KEYS) / 50},
        ),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({}, {}),
    ],
)
def test_scale_sinks_bias_and_softcap_reach_the_backend(passed, meant, backend):
    q, k, v = tensors(v_width=V_WIDTH, scale=3.0)
    want = reference(q, k, v, MaskLayout.causal(QUERIES, KEYS), **meant)
    if "softcap" in meant and backend == "sdpa":
        with pytest.raises(UnsupportedAttentionError, match="softcap"):
            attend(q, k, v, backend=backend, **passed)
        return
    assert torch.allclose(attend(q, k, v, backend=backend, **passed), want, atol=1e-5)


@pytest.mark.parametrize(
    "ignored", [{"softcap": 0.5}, {"s_aux": torch.tensor([3.0, 3.0, 3.0, 3.0])}, {"sliding_window": 2}]
)
def test_sdpa_of_transformers_ignores_what_ours_honours_or_refuses(ignored):
    q, k, v = tensors(scale=3.0)
    layer = Layer(is_causal=True, num_key_value_groups=2).eval()
    arguments = (layer, q[:, :, :KEYS], k[:, :, :QUERIES], v[:, :, :QUERIES], None)
    theirs = [sdpa_attention_forward(*arguments, **extra)[0] for extra in ({}, ignored)]
    assert torch.equal(*theirs)
    ours = [attention_forward(*arguments, polyattn_backend="eager", **extra)[0] for extra in ({}, ignored)]
    assert not torch.allclose(*ours, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_before_the_queries_are_a_prefix_that_all_queries_see(backend):
    # As with learned prefixes: transformers' sdpa throws away the last keys instead, the queries' own among them.
    q, k, v = tensors()
    layer = Layer(is_causal=True, num_key_value_groups=2).eval()
    want = reference(q, k, v, MaskLayout.causal(QUERIES, KEYS))
    assert torch.allclose(attend(q, k, v, layer=layer, backend=backend), want, atol=1e-5)
    theirs = sdpa_attention_forward(layer, q, k, v, None)[0].transpose(1, 2)
    assert not torch.allclose(theirs, want, atol=1e-1)


def test_a_boolean_prefix_mask_is_not_a_number():
    # transformers' eager attention adds True and False to the scores.
    prefix = MaskLayout.prefix_lm(4, 11).to_dense()
    with torch.no_grad():
        ours = model_of("llama", "polyattn_sdpa")(ids(), attention_mask=prefix).logits
        additive = torch.zeros(prefix.shape).masked_fill(~prefix, -torch.inf)
        want, theirs = (model_of("llama")(ids(), attention_mask=mask).logits for mask in (additive, prefix))
    assert torch.allclose(ours, want, atol=2e-5)
    assert not torch.allclose(theirs, want, atol=1e-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_mask_the_window_of_the_layer_holds(backend):
    q, k, v = tensors()
    want = reference(q, k, v, MaskLayout.causal(QUERIES, KEYS, window=3))
    assert torch.allclose(attend(q, k, v, backend=backend, sliding_window=3), want, atol=1e-5)


def test_a_mask_with_a_window_decides_about_the_window():
    # Bidirectional models pass one number to both, and mean different things by it.
    q, k, v = tensors(keys=QUERIES)
    bidirectional = layout_mask(ROWS, QUERIES, QUERIES, mask_function=window_mask(2))
    want = reference(q, k, v, bidirectional.layout)
    assert torch.allclose(attend(q, k, v, mask=bidirectional, sliding_window=2), want, atol=1e-5)


def window_mask(size):
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    return sliding_window_bidirectional_mask_function(size)


def test_a_mask_without_a_window_takes_that_of_the_layer():
    q, k, v = tensors(keys=QUERIES)
    causal = layout_mask(ROWS, QUERIES, QUERIES)
    want = reference(q, k, v, MaskLayout.causal(QUERIES, window=2))
    assert torch.allclose(attend(q, k, v, mask=causal, sliding_window=2), want, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_acts_only_while_training(backend):
    q, k, v = tensors()
    layer = Layer(is_causal=True)
    plain = attend(q, k, v, layer=layer.eval(), backend=backend)
    assert torch.equal(attend(q, k, v, layer=layer, backend=backend, dropout=0.5), plain)
    layer.train()
    torch.manual_seed(0)
    dropped = torch.stack([attend(q, k, v, layer=layer, backend=backend, dropout=0.5) for _ in range(150)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - plain).abs().max() < 0.5


def test_heads_of_a_group_read_the_same_keys():
    q, k, v = tensors()
    v = torch.arange(KV_HEADS).float()[:, None, None].expand_as(v)
    output = attend(q, k, v)
    assert output[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("own", "passed", "causal"), [(True, None, True), (False, None, False), (True, False, False), (False, True, True)]
)
def test_without_a_mask_is_causal_decides_and_the_keyword_overrides(own, passed, causal):
    q, k, v = tensors()
    layout = MaskLayout.causal(QUERIES, KEYS) if causal else MaskLayout.full(QUERIES, KEYS)
    output = attend(q, k, v, layer=Layer(is_causal=own).eval(), is_causal=passed)
    assert torch.allclose(output, reference(q, k, v, layout), atol=1e-5)


def test_a_layer_that_says_nothing_about_causality_is_refused_unless_it_does_not_matter():
    with pytest.raises(LayoutError, match="Layer passed no mask to its attention and has no attribute is_causal"):
        attend(*tensors(), layer=Layer().eval())
    q, k, v = tensors(queries=1)
    want = reference(q, k, v, MaskLayout.full(1, KEYS))
    assert torch.allclose(attend(q, k, v, layer=Layer().eval()), want, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_boolean_mask_is_visibility_and_a_floating_one_a_bias(backend):
    q, k, v = tensors()
    visible = torch.rand(ROWS, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4
    want = reference_attention(q, k, v, visible)[0].to(q.dtype)
    assert torch.allclose(attend(q, k, v, mask=visible, backend=backend), want, atol=1e-5)
    additive = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    assert torch.allclose(attend(q, k, v, mask=additive, backend=backend), want, atol=1e-5)
    bias = torch.randn(1, HEADS, QUERIES, KEYS)
    both = reference_attention(q, k, v, visible, bias=bias)[0].to(q.dtype)
    assert torch.allclose(attend(q, k, v, mask=additive, position_bias=bias, backend=backend), both, atol=1e-5)
    assert torch.allclose(attend(q, k, v, mask=visible, position_bias=bias, backend=backend), both, atol=1e-5)


def test_a_mask_of_four_dimensions_decides_about_the_window_as_in_transformers():
    with torch.no_grad():
        visible = MaskLayout.causal(11).to_dense()
        additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        want = model_of("mistral")(ids(), attention_mask=additive).logits
        for mask in (visible, additive):
            ours = model_of("mistral", "polyattn_sdpa")(ids(), attention_mask=mask).logits
            assert torch.allclose(ours, want, atol=2e-5)


def test_a_boolean_mask_of_one_row_serves_all_queries():
    q, k, v = tensors()
    keys = torch.arange(KEYS) < 4
    want = attend(q[:, :, :], k[:, :, :4], v[:, :, :4], is_causal=False)
    assert torch.allclose(attend(q, k, v, mask=keys[None, None, None].expand(ROWS, 1, 1, KEYS)), want, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            torch.ones(ROWS, KEYS),
            r"attention_mask must be \[B, 1\|Hq, Q, K\] when a layer receives a tensor, got \[2, 7\]",
        ),
        (torch.ones(ROWS, 1, QUERIES, KEYS, dtype=torch.long), "must be boolean .* or floating .* got torch.int64"),
        ([1, 1], "attention_mask must be a tensor or what polyattn's mask function returned, got list"),
    ],
)
def test_a_mask_that_says_nothing_clear_is_refused(mask, text):
    with pytest.raises(LayoutError, match=text):
        attend(*tensors(), mask=mask)


@pytest.mark.parametrize("keyword", ["head_mask", "block_indices", "cache"])
def test_a_keyword_that_may_change_numbers_is_refused(keyword):
    with pytest.raises(AttentionInputError, match=rf"Layer passed {keyword} to its attention, which polyattn does not"):
        attend(*tensors(), **{keyword: torch.zeros(1)})
    attend(*tensors(), **{keyword: None})


def test_an_unknown_keyword_given_to_a_model_is_refused():
    with pytest.raises(AttentionInputError, match="LlamaAttention passed temperature to its attention"):
        model_of("llama", "polyattn_eager")(ids(), temperature=0.5)
    with pytest.raises(AttentionInputError, match="LlamaAttention passed backend to its attention"):
        model_of("llama", "polyattn_eager")(ids(), backend="sdpa")


@pytest.mark.parametrize("keyword", ["use_cache", "output_hidden_states", "num_items_in_batch", "return_dict"])
def test_keywords_that_concern_no_attention_pass(keyword):
    model_of("llama", "polyattn_eager")(ids(), **{keyword: True})


@pytest.mark.parametrize(
    "keyword", ["logits_to_keep", "labels", "return_dict", "vision_feature_layer", "vision_feature_select_strategy"]
)
def test_what_models_hand_down_for_their_own_use_passes(keyword):
    q, k, v = tensors()
    assert torch.equal(attend(q, k, v, **{keyword: torch.ones(1)}), attend(q, k, v))


def test_a_deterministic_kernel_is_asked_for(counted):
    attend(*tensors(), deterministic=True)
    attend(*tensors(), deterministic=False)
    assert [request.deterministic for _, request in counted] == [True, False]


def test_shapes_that_do_not_fit_the_mask_are_refused():
    q, k, v = tensors()
    with pytest.raises(LayoutError, match=r"the mask of Layer is for 5 queries and 5 keys, but it has 5 and 7"):
        attend(q, k, v, mask=layout_mask(ROWS, QUERIES, QUERIES))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("said", [{"position_ids": [[0, 1, 0, 1, 2]]}, {"segment_ids": [[0, 0, 1, 1, 1]]}])
def test_a_layer_without_a_mask_keeps_documents_apart(backend, said):
    # Trainers that cut sequences call the layers so.
    q, k, v = tensors(keys=QUERIES)
    output = attend(q, k, v, backend=backend, **{name: torch.tensor(value) for name, value in said.items()})
    want = reference(q, k, v, MaskLayout.packed([2, 3]))
    assert torch.allclose(output, want, atol=1e-5)


def test_positions_of_one_document_change_nothing_for_a_layer_without_a_mask():
    q, k, v = tensors()
    positions = torch.arange(2, 7)[None]
    assert torch.equal(attend(q, k, v, position_ids=positions), attend(q, k, v))


@pytest.mark.parametrize("causal", [True, False])
def test_a_packed_mask_that_a_model_hands_down_is_read_by_the_layer(causal):
    q, k, v = tensors(keys=QUERIES)
    output = attend(q, k, v, layer=Layer(is_causal=causal).eval(), mask=packed([2, 3])["attention_mask"])
    want = reference(q, k, v, MaskLayout.packed([2, 3], causal=causal))
    assert torch.allclose(output, want, atol=1e-5)


def test_masks_are_prepared_once_per_forward_and_kind_of_layer(counted):
    model = model_of("gemma3", "polyattn_eager")  # two layers with a window, one without
    for mask in (None, left_padding()):
        counted.clear()
        with torch.no_grad():
            model(ids(), attention_mask=mask)
        assert [layout.visibility.window for layout, _ in counted] in ([5, None], [None, 5])
        with torch.no_grad():
            model(ids(), attention_mask=mask)
        assert len(counted) == 4


def test_documents_are_found_once_per_forward(counted, monkeypatch):
    from polyattn_transformers import _documents

    calls = []
    find = _documents.from_positions
    monkeypatch.setattr(_documents, "from_positions", lambda *given: calls.append(given) or find(*given))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        model_of("llama", "polyattn_eager")(ids(rows=1), position_ids=positions, attention_mask=torch.ones(1, 11))
    assert len(calls) == 1
    assert len(counted) == 1


def test_layers_without_a_mask_share_what_sizes_decide(counted):
    from tiny_models import ZOO

    model = model_of("whisper", "polyattn_eager")  # the encoder and cross attention have no mask
    with torch.no_grad():
        model(**ZOO["whisper"].inputs())
    assert len(counted) == 3  # the encoder's, the decoder's own, and across
    with torch.no_grad():
        model(**ZOO["whisper"].inputs())
    assert len(counted) == 4  # the decoder's mask is new in every forward


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_with_what_was_prepared(reentrant, counted):
    model = model_of("gemma3", "polyattn_eager").train()
    inputs = {"input_ids": ids(), "attention_mask": left_padding()}
    model(**inputs).logits.square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    counted.clear()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(**inputs, use_cache=False).logits.square().mean().backward()
    assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters())
    # The first pass of a reentrant checkpoint runs without gradients, and prepares for that.
    assert (
        len({(id(layout), request.needs_grad) for layout, request in counted})
        == len(counted)
        == (4 if reentrant else 2)
    )


def test_queries_that_are_padding_leave_no_nan():
    model = model_of("llama", "polyattn_sdpa")
    mask = torch.zeros(2, 11, dtype=torch.long)
    mask[1] = 1  # row 0 is empty
    logits = model(ids(), attention_mask=mask).logits
    assert logits.isfinite().all()
    logits[1].square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast_casts_as_the_core_does():
    model = model_of("llama", "polyattn_sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        low = model(ids()).logits
    assert torch.allclose(low.float(), model(ids()).logits, atol=0.5)


def bridge_tower(implementation):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BridgeTowerConfig(
        **sizes,
        text_config=sizes | {"vocab_size": 99, "max_position_embeddings": 16},
        vision_config={"hidden_size": 64, "num_hidden_layers": 1, "patch_size": 8, "image_size": 16},
    )
    torch.manual_seed(0)
    return transformers.BridgeTowerModel._from_config(config, attn_implementation=implementation).eval()


def test_a_mask_that_tells_no_queries_apart_serves_layers_with_other_numbers_of_queries():
    # The model makes its mask for one query, and takes that of a picture for the queries of a text.
    padding = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    inputs = {
        "input_ids": ids(length=7),
        "attention_mask": padding,
        "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
    }
    got, want = (bridge_tower(name)(**inputs) for name in ("polyattn_sdpa", "eager"))
    torch.testing.assert_close(got.text_features[padding.bool()], want.text_features[padding.bool()])
    torch.testing.assert_close(got.image_features, want.image_features)
    whole = bridge_tower("polyattn_sdpa")(**inputs | {"attention_mask": torch.ones_like(padding)})
    assert not torch.allclose(whole.image_features, got.image_features)


@pytest.mark.parametrize(
    "mask",
    [
        LayoutMask(MaskLayout.causal(3, 4), batch=1),
        LayoutMask(MaskLayout.full(3, 4, active_queries=torch.ones(1, 3, dtype=torch.bool)), batch=1),
        LayoutMask(MaskLayout.dense(torch.ones(1, 1, 3, 4, dtype=torch.bool)), batch=1),
        LayoutMask(MaskLayout.full(2, 3), batch=1),
    ],
    ids=["causal", "active queries", "dense", "other keys"],
)
def test_a_mask_that_may_tell_queries_apart_must_have_the_queries_of_the_layer(mask):
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)
    with pytest.raises(LayoutError, match=r"the mask of Linear is for \d queries and \d keys, but it has 2 and 4"):
        attention_forward(nn.Linear(1, 1), q, k, k, mask, polyattn_backend="sdpa")
