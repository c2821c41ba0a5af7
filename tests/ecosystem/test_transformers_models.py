"""Models of every way of attending give the logits and gradients of transformers' eager attention."""

from __future__ import annotations

import functools

import pytest
import torch

import polyattn_transformers
from polyattn import FEATURES, UnsupportedAttentionError, backends
from tiny_models import ZOO, live_tokens, model_of


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


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(
    ("backend", "options"), [("eager", {}), ("sdpa", {}), ("auto", {}), ("flex_attention", {"compiled": False})]
)
def test_logits_and_gradients_equal_transformers_eager_or_are_refused(backend, options, name):
    zoo = ZOO[name]
    model, inputs = polyattn_transformers.use(model_of(name), backend, options), zoo.inputs()
    abilities = frozenset(FEATURES) if backend == "auto" else backends.resolve(backend, options).abilities
    if zoo.needs - abilities:
        backends.get("eager")  # only what is loaded is asked
        with pytest.raises(UnsupportedAttentionError) as refusal:
            logits_and_gradients(model, inputs)
        assert zoo.needs - abilities <= {reason.feature for reason in refusal.value.reasons}
        assert "eager" in refusal.value.alternatives
        return
    logits, gradients = logits_and_gradients(model, inputs)
    want, wanted = expected(name)
    # Beside a bias keys are copied, and some CPUs' products depend on where their operands lie.
    if backend == "eager" and not {"sinks", "bias"} & zoo.needs:
        assert torch.equal(logits, want)
    assert close(logits, want)
    assert gradients.keys() == wanted.keys()
    assert [key for key in wanted if not close(gradients[key], wanted[key])] == []


def test_compiled_flex_attention_serves_inference_and_refuses_training():
    model, inputs = model_of("mistral", "polyattn_flex_attention"), ZOO["mistral"].inputs()
    with torch.no_grad():
        logits = model(**inputs).logits[live_tokens(inputs)]
    assert close(logits, expected("mistral")[0])
    backends.get("sdpa")  # only what is loaded is asked
    with pytest.raises(UnsupportedAttentionError, match="grad") as refusal:
        model(**inputs)
    assert "sdpa" in refusal.value.alternatives


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
