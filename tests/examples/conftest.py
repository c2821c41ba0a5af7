"""A run so small that a step takes milliseconds."""

from __future__ import annotations

import copy

import pytest
import yaml
from click.testing import CliRunner

SETTINGS = {
    "attn_backend": "sdpa",
    "rope": {
        "schema_version": 1,
        "variant": "default",
        "theta": 10000.0,
        "head_dim": 8,
        "rotary_dim": 8,
        "interleaved": False,
        "max_position": 96,
        "original_max_position": None,
        "parameters": {},
        "axes": None,
    },
    "model": {"layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48},
    "data": {"rows": 2, "row_length": 96},
    "optimiser": {"learning_rate": 0.003, "weight_decay": 0.1, "warmup": 3},
    "steps": 6,
    "seed": 3,
    "checkpoint_every": 2,
}


@pytest.fixture
def settings():
    """A fresh copy, to be changed."""
    return copy.deepcopy(SETTINGS)


@pytest.fixture
def tiny_lm():
    """The command line, in this process."""
    from tiny_lm.cli import commands

    def invoke(*arguments):
        return CliRunner().invoke(commands, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def write_config(tmp_path):
    def write(settings, name="run.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return path

    return write
