"""Packed documents in models of every make: each document gets the logits it has alone, or the model is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import polyattn_transformers
from polyattn import LayoutError
from polyattn_transformers import packed
from tiny_configs import tiny_config
from tiny_models import DECODER, VOCABULARY, ids
from versions import refused_before, whole_graphs

LENGTHS = [5, 8]
TOTAL = sum(LENGTHS)
POSITIONS = torch.tensor([[*range(5), *range(8)]])
SEGMENTS = torch.tensor([[0] * 5 + [1] * 8])
OFFSETS = torch.tensor([0, 5, 13], dtype=torch.int32)
ONES = torch.ones(1, TOTAL, dtype=torch.long)

#: Every way to say where the documents lie.
FORMS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "positions, no cache": {"position_ids": POSITIONS, "use_cache": False},
    "positions, mask of ones": {"position_ids": POSITIONS, "attention_mask": ONES},
    "segment_ids": {"segment_ids": SEGMENTS},
    "seq_idx": {"seq_idx": SEGMENTS.int(), "attention_mask": ONES},
    "cu_seq_lens": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 8, "max_length_k": 8},
    "numbers in the mask": {"attention_mask": SEGMENTS + 1},
    "packed": packed(LENGTHS),
    "packed, mask alone": {"attention_mask": packed(LENGTHS)["attention_mask"]},
}
_SMALL = {key: value for key, value in DECODER.items() if key not in {"bos_token_id", "eos_token_id"}}
_DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_HYBRID = ["linear_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
_WIDE = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
_BART = _WIDE | {"vocab_size": VOCABULARY, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}

#: Models that honour documents, by what is special about them.
HONOURED: dict[str, tuple[str, dict[str, Any]]] = {
    "layers are not given positions": ("Ministral3", {}),
    "latent layers are not given positions": (
        "Mistral4",
        _EXPERTS
        | {"head_dim": ..., "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
        | {"v_head_dim": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    ),
    "layers are given no keywords at all": ("Nemotron", {}),
    "chunks": ("Llama4", _EXPERTS | {"attention_chunk_size": 3, "intermediate_size_mlp": 48}),
    "window": ("Mistral", {"sliding_window": 3}),
    "a mask for layers that it does not have": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "learned positions": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "positions that start behind padding": ("Roberta", {"is_decoder": True, "pad_token_id": 1}),
    "a decoder without its encoder": ("Whisper", _WIDE | {"max_target_positions": 64}),
}
#: Models that mix documents, and the layer or the reason that the refusal gives.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "delta rule": (
        "Qwen3Next",
        _DELTA | _EXPERTS | {"layer_types": _HYBRID, "shared_expert_intermediate_size": 16},
        r"Qwen3NextModel .*: layers.0.linear_attn \(Qwen3NextGatedDeltaNet\); give each document a row",
    ),
    "state space": (
        "Jamba",
        _EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
        r"JambaModel .*: layers.0.mamba \(JambaMambaMixer\)",
    ),
    "convolution": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        r"Lfm2Model .*: layers.0.conv \(Lfm2ShortConv\)",
    ),
    "lightning attention": (
        "MiniMax",
        _EXPERTS | {"layer_types": _HYBRID, "block_size": 4},
        r"MiniMaxModel .*: layers.0.self_attn \(MiniMaxLightningAttention\)",
    ),
    "positions of its own": (
        "Bart",
        _BART,
        r"BartDecoder .* numbers the tokens of a row itself and takes no position_ids",
    ),
    "rotation by length": (
        "Phi3",
        {
            "head_dim": ...,
            "original_max_position_embeddings": 6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 6,
            },
        },
        r"Phi3Model .* its rotation changes .* one document is longer than 6, and these have 5 to 8 tokens",
    ),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def pair(family, changes, suffix="ForCausalLM"):
    """One model twice, on transformers' eager and on ours, with weights that make logits of about 6."""
    found = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    values = {key: value for key, value in (_SMALL | changes).items() if value is not ...}
    names = set(found().to_dict()) if family != "Phi3" else set(values)
    config = found(**{key: value for key, value in values.items() if key in names or key in changes})
    kind = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}{suffix}"))
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with refused_before():
        ours = kind._from_config(config, attn_implementation="polyattn_auto").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(eager.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens():
    return ids(rows=1, length=TOTAL).clamp(min=4)


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def alone(model, row):
    return torch.cat([run(model, input_ids=part) for part in row.split(LENGTHS, 1)], 1)


def same(got, want):
    return (got - want).abs().max() <= 1e-5 * (1 + want.abs().max())


@pytest.mark.parametrize("case", HONOURED)
def test_every_description_gives_each_document_what_it_has_alone(case):
    family, changes = HONOURED[case]
    (eager, ours), row = pair(family, changes), tokens()
    want = alone(eager, row)
    assert not same(run(eager, input_ids=row), want)  # or the test could not fail
    assert [name for name, form in FORMS.items() if not same(run(ours, input_ids=row, **form), want)] == []


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_would_mix_documents_says_which_layer_does(case):
    family, changes, text = REFUSED[case]
    (eager, ours), row = pair(family, changes), tokens()
    assert same(run(ours, input_ids=row), run(eager, input_ids=row))
    for form in FORMS.values():
        with pytest.raises(LayoutError, match=text):
            run(ours, input_ids=row, **form)


def test_one_document_or_padding_is_no_reason_to_refuse_a_recurrent_model():
    family, changes, _ = REFUSED["delta rule"]
    (eager, ours), rows = pair(family, changes), ids(rows=2, length=TOTAL)
    mask = torch.ones(2, TOTAL, dtype=torch.long)
    mask[0, :4] = 0
    plain = torch.arange(TOTAL)[None]
    for inputs in ({"position_ids": plain}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": plain}):
        want = run(eager, input_ids=rows, **inputs)
        live = mask.bool() if "attention_mask" in inputs else torch.ones_like(mask, dtype=torch.bool)
        assert same(run(ours, input_ids=rows, **inputs)[live], want[live])


def test_documents_that_are_all_short_or_all_long_take_one_rotation():
    family, changes, _ = REFUSED["rotation by length"]
    (eager, ours), row = pair(family, changes), tokens()
    for lengths in ([5, 4, 4], [7, 6]):
        if min(lengths) > 6 or max(lengths) <= 6:
            got = run(ours, input_ids=row, **packed(lengths))
            want = torch.cat([run(eager, input_ids=part) for part in row.split(lengths, 1)], 1)
            assert same(got, want)


def test_numbers_in_a_mask_leave_room_for_padding():
    (eager, ours), row = pair("Mistral", {"sliding_window": 3}), tokens()
    mask = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0]])
    for positions in (None, torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 0]])):
        got = run(ours, input_ids=row, attention_mask=mask, position_ids=positions)
        for start, stop in ((2, 5), (5, 9), (9, 11)):
            assert same(got[:, start:stop], run(eager, input_ids=row[:, start:stop]))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            torch.zeros(1, TOTAL),
            r"must hold 1 where .* got torch.float32 with values from 0 to 0; of a mask that is added",
        ),
        (
            torch.zeros(1, TOTAL).index_fill(1, torch.tensor([0]), -torch.inf),
            r"attention_mask \[B, K\] must hold 1 where a token is and 0 .*, got torch.float32 .* from -inf to 0",
        ),
        (ONES.index_fill(1, torch.tensor([0]), -1), r"must hold 0 for padding and 1, or the number .*, got -1; say"),
        (torch.cat([ONES, ONES + 1], 1), r"numbers several documents over 26 tokens, but the call has 13; pack into"),
    ],
)
def test_a_mask_that_could_be_read_both_ways_is_refused(mask, text):
    with pytest.raises(LayoutError, match=text):
        run(pair("Ministral3", {})[1], input_ids=tokens(), attention_mask=mask)


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (torch.arange(TOTAL)[None].bfloat16(), "position_ids must be integers, got torch.bfloat16, which cannot tell"),
        (POSITIONS[:, :9], r"position_ids must be \[B, K\] with one .* per token of 1 rows of 13, got \[1, 9\]"),
        (POSITIONS.expand(3, -1), r"position_ids must be \[B, K\] with one position per token .*, got \[3, 13\]"),
    ],
)
def test_positions_that_are_not_one_integer_for_each_token_are_refused(positions, text):
    with pytest.raises(LayoutError, match=text):
        run(pair("Ministral3", {})[1], input_ids=tokens(), position_ids=positions)


def test_sections_in_a_config_that_no_layer_reads_do_not_give_positions_axes():
    ours = pair("Ministral3", {})[1]
    ours.config.rope_parameters["mrope_section"] = [1, 1, 2]
    with pytest.raises(LayoutError, match=r"position_ids must be \[B, K\] .*, got \[3, 1, 13\]"):
        run(ours, input_ids=tokens(), position_ids=POSITIONS.expand(3, 1, -1))


def test_positions_of_a_model_that_starts_behind_padding_must_start_there():
    ours, row = pair(*HONOURED["positions that start behind padding"])[1], tokens()
    assert same(run(ours, input_ids=row, position_ids=POSITIONS + 2), run(ours, input_ids=row, **packed(LENGTHS)))
    with pytest.raises(LayoutError, match=r"must start at 2 with each document for RobertaModel, .* got \[5\]; leave"):
        run(ours, input_ids=row, position_ids=POSITIONS + 5)


@pytest.mark.parametrize("form", ["positions", "packed"])
def test_a_cache_that_holds_documents_is_not_decoded_from(form):
    ours, row = pair("Ministral3", {})[1], tokens()
    with torch.no_grad():
        cache = ours(row, **FORMS[form], use_cache=True).past_key_values
    with pytest.raises(LayoutError, match="past_key_values must not hold packed documents, since nobody knows"):
        run(ours, input_ids=row[:, :1], past_key_values=cache)


@whole_graphs
@pytest.mark.parametrize(
    ("case", "inputs", "text"),
    [
        (HONOURED["window"], FORMS["numbers in the mask"], r"attention_mask \[B, K\] must hold 0 and 1 in a compiled"),
        (REFUSED["convolution"], FORMS["positions, no cache"], "position_ids restart in a model that mixes packed"),
    ],
)
def test_a_compiled_model_stops_at_documents_that_it_could_not_look_for(case, inputs, text):
    ours, row = pair(*case[:2])[1], tokens()
    compiled = torch.compile(polyattn_transformers.use(ours, "sdpa"), fullgraph=True, backend="eager")
    plain = {"attention_mask": ONES, "position_ids": torch.arange(TOTAL)[None]}
    want = run(ours, input_ids=row)
    assert same(
        run(compiled, input_ids=row, use_cache=False, **{key: plain[key] for key in inputs if key in plain}), want
    )
    with pytest.raises(RuntimeError, match=text):
        run(compiled, input_ids=row, **{"use_cache": False, **inputs})


@pytest.mark.parametrize("form", ["positions, mask of ones", "segment_ids", "packed"])
def test_a_compiled_model_gives_each_document_the_positions_it_has_alone(form):
    (eager, ours), row = pair(*HONOURED["positions that start behind padding"]), tokens()
    compiled = torch.compile(polyattn_transformers.use(ours, "sdpa"), fullgraph=True, backend="eager")
    assert same(run(compiled, input_ids=row, **{"use_cache": False, **FORMS[form]}), alone(eager, row))


def test_an_encoder_and_its_decoder_take_no_documents():
    ours, row = pair("Bart", _BART, "ForConditionalGeneration")[1], tokens()
    for form in ("packed", "segment_ids", "numbers in the mask"):
        with pytest.raises(LayoutError, match=r"BartForConditionalGeneration cannot .* cross attention does not know"):
            run(ours, input_ids=row, decoder_input_ids=row, **FORMS[form])


def test_the_gate_lets_other_implementations_pass():
    eager, row = pair("Ministral3", {})[0], tokens()
    with torch.no_grad():
        got, want = (
            call(eager, row, position_ids=POSITIONS).logits for call in (type(eager).__call__, nn.Module.__call__)
        )
    assert torch.equal(got, want)


def test_an_implementation_that_is_set_on_the_config_alone_is_gated_too():
    (eager, _), row = pair("Nemotron", {}), tokens()
    want = alone(eager, row)
    eager.config._attn_implementation = "polyattn_sdpa"
    assert same(run(eager, input_ids=row, segment_ids=SEGMENTS), want)


def small(kind, **changes):
    """A small causal model on polyattn."""
    own = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind is transformers.GPT2Config else _SMALL
    config = kind(**{**own, "vocab_size": VOCABULARY, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="polyattn_sdpa").eval()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("attention_mask", SEGMENTS[0] + 1, r"attention_mask must be \[B, K\] with one .* shape \[13\]; add the batch"),
        (
            "attention_mask",
            SEGMENTS[None] + 1,
            r"attention_mask must be \[B, K\] .*, got shape \[1, 1, 13\]; call .reshape",
        ),
        (
            "attention_mask",
            [1] * TOTAL,
            r"attention_mask must be \[B, K\] .*, got list; make a tensor with torch.tensor",
        ),
        ("position_ids", POSITIONS[0], r"position_ids must be \[B, K\] with one position per token .*, got \[13\]"),
        ("position_ids", POSITIONS[None], r"position_ids must be \[B, K\] with one position .*, got \[1, 1, 13\]"),
        ("position_ids", POSITIONS.expand(3, 1, -1), r"position_ids must be \[B, K\] with one .*, got \[3, 1, 13\]"),
        ("position_ids", POSITIONS.tolist(), r"position_ids must be an integer tensor \[B, K\], got list; make one"),
        ("position_ids", POSITIONS.to(torch.int8), r"position_ids must be of dtype int32 or int64, got torch.int8"),
        ("segment_ids", SEGMENTS.bool(), r"segment_ids must be integers, the number of .*, got torch.bool; call .long"),
        ("segment_ids", SEGMENTS.float(), r"segment_ids must be integers, .*, got torch.float32; call .long"),
    ],
)
@pytest.mark.parametrize("kind", [transformers.GPT2Config, transformers.LlamaConfig])
def test_masks_positions_and_numbers_of_another_type_or_shape_are_refused_by_name(kind, name, value, text):
    for beside in ({}, {"use_cache": False}):
        with pytest.raises(LayoutError, match=text):
            small(kind)(torch.ones(1, TOTAL, dtype=torch.long), **{name: value}, **beside)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_small_integers_number_documents_too(dtype):
    (eager, ours), row = pair("Ministral3", {}), tokens()
    for form in ({"attention_mask": (SEGMENTS + 1).to(dtype)}, {"segment_ids": SEGMENTS.to(dtype)}):
        assert same(run(ours, input_ids=row, **form), alone(eager, row))


def test_a_hole_in_a_mask_that_numbers_documents_is_the_fault_of_the_mask_alone():
    mask = SEGMENTS + 1
    mask = mask.index_fill(1, torch.tensor([2]), 0)
    with pytest.raises(
        LayoutError, match=r"attention_mask must be whole, got a masked token inside a .* column 2; pad"
    ):
        run(pair("Ministral3", {})[1], input_ids=tokens(), attention_mask=mask)


#: Documents that take turns in a row, and every way to say so.
TURNS = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0]])
TURNING: dict[str, dict[str, Any]] = {
    "segment_ids": {"segment_ids": TURNS},
    "seq_idx": {"seq_idx": TURNS.int(), "attention_mask": ONES},
    "numbers in the mask": {"attention_mask": TURNS + 1},
    "packed": packed(document_ids=TURNS),
    "packed, mask alone": {"attention_mask": packed(document_ids=TURNS)["attention_mask"]},
    "positions of its own": {"segment_ids": TURNS, "position_ids": packed(document_ids=TURNS)["position_ids"].clone()},
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "query_pre_attn_scalar": 8}


def alone_in_turns(model, row):
    places = [(TURNS[0] == number).nonzero()[:, 0] for number in (0, 1)]
    parts = torch.cat([run(model, input_ids=row[:, at]) for at in places], 1)
    return parts[:, torch.cat(places).argsort()]


@pytest.mark.parametrize(
    ("family", "changes", "suffix"),
    [
        ("Mistral", {"sliding_window": 3}, "ForCausalLM"),
        ("Gemma3", _MIXED, "ForCausalLM"),
        ("Llama4", _EXPERTS | {"attention_chunk_size": 3, "intermediate_size_mlp": 48}, "ForCausalLM"),
        ("ModernBert", {"local_attention": 4, "global_attn_every_n_layers": 2}, "ForMaskedLM"),
    ],
)
def test_windows_and_chunks_count_the_tokens_of_a_document_that_lies_in_pieces(family, changes, suffix):
    (eager, ours), row = pair(family, changes, suffix), tokens()
    want = alone_in_turns(eager, row)
    assert [name for name, form in TURNING.items() if not same(run(ours, input_ids=row, **form), want)] == []


@whole_graphs
@pytest.mark.parametrize("form", ["segment_ids", "packed"])
def test_a_compiled_window_counts_the_tokens_of_a_document_too(form):
    (eager, ours), row = pair("Mistral", {"sliding_window": 3}), tokens()
    torch.compiler.reset()
    compiled = torch.compile(polyattn_transformers.use(ours, "sdpa"), fullgraph=True, backend="eager")
    want = alone_in_turns(eager, row)
    assert same(run(compiled, input_ids=row, use_cache=False, **TURNING[form]), want)


def test_a_bias_by_distance_refuses_documents_in_pieces():
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with refused_before():
        model = transformers.T5EncoderModel._from_config(config, attn_implementation="polyattn_sdpa").eval()
    inputs = {"input_ids": tokens()}
    with torch.no_grad():
        got = model(**inputs, segment_ids=SEGMENTS).last_hidden_state[:, 5:]
        want = model(input_ids=inputs["input_ids"][:, 5:]).last_hidden_state
    assert same(got, want)
    with pytest.raises(LayoutError, match="segment_ids must keep the tokens of each document together in a model that"):
        model(**inputs, segment_ids=TURNS)


def test_a_scale_by_the_place_in_the_row_refuses_long_rows():
    changes = _EXPERTS | {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": 6}
    (eager, ours), row = pair("Llama4", changes), tokens()
    assert same(run(ours, input_ids=row), run(eager, input_ids=row))
    text = r"Llama4TextModel cannot .* scales queries by the place of a token in the row from 6 tokens on, .* has 13"
    for form in FORMS.values():
        with pytest.raises(LayoutError, match=text):
            run(ours, input_ids=row, **form)


@pytest.mark.parametrize(
    ("family", "changes", "suffix"),
    [
        ("Roberta", {"is_decoder": True}, "ForCausalLM"),
        ("XLMRoberta", {}, "ForMaskedLM"),
        ("Camembert", {}, "ForMaskedLM"),
    ],
)
def test_padding_tokens_inside_a_document_are_numbered_as_when_it_is_alone(family, changes, suffix):
    (eager, ours), row = pair(family, {"pad_token_id": 1, **changes}, suffix), tokens()
    row[0, [2, 5, 9]] = 1
    want = alone(eager, row)
    assert [name for name, form in FORMS.items() if not same(run(ours, input_ids=row, **form), want)] == []
    torch.compiler.reset()  # all models share one code object, and torch counts how often it is compiled
    compiled = torch.compile(polyattn_transformers.use(ours, "sdpa"), fullgraph=True, backend="eager")
    assert same(run(compiled, input_ids=row, **FORMS["packed"]), want)


@pytest.mark.parametrize("kind", ["Gemma3", "PaliGemma", "Llava"])
def test_a_model_of_which_only_the_text_goes_to_polyattn_is_gated_too(kind):
    kind = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = tiny_config(kind.config_class)
    model = kind._from_config(config, attn_implementation={"text_config": "polyattn_sdpa"}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    assert not model.config._attn_implementation.startswith("polyattn")
    row = tokens().clamp(min=10)
    want = alone(model, row)
    for form in ("segment_ids", "numbers in the mask", "packed", "positions"):
        assert same(run(model, input_ids=row, **FORMS[form]), want), form
