"""Every shipped config that a CPU can run trains."""

from pathlib import Path

import pytest
import torch

from polyattn import AttentionScope
from tiny_lm import config
from tiny_lm.train import Run

CONFIGS = Path(__file__).parents[2] / "examples/tiny_lm/configs"


@pytest.fixture(params=["qk_norm", "windows"])
def run(request):
    return Run(config.load(CONFIGS / f"{request.param}.yaml"))


def test_a_few_steps_lower_the_loss(run):
    losses = [run.step() for _ in range(4)]
    assert losses[-1] < losses[0] - 0.3
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())


def test_groups_build_one_mask_and_one_table_each(monkeypatch):
    from tiny_lm import model

    scopes = []

    class Recorded(AttentionScope):
        def __init__(self, layout):
            super().__init__(layout)
            scopes.append(self)

    monkeypatch.setattr(model, "AttentionScope", Recorded)
    run = Run(config.load(CONFIGS / "windows.yaml"))
    run.step()
    assert [layer.attention.spec.window for layer in run.model.layers] == [64, 64, 64, None]
    assert [layer.attention.spec.rope.variant for layer in run.model.layers] == ["default"] * 3 + ["yarn"]
    assert [scope.builds for scope in scopes] == [{"attention": 2, "rotary": 2}]


def test_a_norm_is_part_of_every_layer():
    run = Run(config.load(CONFIGS / "qk_norm.yaml"))
    assert all(layer.attention.q_norm.weight.shape == (32,) for layer in run.model.layers)
