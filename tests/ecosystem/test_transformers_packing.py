"""Packed documents never see each other, however they are described and whatever else is passed along."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import polyattn_transformers
from polyattn import LayoutError, MaskLayout
from polyattn_transformers import PackedMask, packed
from tiny_configs import tiny_config
from tiny_models import ids, model_of
from versions import PINNED_TRANSFORMERS, TRANSFORMERS

LENGTHS = [3, 2, 4]
TOTAL = sum(LENGTHS)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]])
OFFSETS = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
ONES = torch.ones(1, TOTAL, dtype=torch.long)
HOLE = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1]])
PLAIN = torch.arange(TOTAL)[None]

SOURCES = {
    "positions": {"position_ids": POSITIONS},
    "positions, all-ones mask": {"position_ids": POSITIONS, "attention_mask": ONES},
    "positions, cache": {"position_ids": POSITIONS, "use_cache": True},
    "positions, all-ones mask, cache": {"position_ids": POSITIONS, "attention_mask": ONES, "use_cache": True},
    "segment_ids": {"position_ids": POSITIONS, "segment_ids": SEGMENTS},
    "segment_ids, all-ones mask, cache": {
        "position_ids": POSITIONS,
        "segment_ids": SEGMENTS,
        "attention_mask": ONES,
        "use_cache": True,
    },
    "seq_idx": {"position_ids": POSITIONS, "seq_idx": SEGMENTS.int(), "attention_mask": ONES},
    "cu_seq_lens": {
        "position_ids": POSITIONS,
        "cu_seq_lens_q": OFFSETS,
        "cu_seq_lens_k": OFFSETS,
        "max_length_q": 4,
        "max_length_k": 4,
        "attention_mask": ONES,
    },
    "packed": packed(LENGTHS),
    "packed, cache": {**packed(cu_seqlens=OFFSETS[None]), "use_cache": True},
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def tokens():
    return ids(rows=1, length=TOTAL)


def run(model, **inputs):
    with torch.no_grad():
        return model(**{"use_cache": False, **inputs}).logits


def alone(model, row, start, stop):
    return run(model, input_ids=row[:, start:stop])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_document_gives_the_logits_it_has_alone(backend, name, source):
    model, row = model_of(name, f"polyattn_{backend}"), tokens()
    logits = run(model, input_ids=row, **SOURCES[source])
    for start, stop in ((0, 3), (3, 5), (5, 9)):
        assert torch.allclose(logits[:, start:stop], alone(model, row, start, stop), atol=2e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_changing_one_document_changes_no_other_at_all(source):
    model, row = model_of("llama", "polyattn_sdpa"), tokens()
    other = row.clone()
    other[:, :3] = (other[:, :3] + 7) % 90 + 3
    logits, changed = (run(model, input_ids=x, **SOURCES[source]) for x in (row, other))
    assert not torch.equal(logits[:, :3], changed[:, :3])
    assert torch.equal(logits[:, 3:], changed[:, 3:])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_itself_lets_documents_leak_when_a_mask_is_passed(implementation):
    # What the tests above rule out, in transformers' own implementations: the reason for all this.
    model, row = model_of("llama", implementation), tokens()
    logits = run(model, input_ids=row, **SOURCES["positions, all-ones mask"])
    assert not torch.allclose(logits[:, 3:5], alone(model, row, 3, 5), atol=1e-2)


def test_rows_of_a_batch_have_documents_of_their_own():
    model = model_of("llama", "polyattn_sdpa")
    rows = ids(rows=2, length=5)
    for inputs in (
        packed([[3, 2], [2, 3]]),
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]), "attention_mask": torch.ones(2, 5)},
        {
            "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]),
            "cu_seq_lens_q": torch.tensor([0, 3, 5, 7, 10]),
            "cu_seq_lens_k": torch.tensor([0, 3, 5, 7, 10]),
        },
    ):
        logits = run(model, input_ids=rows, **inputs)
        for row, cut in ((0, 3), (1, 2)):
            parts = [alone(model, rows[row : row + 1], *part) for part in ((0, cut), (cut, 5))]
            assert torch.allclose(logits[row], torch.cat(parts, 1)[0], atol=2e-5)


def test_one_description_serves_every_row():
    model = model_of("llama", "polyattn_sdpa")
    rows = ids(rows=2, length=TOTAL)
    logits = run(model, input_ids=rows, **packed(LENGTHS))
    assert torch.allclose(logits[1, 3:5], alone(model, rows[1:], 3, 5)[0], atol=2e-5)


def test_padding_around_packed_documents_is_not_a_document():
    model, row = model_of("llama", "polyattn_sdpa"), tokens()
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[1, 0, 1, 0, 1, 2, 3, 1, 1]])  # padding is counted as generation does
    logits = run(model, input_ids=row, attention_mask=mask, position_ids=positions)
    assert torch.allclose(logits[:, 1:3], alone(model, row, 1, 3), atol=2e-5)
    assert torch.allclose(logits[:, 3:7], alone(model, row, 3, 7), atol=2e-5)


@pytest.mark.parametrize(
    "positions",
    [
        [[1, 1, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]],  # left padding, positions counted from the mask
        [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]],  # left padding, positions not counted
    ],
)
def test_padding_is_not_mistaken_for_packing(positions):
    rows, mask = ids(rows=2, length=TOTAL), torch.ones(2, TOTAL, dtype=torch.long)
    mask[0, :2] = 0
    inputs = {"input_ids": rows, "attention_mask": mask, "position_ids": torch.tensor(positions)}
    logits, want = (run(model_of("llama", name), **inputs) for name in ("polyattn_sdpa", "eager"))
    assert torch.allclose(logits[mask.bool()], want[mask.bool()], atol=2e-5)


def test_a_hole_in_the_mask_is_not_mistaken_for_packing():
    row, mask = tokens(), ONES.clone()
    mask[0, 3:5] = 0
    for positions in (PLAIN, torch.tensor([[0, 1, 2, 1, 1, 3, 4, 5, 6]])):
        inputs = {"input_ids": row, "attention_mask": mask, "position_ids": positions}
        logits, want = (run(model_of("llama", name), **inputs) for name in ("polyattn_sdpa", "eager"))
        assert torch.allclose(logits[mask.bool()], want[mask.bool()], atol=2e-5)


def test_a_row_may_begin_inside_a_document():
    model, row = model_of("llama", "polyattn_sdpa"), tokens()
    positions = torch.tensor([[7, 8, 9, 0, 1, 0, 1, 2, 3]])
    logits = run(model, input_ids=row, attention_mask=ONES, position_ids=positions)
    assert torch.allclose(logits[:, 3:5], alone(model, row, 3, 5), atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_without_mask_and_cache_a_document_starts_at_every_jump_as_in_transformers(name):
    row, jump = tokens(), torch.tensor([[0, 1, 2, 7, 8, 9, 10, 11, 12]])
    model = model_of(name, "polyattn_sdpa")
    logits, want = (run(m, input_ids=row, position_ids=jump) for m in (model, model_of(name, "eager")))
    assert torch.allclose(logits, want, atol=2e-5)
    assert torch.allclose(logits[:, 3:], alone(model, row, 3, 9), atol=2e-5)
    for beside in ({"use_cache": True}, {"attention_mask": ONES}):
        with pytest.raises(
            LayoutError, match=r"position_ids must go on by 1 .*, got 2 followed by 7 in row 0, column 3"
        ):
            run(model, input_ids=row, position_ids=jump, **beside)


def test_the_text_row_of_multi_axis_positions_says_where_documents_lie():
    model, row = model_of("qwen2_vl", "polyattn_sdpa"), tokens().clamp(min=10)
    four = POSITIONS.expand(4, 1, TOTAL)
    for extra in ({}, {"attention_mask": ONES}, {"use_cache": True}):
        logits = run(model, input_ids=row, position_ids=four, **extra)
        assert torch.allclose(logits[:, 3:5], alone(model, row, 3, 5), atol=2e-5)
    # Three rows are axes without text; they describe no documents, and they are not offsets either.
    for name in ("polyattn_sdpa", "eager"):
        want = run(model_of("qwen2_vl", name), input_ids=row, position_ids=POSITIONS.expand(3, 1, TOTAL))
        logits = run(model, input_ids=row, position_ids=POSITIONS.expand(3, 1, TOTAL))
        assert torch.allclose(logits, want, atol=2e-5)
    with pytest.raises(LayoutError, match="of multi-axis positions"):
        packed(position_ids=POSITIONS.expand(3, 1, TOTAL))


def test_gradients_stay_inside_a_document():
    model = model_of("llama", "polyattn_sdpa")
    embeddings = torch.randn(1, TOTAL, 32, requires_grad=True)
    model(inputs_embeds=embeddings, **packed(LENGTHS)).logits[:, 3:5].sum().backward()
    assert embeddings.grad[:, 3:5].abs().min() > 0
    assert embeddings.grad[:, :3].abs().max() == embeddings.grad[:, 5:].abs().max() == 0


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"segment_ids": SEGMENTS, "position_ids": PLAIN.remainder(3)}, "segment_ids and position_ids must describe"),
        ({"segment_ids": SEGMENTS, "seq_idx": SEGMENTS.clamp(max=1)}, "segment_ids and seq_idx must describe the same"),
        ({"segment_ids": SEGMENTS[:, :4]}, r"segment_ids must be Int\[B, K\] with one document per token"),
        ({"cu_seq_lens_q": OFFSETS}, "cu_seq_lens_q and cu_seq_lens_k must be given together"),
        (
            {"cu_seq_lens_q": OFFSETS[:3], "cu_seq_lens_k": OFFSETS[:3]},
            r"cu_seq_lens_q must rise from 0 to the number of tokens, 9 \(1 rows of 9\), got \[0, 3, 5\]",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]]), "attention_mask": ONES},
            "position_ids must go on by 1 inside a document and .*, got 2 followed by 5 in row 0, column 3",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 1, 2, 0, 1, 2, 3]]), "attention_mask": ONES},
            r"position_ids must restart at one number with each document, got restarts at \[0, 1\] in row 0",
        ),
        (
            {"segment_ids": SEGMENTS, "attention_mask": HOLE},
            "segment_ids and attention_mask must agree, got a masked token inside a document in row 0, column 1",
        ),
        (
            {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "attention_mask": HOLE},
            "cu_seq_lens_q and attention_mask must agree, got a masked token inside a document in row 0, column 1",
        ),
        ({"segment_ids": [0] * TOTAL}, r"segment_ids must be an integer tensor, got list; make one with torch.tensor"),
        ({"seq_idx": "x"}, "seq_idx must be an integer tensor, got str"),
        ({"cu_seq_lens_q": [0, 9], "cu_seq_lens_k": [0, 9]}, "cu_seq_lens_q must be an integer tensor, got list"),
        (
            {"segment_ids": SEGMENTS, "attention_mask": torch.ones(1, 1, TOTAL, TOTAL, dtype=torch.bool)},
            r"attention_mask \[B, 1, Q, K\] and segment_ids both say who sees whom",
        ),
        (
            {**packed(LENGTHS), "segment_ids": PLAIN},
            "packed documents and segment_ids must describe the same documents",
        ),
        ({**packed(LENGTHS), "position_ids": PLAIN.remainder(4)}, "packed documents and position_ids must describe"),
        (
            {**packed([3, 3])},
            "packed documents must cover the tokens of the call, got 6 tokens in documents, 9 queries",
        ),
    ],
)
def test_descriptions_that_contradict_each_other_are_refused(inputs, text):
    inputs = {"position_ids": POSITIONS, **inputs}
    with pytest.raises(LayoutError, match=text):
        run(model_of("llama", "polyattn_sdpa"), input_ids=tokens(), **inputs)


@pytest.mark.parametrize("static", [False, True])
def test_a_packed_batch_beside_cached_tokens_is_refused(static):
    model, row = model_of("llama", "polyattn_sdpa"), tokens()
    cache = StaticCache(config=model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    run(model, input_ids=row, past_key_values=cache, use_cache=True)
    with pytest.raises(LayoutError, match="nobody knows to which document a cached key belongs"):
        run(model, input_ids=row, position_ids=POSITIONS, past_key_values=cache, use_cache=True)
    with pytest.raises(LayoutError, match="a cache with earlier tokens"):
        run(model, input_ids=row, past_key_values=cache, use_cache=True, **packed(LENGTHS))


def test_packed_documents_of_another_number_of_rows_are_refused():
    text = "must have one row, or one for each row of the call, got 3 rows in documents and 2 in the call; describe the"
    with pytest.raises(LayoutError, match=text):
        run(model_of("llama", "polyattn_sdpa"), input_ids=ids(rows=2, length=TOTAL), **packed([LENGTHS] * 3))


def test_a_packed_prompt_to_generate_is_refused_by_name():
    model = model_of("llama", "polyattn_sdpa")
    with pytest.raises(
        (TypeError, AttributeError), match=r"a PackedMask is not a tensor and .*generation takes no packed prompts"
    ):
        model.generate(tokens(), **packed(LENGTHS), max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("LayoutLMForMaskedLM", {}, "has no attribute 'unsqueeze'"),
        ("Lfm2ForCausalLM", {"layer_types": ["full_attention"] * 2}, "cannot be compared with numbers"),
    ],
)
@pytest.mark.parametrize("inputs", [packed(LENGTHS), {"position_ids": POSITIONS, "attention_mask": ONES}])
def test_a_model_whose_own_code_computes_with_the_mask_refuses_packed_documents(kind, changes, text, inputs):
    config = tiny_config(getattr(transformers, kind).config_class)
    config.update(changes)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="polyattn_sdpa")
    if kind == "Lfm2ForCausalLM" and TRANSFORMERS < PINNED_TRANSFORMERS:
        pytest.skip("the code of LFM2 does not compute with the mask in this transformers")
    with pytest.raises(LayoutError, match=f"PackedMask is not a tensor and {text}: .* in a model whose own code"):
        run(model, input_ids=tokens(), **inputs)


def test_a_packed_mask_equals_itself_and_no_number():
    mask, other = (packed(LENGTHS)["attention_mask"] for _ in range(2))
    assert mask == mask  # noqa: PLR0124
    assert mask != other
    assert mask is not None
    assert {mask: 1, other: 2}[mask] == 1
    for number in (1, 0.0, True, ONES):
        with pytest.raises(TypeError, match="a PackedMask is not a tensor and cannot be compared with numbers"):
            mask == number  # noqa: B015


@pytest.mark.parametrize("device", ["foo", 3.5, []])
def test_what_is_not_a_device_is_refused(device):
    with pytest.raises(
        LayoutError, match=r"device must be a device of torch, such as 'cuda' or .*, got ('foo'|3.5|\[\])"
    ):
        packed(LENGTHS, device=device)


def test_a_four_dimensional_mask_is_the_whole_truth():
    mask = MaskLayout.packed([4, 5]).to_dense()
    model, row = model_of("llama", "polyattn_sdpa"), tokens()
    logits = run(model, input_ids=row, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
    assert torch.allclose(logits[:, 4:], alone(model, row, 4, 9), atol=2e-5)
    prefix = MaskLayout.prefix_lm(4, TOTAL).to_dense()
    additive = torch.zeros(prefix.shape).masked_fill(~prefix, torch.finfo(torch.float32).min)
    ours = run(model, input_ids=row, attention_mask=prefix, position_ids=POSITIONS)
    want = run(model_of("llama", "eager"), input_ids=row, attention_mask=additive, position_ids=POSITIONS)
    assert torch.allclose(ours, want, atol=2e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lengths": [2, 3]},
        {"cu_seqlens": [0, 2, 5]},
        {"document_ids": [4, 4, 7, 7, 7]},
        {"position_ids": [0, 1, 0, 1, 2]},
    ],
)
def test_packed_gives_a_mask_and_positions(arguments):
    inputs = packed(**arguments)
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    mask = inputs["attention_mask"]
    assert isinstance(mask, PackedMask)
    assert mask.shape == (1, 5)
    assert mask.to("cpu") is mask
    assert mask.to("meta").device == packed(**arguments, device="meta")["position_ids"].device == torch.device("meta")
    assert repr(mask).startswith("PackedMask(")


def test_a_packed_mask_survives_the_way_from_a_data_loader_worker():
    mask = pickle.loads(pickle.dumps(packed(LENGTHS)["attention_mask"]))
    logits = run(model_of("llama", "polyattn_sdpa"), input_ids=tokens(), attention_mask=mask, position_ids=POSITIONS)
    want = run(model_of("llama", "polyattn_sdpa"), input_ids=tokens(), **packed(LENGTHS))
    assert torch.equal(logits, want)


def test_documents_that_take_turns_have_positions_of_their_own():
    assert packed(document_ids=[0, 1, 0, 1, 1])["position_ids"].tolist() == [[0, 0, 1, 1, 2]]


def test_packed_documents_on_another_implementation_are_refused_by_name():
    with pytest.raises(AttributeError, match="only attention of polyattn reads it"):
        run(model_of("llama", "sdpa"), input_ids=tokens(), **packed(LENGTHS))


def test_an_encoder_keeps_packed_documents_apart():
    # transformers has no packing for encoders; ours does not depend on the mask being causal.
    model, row = model_of("modernbert", "polyattn_sdpa"), tokens()
    inputs = packed(LENGTHS)
    with torch.no_grad():
        logits = model(input_ids=row, **inputs).logits
        want = model(input_ids=row[:, 5:]).logits
    assert torch.allclose(logits[:, 5:], want, atol=2e-5)
