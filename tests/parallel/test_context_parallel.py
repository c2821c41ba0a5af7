"""Context parallelism against one process: gloo processes, started once for each number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo"),
]


def run(world, folder, what):
    """What each of so many processes found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, str(SUPPORT / "context_ranks.py")]
    processes = []
    for rank in range(world):
        arguments = [str(rank), str(world), str(folder), what]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=3000 if what == "whole" else 300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(world))
    assert codes == [0] * world, logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def found(request, tmp_path_factory):
    return run(request.param, tmp_path_factory.mktemp("ranks"), "part")


def check_grid(found):
    for rank, results in enumerate(found):
        assert len(results["grid"]) > 150
        wrong = {case: error for case, error in results["grid"].items() if not error <= 1e-13}
        assert not wrong, f"rank {rank}"


def test_every_mask_method_and_balance_equals_one_process_in_output_lse_and_gradients_and_repeats_its_bits(found):
    check_grid(found)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_full_grid_equals_one_process(world, tmp_path):
    check_grid(run(world, tmp_path, "whole"))


@pytest.mark.parametrize(
    "fault, says", [("layout", ""), ("dtype", "torch.float64"), ("method", "ring"), ("backend", "<backend eager>")]
)
def test_ranks_that_ask_for_different_attention_all_raise_one_error_with_each_value(found, fault, says):
    (message,) = {results["disagreements"][fault] for results in found}
    assert message.startswith("ContextParallelError: all ranks must ask for the same attention, they differ in")
    assert f"- {fault}: rank 0 " in message
    assert all(f"rank {rank} " in message for rank in range(len(found)))
    assert says in message


def test_what_cannot_run_is_refused_with_what_to_do_and_the_group_still_works(found):
    for results in found:
        refused = results["disagreements"]
        assert "dropout_p must be 0 under context parallelism, got 0.5" in refused["dropout"]
        assert "take this rank's part of whole sequences by shard.take" in refused["whole tensor"]
        assert "needs a query head for each of" in refused["heads"]
        assert not refused["still works"]


def test_a_rank_that_does_not_come_is_named(found):
    assert "did not come within 0.5 s to prepare attention together" in found[0]["late"]
    assert found[0]["late"].startswith(f"ContextParallelError: ranks {list(range(1, len(found)))} ")


def test_a_model_trains_under_the_scope_as_in_one_process(found):
    for results in found:
        model = results["model"]
        assert model["output"] <= 1e-13
        assert model["gradients"] <= 1e-12
        assert model["builds"] == 2  # with and without a window


def test_positions_and_layouts_that_are_not_the_shards_are_refused(found):
    for results in found:
        assert "positions must be shard.take(positions of the whole" in results["model"]["local positions"]
        assert "layout is none of the shard's" in results["model"]["other layout"]
