"""Generation with every cache, and compiled models, give what transformers' eager attention gives."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, GenerationConfig, StaticCache

import polyattn_transformers
from polyattn import UnsupportedAttentionError, backends
from polyattn_transformers import _parts, packed
from tiny_models import ZOO, ids, left_padding, model_of
from versions import whole_graphs

GENERATORS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "deepseek_v3")

KINDS = ["sliding_attention", "full_attention"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def generate(model, cache, mask, **inputs):
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | inputs
    if cache:
        given["cache_implementation"] = cache
    output = model.generate(attention_mask=mask, **given, return_dict_in_generate=True, output_logits=True)
    return output.sequences, torch.stack(output.logits)


@functools.cache
def expected(name, cache, padded):
    return generate(model_of(name), cache, left_padding() if padded else None, input_ids=ids())


@pytest.mark.parametrize("padded", [False, True], ids=["", "left padding"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_greedy_generation_equals_transformers_eager(backend, name, cache, padded):
    model = polyattn_transformers.use(model_of(name), backend)
    mask = left_padding() if padded else None
    if not ZOO[name].needs <= backends.get(backend).abilities:
        with pytest.raises(UnsupportedAttentionError):
            generate(model, cache, mask, input_ids=ids())
        return
    sequences, logits = generate(model, cache, mask, input_ids=ids())
    wanted, want = expected(name, cache, padded)
    assert torch.equal(sequences, wanted)
    assert torch.allclose(logits, want, atol=1e-4)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoders_generate_the_same(name):
    inputs = ZOO[name].inputs()
    inputs.pop("decoder_input_ids")
    mask = inputs.pop("attention_mask", None)
    want = generate(model_of(name), None, mask, **inputs)
    got = generate(polyattn_transformers.use(model_of(name), "sdpa"), None, mask, **inputs)
    assert torch.equal(got[0], want[0])
    assert torch.allclose(got[1], want[1], atol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(name, kind):
    model = model_of(name, "polyattn_sdpa")
    length = {} if kind is DynamicCache else {"max_cache_len": 16}
    cache, row = kind(config=model.config, **length), ids(rows=1)
    with torch.no_grad():
        whole = model(row, use_cache=False).logits
        pieces = [
            model(row[:, start:stop], past_key_values=cache, use_cache=True).logits
            for start, stop in ((0, 4), (4, 10), (10, 11))
        ]
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=2e-5)


@whole_graphs
@pytest.mark.parametrize(
    ("name", "padded", "layers"),
    [("mistral", False, {"num_hidden_layers": 1}), ("gemma3", True, {"num_hidden_layers": 2, "layer_types": KINDS})],
)
def test_a_model_compiles_whole(name, padded, layers):
    model = model_of(name, "polyattn_sdpa", **layers)
    inputs = {"input_ids": ids(), "attention_mask": left_padding() if padded else None, "use_cache": False}
    live = left_padding().bool() if padded else torch.ones(2, 11, dtype=torch.bool)
    want = model(**inputs).logits[live]
    want.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits[live]
    assert torch.allclose(logits, want, atol=2e-5)
    logits.square().mean().backward()
    assert all(torch.allclose(p.grad, gradients[name], atol=1e-5) for name, p in model.named_parameters())


def test_a_graph_knows_the_parts_of_the_model_that_it_is_called_with():
    @torch.compile(backend="eager", fullgraph=True)
    def asked(model, x):
        return x + model.polyattn_parts(id(model)).first_position

    for position in (0, 1):
        model = model_of("llama", num_hidden_layers=1)
        _parts._known[model] = dataclasses.replace(model.polyattn_parts(id(model)), first_position=position)
        assert asked(model, torch.zeros(())) == position


@whole_graphs
def test_packed_batches_compile_to_at_most_two_graphs():
    model = model_of("mistral", "polyattn_sdpa", num_hidden_layers=1)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    row = ids(rows=1)
    with torch.no_grad():
        for lengths in ([11], [5, 6], [3, 2, 6], [1] * 11, [10, 1]):
            logits = compiled(row, **packed(lengths), use_cache=False).logits
            assert torch.allclose(logits, model(row, **packed(lengths), use_cache=False).logits, atol=2e-5)
    assert counter.frame_count <= 2


def test_positions_keep_documents_apart_in_a_compiled_model():
    model, row = model_of("llama", "polyattn_sdpa", num_hidden_layers=1), ids(rows=1)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]])
    inputs = {"position_ids": positions, "attention_mask": torch.ones(1, 11, dtype=torch.long), "use_cache": True}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        logits = compiled(row, **inputs).logits
        assert torch.allclose(logits[:, 3:], model(row[:, 3:]).logits, atol=2e-5)


def test_decoding_with_a_static_cache_compiles_once():
    model, row = model_of("llama", "polyattn_sdpa", num_hidden_layers=1), ids(rows=2)
    cache = StaticCache(config=model.config, max_cache_len=16)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    padding = torch.ones(2, 16, dtype=torch.long)
    padding[0, :3] = 0
    with torch.no_grad():
        model(row[:, :5], past_key_values=cache, attention_mask=padding[:, :5])
        for at in range(5, 9):
            inputs = model.prepare_inputs_for_generation(
                row[:, : at + 1], next_sequence_length=1, past_key_values=cache, attention_mask=padding[:, : at + 1]
            )
            logits = step(**inputs).logits
            want = model(row[:, : at + 1], attention_mask=padding[:, : at + 1], use_cache=False).logits[:, -1:]
            assert torch.allclose(logits, want, atol=2e-5)
    assert counter.frame_count == 1


def test_what_transformers_itself_cannot_compile_says_so_there():
    # Phi-3's longrope chooses its frequencies by the largest position.
    model = torch.compile(model_of("phi3", "polyattn_sdpa"), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="longrope_frequency_update"):
        model(ids())


def test_auto_is_refused_in_a_compiled_model_by_name():
    model = torch.compile(model_of("llama", "polyattn_auto"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="'auto' cannot decide inside a compiled function; name the backend"):
        model(ids())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore")  # the exporter's own, about its experimental state and torch's version
def test_a_decode_step_with_a_static_cache_is_exported(dynamic):
    # The mask that generation made ahead is an input of the exported program.
    exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
    from transformers.exporters.utils import decompose_prefill_decode

    model = model_of("llama", "polyattn_sdpa")
    settings = GenerationConfig(cache_implementation="static", max_cache_len=16, pad_token_id=0, do_sample=False)
    step = decompose_prefill_decode(model, {"input_ids": ids(), "attention_mask": left_padding()}, settings)["decode"][
        1
    ]
    assert isinstance(step["attention_mask"], polyattn_transformers.LayoutMask)
    program = exporters.DynamoExporter().export(model, copy.deepcopy(step), exporters.DynamoConfig(dynamic=dynamic))
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
    with torch.no_grad():
        want = model(**copy.deepcopy(step)).logits
        got = program.module()(**{name: copy.deepcopy(step[name]) for name in names}).logits
    assert torch.allclose(got, want, atol=2e-5)
