from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from tiny_lm import config
from tiny_lm.cli import commands
from tiny_lm.train import Run

CONFIG = Path(__file__).parents[2] / "examples/tiny_lm/configs/flex.yaml"


def _refused(path, out):
    result = CliRunner().invoke(commands, ["train", str(path), "--out", str(out)])
    assert result.exit_code == 2
    assert not out.exists(), "something was written before the refusal"
    return " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the config runs here: there is a GPU")
def test_without_a_gpu_the_command_ends_before_anything_is_written(tmp_path):
    text = _refused(CONFIG, tmp_path / "out")
    assert "backend 'flex_attention' cannot do this attention" in text
    assert "device: got cuda without a GPU that torch can use, need a CUDA GPU" in text


def test_on_a_cpu_the_command_ends_with_the_reason_and_what_to_do(tmp_path, write_config):
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    text = _refused(write_config({**settings, "device": "cpu"}), tmp_path / "out")
    assert "grad: got needs_grad=True, need a backend with the ability 'grad'" in text
    assert "inference only" in text
    assert "backend_options {compiled: false} runs it uncompiled" in text


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
def test_uncompiled_it_trains_on_a_cpu_with_the_losses_of_eager():
    losses = {}
    for backend, options in (("eager", {}), ("flex_attention", {"compiled": False})):
        settings = config.load(CONFIG, attn_backend=backend)
        small = {
            "attention": dataclasses.replace(settings.attention, backend_options=options, hidden_size=64),
            "device": "cpu",
            "model": dataclasses.replace(settings.model, layers=2, hidden_size=64),
            "data": config.DataConfig(rows=2, row_length=96),
        }
        run = Run(dataclasses.replace(settings, **small))
        losses[backend] = [run.step() for _ in range(3)]
    assert losses["flex_attention"] == pytest.approx(losses["eager"], abs=1e-2)
