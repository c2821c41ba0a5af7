"""TRL's supervised fine-tuning with polyattn's attention: one word of its configuration, no code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

needs = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: run `make trainers`"),
    pytest.mark.nightly,
]
pytestmark = needs

STEPS = 5


def losses(brought, folder, launcher=(), **changes):
    """The losses of a run in a process of its own, from the trainer's own record."""
    folder.mkdir()
    config = {
        "model_name_or_path": str(brought / "model"),
        "datasets": [{"path": "json", "data_files": str(brought / "data.jsonl"), "split": "train"}],
        "packing": True,
        "max_length": 128,
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "save_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        sys.executable,
        *launcher,
        "-m",
        "polyattn_transformers",
        "-m",
        "trl.scripts.sft",
        "--config",
        "run.yaml",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("polyattn: registered polyattn_eager") == 1
    state = json.loads((folder / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize("extra", [{}, {"use_peft": True, "lora_r": 4}], ids=["full", "LoRA"])
def test_packed_documents_give_the_losses_of_transformers_eager(brought, tmp_path, extra):
    if extra and importlib.util.find_spec("peft") is None:
        pytest.skip("needs PEFT: run `make trainers`")
    want = losses(brought, tmp_path / "eager", attn_implementation="eager", **extra)
    got = losses(brought, tmp_path / "polyattn", attn_implementation="polyattn_sdpa", **extra)
    assert len(got) == STEPS
    assert want[-1] < want[0]
    assert got == pytest.approx(want, rel=1e-5)


def test_two_processes_of_torchrun_print_one_line_and_agree(brought, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    want = losses(brought, tmp_path / "eager", launcher, attn_implementation="eager")
    got = losses(brought, tmp_path / "polyattn", launcher, attn_implementation="polyattn_sdpa")
    assert got == pytest.approx(want, rel=1e-5)
