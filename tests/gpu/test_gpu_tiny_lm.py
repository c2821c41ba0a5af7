"""tiny_lm trains from configs/fa.yaml on a GPU as it does with eager."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from polyattn_fa2 import FlashBackend

CONFIG = Path(__file__).parents[2] / "examples/tiny_lm/configs/fa.yaml"


def test_ten_steps_have_the_losses_of_eager(device):
    config = pytest.importorskip("tiny_lm.config")
    from tiny_lm.train import Run

    reasons = FlashBackend().device_reasons(device)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    losses = {}
    for backend in ("eager", "fa"):
        run = Run(dataclasses.replace(config.load(CONFIG, attn_backend=backend), steps=10))
        losses[backend] = [run.step() for _ in range(10)]
    assert losses["fa"] == pytest.approx(losses["eager"], abs=1e-2)
    assert losses["fa"][-1] < losses["fa"][0]
