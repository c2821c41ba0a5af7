"""Models of every way of attending give the logits and gradients of transformers' eager attention."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import ZOO, live_tokens, model_of

import polyattn_transformers
from polyattn import UnsupportedAttentionError, backends

CPU_BACKENDS = ("eager", "sdpa", "flex_attention")


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


def logits_and_gradients(model, inputs):
    live = live_tokens(inputs)
    logits = model(**inputs).logits[live]
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), gradients


@functools.cache
def expected(name):
    inputs = ZOO[name].inputs()
    return logits_and_gradients(model_of(name), inputs)


def close(got, want):
    return (got - want).abs().max() <= 2e-5 * (1 + want.abs().max())


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "auto"])
def test_logits_and_gradients_equal_transformers_eager_or_are_refused(backend, name):
    zoo, model = ZOO[name], model_of(name, f"polyattn_{backend}")
    inputs = zoo.inputs()
    abilities = zoo.needs if backend == "auto" else zoo.needs - backends.get(backend).abilities
    if backend != "auto" and (abilities or backend == "flex_attention"):
        with pytest.raises(UnsupportedAttentionError) as refusal:
            logits_and_gradients(model, inputs)
        features = {reason.feature for reason in refusal.value.reasons}
        assert abilities <= features
        assert "eager" in refusal.value.alternatives
        return
    logits, gradients = logits_and_gradients(model, inputs)
    want, wanted = expected(name)
    if backend == "eager" and "sinks" not in zoo.needs:
        assert torch.equal(logits, want)
    assert close(logits, want)
    assert gradients.keys() == wanted.keys()
    assert [key for key in wanted if not close(gradients[key], wanted[key])] == []


@pytest.mark.parametrize("name", [name for name, zoo in ZOO.items() if not zoo.needs & {"sinks"}])
def test_flex_attention_serves_inference(name):
    model, inputs = model_of(name, "polyattn_flex_attention"), ZOO[name].inputs()
    with torch.no_grad():
        logits = model(**inputs).logits[live_tokens(inputs)]
    assert close(logits, expected(name)[0])


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "t5"])
def test_every_layer_runs_on_the_backend(name, monkeypatch):
    # Softcap, sinks and a bias must reach the kernel; logits alone would not show a model that stayed where it was.
    seen = []
    eager = backends.get("eager")
    prepare = type(eager).prepare
    monkeypatch.setattr(
        type(eager), "prepare", lambda self, layout, request: seen.append(request) or prepare(self, layout, request)
    )
    with torch.no_grad():
        model_of(name, "polyattn_eager")(**ZOO[name].inputs())
    feature = {"gemma2": "softcap", "gpt_oss": "has_sinks", "t5": "has_bias"}[name]
    assert seen
    assert all(getattr(request, feature) for request in seen)
