"""A whole decoder: what a forward builds, and that every way of running it gives the same numbers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from decoder import LENGTH, SEGMENTATIONS, Decoder, batch_of, config_of
from polyattn import AttentionScope, MaskLayout, backends


def decoder(backend="sdpa", seed=0, **changes):
    torch.manual_seed(seed)
    return Decoder(config_of(backend, **changes))


def gradients(model, *batch):
    model.zero_grad()
    model(*batch).sin().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


BATCH = batch_of(SEGMENTATIONS[0])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_forward_builds_one_mask_and_one_table_per_group_whatever_the_number_of_layers(backend):
    for layers in (2, 6):
        torch.manual_seed(0)
        model = Decoder(config_of(backend), layers)
        gradients(model, *BATCH)
        assert model.builds == {"attention": 2, "rotary": 2}


def test_backends_of_groups_are_part_of_what_is_distinct():
    model = decoder(groups=[{"layers": "1::2", "attn_backend": "eager"}, {"layers": [3], "window": 4}])
    model(*BATCH)
    assert [layer.attention.backend.name for layer in model.layers] == ["sdpa", "eager", "sdpa", "sdpa"]
    assert model.builds == {"attention": 3, "rotary": 1}


def test_backends_agree_on_logits_and_gradients():
    eager, sdpa = decoder("eager"), decoder("sdpa")
    torch.testing.assert_close(eager(*BATCH), sdpa(*BATCH), rtol=1e-5, atol=1e-5)
    close(gradients(sdpa, *BATCH), gradients(eager, *BATCH))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    model = decoder()
    want = gradients(model, *BATCH)
    model.checkpoint = reentrant
    close(gradients(model, *BATCH), want)
    assert model.builds == {"attention": 2, "rotary": 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_works_without_a_prefilled_scope(reentrant):
    model = decoder()
    want = gradients(model, *BATCH)
    for layer in model.layers:
        layer.attention.fill = lambda *args: None
    model.checkpoint = reentrant
    close(gradients(model, *BATCH), want)


def test_gradients_accumulate_over_batches():
    model = decoder()
    want = [gradients(model, *batch_of(lengths, seed)) for seed, lengths in enumerate(SEGMENTATIONS[:2])]
    model.zero_grad()
    losses = [model(*batch_of(lengths, seed)).sin().sum() for seed, lengths in enumerate(SEGMENTATIONS[:2])]
    for loss in losses:  # both forwards before any backward
        loss.backward()
    summed = {name: parameter.grad for name, parameter in model.named_parameters()}
    close(summed, {name: want[0][name] + want[1][name] for name in want[0]})


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.nightly), "sdpa"])
def test_compiled_whole_it_is_at_most_two_graphs_over_eight_segmentations(backend):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    model = decoder(backend)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for seed, lengths in enumerate(SEGMENTATIONS):
        batch = batch_of(lengths, seed)
        torch.testing.assert_close(compiled(*batch), model(*batch), rtol=1e-5, atol=1e-5)
    assert len(graphs) <= 2
    settled = len(graphs)
    for seed, lengths in enumerate(SEGMENTATIONS[:4]):  # fresh tensors and layouts of shapes that were seen
        compiled(*batch_of(lengths, seed + 8))
    assert len(graphs) == settled


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_compiled_whole_it_has_the_same_gradients(backend):
    torch.manual_seed(0)
    model = Decoder(config_of(backend), layers=2)
    want = gradients(model, *BATCH)
    torch._dynamo.reset()
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(*BATCH).sin().sum().backward()
    close({name: parameter.grad for name, parameter in model.named_parameters()}, want)


def test_compiled_whole_with_activation_checkpointing_it_has_the_same_gradients():
    torch.manual_seed(0)
    model = Decoder(config_of("sdpa"), layers=2)
    want = gradients(model, *BATCH)
    model.checkpoint = False
    torch._dynamo.reset()
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(*BATCH).sin().sum().backward()
    close({name: parameter.grad for name, parameter in model.named_parameters()}, want)


class FromIds(torch.nn.Module):
    """What ``torch.export`` takes: tensors in, layout and scope inside."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, document_ids, positions):
        return self.model(tokens, MaskLayout.packed(document_ids=document_ids, validate=False), positions)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_wrapper_that_builds_its_layout_from_tensors_can_be_exported(backend):
    torch.manual_seed(0)
    wrapped = FromIds(Decoder(config_of(backend), layers=2).eval())
    ids = torch.tensor([[0] * 4 + [1] * 12, [0] * 16])
    tokens, _, positions = batch_of([[4, 12], [16]])
    with torch.no_grad():
        program = torch.export.export(wrapped, (tokens, ids, positions))
        other = torch.tensor([[0] * 9 + [1] * 7, [0] * 2 + [1] * 14])
        want = wrapped.model(tokens, MaskLayout.packed(document_ids=other), positions)
        torch.testing.assert_close(program.module()(tokens, other, positions), want, rtol=1e-5, atol=1e-5)


def test_functional_transforms_work_on_eager():
    model = decoder("eager").double()
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, BATCH).sin().sum()

    got = torch.func.grad(loss)(parameters)
    want = dict(zip(parameters, torch.autograd.grad(loss(parameters), parameters.values()), strict=True))
    close(got, want)


def test_deepcopy_and_pickle_give_the_same_logits():
    model = decoder()
    want = model(*BATCH)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(*BATCH), want)
        assert twin.layers[0].attention.kind.name == model.layers[0].attention.kind.name


def test_a_scope_keeps_nothing_alive_after_the_forward():
    model = decoder()
    gc.collect()
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        tokens, layout, positions = batch_of(SEGMENTATIONS[1])
        scope = AttentionScope(layout)
        hidden = model.embedding(tokens)
        for layer in model.layers:
            layer.attention.fill(scope, hidden, positions)
            hidden = layer(hidden, scope, positions)
        hidden.sum().backward()
        tables = scope.rotary(model.layers[0].attention.rotary, positions)
        alive = [weakref.ref(x) for x in (scope, layout, positions, tables.cos, *scope.kept("attention"))]
        del scope, layout, positions, tables, hidden
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_another_backend_is_a_call_away():
    model = decoder("eager")
    want = model(*BATCH)
    for layer in model.layers:
        layer.attention.set_backend(backends.get("sdpa"))
    torch.testing.assert_close(model(*BATCH), want, rtol=1e-5, atol=1e-5)


def test_layers_with_the_same_numbers_in_other_objects_still_share():
    first, second = decoder(), pickle.loads(pickle.dumps(decoder()))
    tokens, layout, positions = BATCH
    scope, hidden = AttentionScope(layout), first.embedding(tokens)
    for model in (first, second):
        for layer in model.layers:
            layer.attention(hidden, scope, positions)
    assert scope.builds == {"attention": 2, "rotary": 2}


def test_inference_mode_and_training_take_turns():
    model = decoder()
    want = gradients(model, *BATCH)
    with torch.inference_mode():
        before = model(*BATCH)
    close(gradients(model, *BATCH), want)
    with torch.no_grad():
        assert torch.equal(model(*BATCH), before)
    assert before.shape == (2, LENGTH, 50)
