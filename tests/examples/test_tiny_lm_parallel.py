"""tiny_lm in several processes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from polyattn import ConfigError
from tiny_lm import config
from tiny_lm.report import Report
from tiny_lm.train import Run

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo"
)


@needs_gloo
@pytest.mark.slow
def test_two_processes_share_the_tokens_and_give_the_losses_of_one(tiny_lm, settings, write_config, tmp_path):
    path = write_config(settings | {"context_parallel": {"mesh": "cp", "method": "auto"}, "steps": 3})
    result = tiny_lm("parallel", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    one, several = (Report.read(tmp_path / "out" / name) for name in ("one", "several"))
    assert (one.processes, several.processes) == (1, 2)
    assert several.losses == pytest.approx(one.losses, abs=2e-6)
    assert (tmp_path / "out" / "loss.png").stat().st_size
    assert sorted(file.name for file in (tmp_path / "out" / "several").iterdir()) == [
        ".lock",
        "checkpoint.pt",
        "report.json",
    ]


def test_the_comparison_needs_a_config_that_sets_context_parallel(tiny_lm, settings, write_config, tmp_path):
    result = tiny_lm("parallel", write_config(settings), "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "context_parallel must be set in the config, got none" in result.output


def test_several_processes_without_it_are_refused(settings, write_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="context_parallel must be set for 2 processes"):
        Run(config.load(write_config(settings)))
