"""``polyattn plan``: the plan of context parallelism on the command line."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from polyattn import AttentionRequest, MaskLayout
from polyattn_cli import cli
from polyattn_context_parallel import plan


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def test_it_prints_the_plan_of_the_function():
    result = run(
        "packed", "--lengths", "40,24,64", "--ranks", 4, "--heads", 4, "--kv-heads", 2, "--balance", "documents"
    )
    request = AttentionRequest(
        batch=1, heads=4, kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32, device=torch.device("cpu")
    )
    found = plan(MaskLayout.packed([40, 24, 64]), 4, request=request, balance="documents")
    assert result.output == f"causal, packed documents, 128 queries x 128 keys\n{found}\n"


def test_json_counts_what_the_text_counts():
    told = json.loads(run("causal", "--q-len", 64, "--ranks", 4, "--node", 2, "--window", 8, "--json").output)
    assert sum(told["pairs"]) == int(MaskLayout.causal(64, window=8).to_dense().sum())
    assert sum(told["tokens"]) == 64
    assert {cost["method"] for cost in told["costs"]} == {"all-gather", "gather", "ring", "ulysses"}
    assert all(cost["sent"] > 0 for cost in told["costs"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--method", "x"], "method must be auto, gather, ulysses or ring, got 'x'"),
        (["--balance", "x"], "balance must be"),
        (["--method", "ulysses", "--ranks", "16", "--heads", "8"], "ulysses needs a query head for each of 16 ranks"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(options, text):
    result = run("causal", "--ranks", 4, *options)
    assert (result.exit_code, text in result.output) == (2, True), result.output


def test_a_missing_distribution_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "polyattn_context_parallel", None)
    result = run("causal", "--ranks", 4)
    assert "`pip install polyattn-context-parallel` brings it" in result.output
