"""The DFlash draft: its forms agree, tables are built once, it learns, writes the target's text, and can be served."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from polyattn import AttentionScope, AttentionSpec, MaskLayout, check_servable

# It is not a part of the workspace, so it is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "dflash"))

import dflash
from dflash import BLOCK, CONFIG, LAYERS, Draft, Target, draft_loss, speculate

SPECS = [CONFIG.layer(index).spec for index in range(LAYERS)]


def made(backend="sdpa"):
    """An untrained target and its draft, of two rows of text, in FP64."""
    torch.manual_seed(0)
    target = Target(backend).double().requires_grad_(False)
    return target, Draft(target, backend).double(), torch.randint(256, (2, 48))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_trees_equal_the_dense_form_in_values_and_gradients(backend):
    target, draft, tokens = made(backend)
    anchors = torch.tensor([[1, 30, 12], [39, 7, 7]])
    wanted, features = target(tokens)

    def run(form):
        scores = draft(tokens.gather(1, anchors), anchors, draft.context(features), form=form)
        return scores, torch.autograd.grad(draft_loss(scores, tokens, anchors, wanted)[0], list(draft.parameters()))

    (scores, grads), (dense, dense_grads) = run(None), run(lambda layout: MaskLayout.dense(layout.to_dense()))
    torch.testing.assert_close(scores, dense)
    for one, two in zip(grads, dense_grads, strict=True):
        torch.testing.assert_close(one, two)


def test_sliding_and_full_layers_share_one_scope_and_build_a_layout_and_a_table_each(monkeypatch):
    target, draft, tokens = made()
    scopes = []

    def kept(*args, **rest):
        scopes.append(AttentionScope(*args, **rest))
        return scopes[-1]

    context = draft.context(target(tokens)[1])
    monkeypatch.setattr(dflash, "AttentionScope", kept)
    draft(tokens[:, 20:21], torch.tensor([[20], [20]]), context)
    (scope,) = scopes
    assert scope.builds == {"attention": 2, "rotary": 1}
    assert [spec.layout for spec in SPECS] == ["sliding", "sliding", "full"]


def test_a_block_is_filled_alone_as_among_others():
    target, draft, tokens = made()
    anchors = torch.tensor([[9, 33], [9, 33]])
    _, features = target(tokens)
    among = draft(tokens.gather(1, anchors), anchors, draft.context(features))
    alone = draft(tokens[:, 33:34], anchors[:, 1:], draft.context(features[:, :33]))
    torch.testing.assert_close(alone[:, 0], among[:, 1])


def test_what_is_drafted_is_what_the_target_writes_by_itself():
    target, draft, tokens = made()
    text = tokens[:1, :6]
    drafted, forwards = speculate(target, draft, text, 12)
    for _ in range(12):
        text = torch.cat([text, target(text)[0][:, -1:].argmax(-1)], 1)
    assert drafted.tolist() == text.tolist()
    assert 12 / BLOCK <= forwards <= 12


def test_a_draft_learns_from_real_text():
    target = dflash.trained_target(20, "sdpa")
    torch.manual_seed(1)
    curve = [loss for loss, _ in dflash.train(40, Draft(target, "sdpa"), target)]
    assert sum(curve[-10:]) / 10 < 0.95 * sum(curve[:5]) / 5


def test_an_engine_can_serve_it_and_reads_back_what_was_written():
    written = CONFIG.to_hf("qwen3", layers=LAYERS)
    assert written["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    for index, spec in enumerate(SPECS):
        assert check_servable(spec, "sglang_dflash") == ()
        read = AttentionSpec.from_hf(written, layer=index, convention="dflash")
        assert dataclasses.replace(read, layout=spec.layout) == spec


def test_the_program_prints_a_loss_curve_and_a_text():
    result = CliRunner().invoke(dflash.main, ["--steps", "2"])
    assert result.exit_code == 0, result.output
    assert result.output.count("loss") == 2
    assert "40 bytes in" in result.output
