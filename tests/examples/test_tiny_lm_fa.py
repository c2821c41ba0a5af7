from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fa_stand_in import stand_in
from tiny_lm import config
from tiny_lm.cli import commands
from tiny_lm.train import Run

CONFIG = Path(__file__).parents[2] / "examples/tiny_lm/configs/fa.yaml"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the config runs here: there is a GPU")
def test_without_a_gpu_the_command_ends_with_every_reason_before_anything_is_written(tmp_path):
    result = CliRunner().invoke(commands, ["train", str(CONFIG), "--out", str(tmp_path / "out")])
    text = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "backend 'fa' cannot do this attention" in text
    assert "device: got cuda without a GPU that torch can use, need a CUDA GPU" in text
    assert not (tmp_path / "out").exists()


def test_ten_steps_under_bf16_autocast_have_the_losses_of_eager():
    losses = {}
    for backend in ("eager", "fa"):
        settings = config.load(CONFIG, attn_backend=backend)
        small = {
            "attention": dataclasses.replace(settings.attention, hidden_size=64),
            "device": "cpu",
            "model": dataclasses.replace(settings.model, layers=2, hidden_size=64),
            "data": config.DataConfig(rows=2, row_length=96),
        }
        with stand_in("flash_attn") as calls:
            run = Run(dataclasses.replace(settings, **small))
            losses[backend] = [run.step() for _ in range(10)]
        assert len(calls.forward) == len(calls.backward) == (20 if backend == "fa" else 0)
        assert all(call["q"].dtype is torch.bfloat16 for call in calls.forward)
    assert losses["fa"] == pytest.approx(losses["eager"], abs=1e-2)
    assert losses["fa"][-1] < losses["fa"][0] - 0.5
