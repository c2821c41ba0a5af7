"""The decoder under DDP and FSDP2, as two processes on the loopback interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "two_ranks.py", str(rank), folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_logits_and_averaged_gradients_are_those_of_one_process(found, wrapper):
    for rank in found:
        assert rank[wrapper]["logits"] < 1e-5
        assert rank[wrapper]["gradients"] < 1e-4


def test_under_mixed_precision_layers_attend_in_bf16_and_tables_stay_fp32(found):
    for rank in found:
        seen = rank["mixed precision"]
        assert seen["tables"] == ["torch.float32"]
        assert seen["requests"] == ["torch.bfloat16"]
        assert seen["one scope"]
        assert seen["builds"] == {"attention": 2, "rotary": 2}
        assert seen["logits"] < 0.05
        assert seen["gradients"] < 0.5


def test_sharded_on_meta_and_walked_nothing_stays_uninitialised(found):
    for rank in found:
        assert all(rank["meta"].values()), rank["meta"]
