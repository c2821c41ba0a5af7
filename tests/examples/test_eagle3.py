"""The EAGLE-3 draft: its forms agree, its keys are projected once, it learns, and an engine can serve it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from polyattn import AttentionSpec, MaskLayout, check_servable

# It is not a part of the workspace, so it is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "eagle3"))

import eagle3
from eagle3 import SPEC, Draft, draft_loss, step_layout

FORMS = {
    "dense": lambda layout: MaskLayout.dense(layout.to_dense()),
    "mask_mod": lambda layout: MaskLayout.from_mod(
        layout.to_mask_mod(), q_len=layout.q_len, kv_len=layout.kv_len, batch=layout.batch
    ),
}


def test_a_query_sees_the_first_step_up_to_its_place_and_its_own_place_of_the_others():
    valid = torch.tensor([[True, True, True, False]])
    assert step_layout(4, 2, valid).draw().splitlines() == [
        "#---#---#---",
        "##---#---#--",
        "###---#---#-",
        "------------",
    ]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_union_equals_the_dense_form_and_the_function_in_values_and_gradients(backend, padded):
    torch.manual_seed(0)
    draft = Draft(backend).double()
    tokens = torch.randint(256, (2, 24))
    features, target = torch.randn(2, 24, 192, dtype=torch.float64), torch.randn(2, 24, 256, dtype=torch.float64)
    valid = torch.arange(24)[None] < torch.tensor([[24], [17]]) if padded else None

    def run(form):
        loss, _ = draft_loss(list(draft(tokens, features, valid=valid, form=form)), target, valid)
        return loss, torch.autograd.grad(loss, list(draft.parameters()))

    loss, grads = run(None)
    for form in FORMS.values():
        other, other_grads = run(form)
        torch.testing.assert_close(other, loss)
        for one, two in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(one, two)


def test_seven_steps_project_seven_keys():
    draft = Draft("sdpa")
    calls = []
    draft.attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    list(draft(torch.zeros(1, 12, dtype=torch.long), torch.randn(1, 12, 192)))
    assert len(calls) == eagle3.STEPS == 7


def test_a_draft_learns_from_real_text():
    curve = [loss for loss, _ in eagle3.train(12, eagle3.trained_target(12, "sdpa"), "sdpa")]
    assert curve[-1] < 0.85 * curve[0]


def test_an_engine_can_serve_it_and_reads_back_what_was_written():
    assert check_servable(SPEC, "sglang_eagle") == ()
    written = SPEC.to_hf("llama", serving_target="sglang_eagle")
    assert AttentionSpec.from_hf(written, convention="eagle") == SPEC


def test_the_program_prints_a_loss_curve():
    result = CliRunner().invoke(eagle3.main, ["--steps", "2"])
    assert result.exit_code == 0, result.output
    assert result.output.count("loss") == 2
    assert "LlamaForCausalLMEagle3" in result.output
