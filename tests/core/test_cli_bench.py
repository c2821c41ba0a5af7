"""``polyattn bench``: whom it times, whom it does not and why. How long anything takes is asserted nowhere."""

from __future__ import annotations

import json

import pytest

import polyattn
from command_line import runner
from polyattn_cli import cli

TINY = ["--q-len", "8", "--heads", "2", "--head-dim", "8", "--rounds", "1"]


def bench(*arguments):
    return runner().invoke(cli, ["bench", *map(str, arguments)], prog_name="polyattn")


def report(*arguments, status=0):
    result = bench(*arguments, "--json")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


class Stub(polyattn.BackendBase):
    """Remembers what it was asked to do."""

    name = "stub"
    abilities = frozenset({"float32", "full", "causal"})

    def __init__(self):
        super().__init__()
        self.calls = []

    def plan(self, layout, request):
        self.calls.append(f"{self.name} prepare")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        self.calls.append(f"{self.name} attend")
        return polyattn.AttentionResult(q.new_zeros(*q.shape[:3], v.shape[3]))


@pytest.fixture
def stub():
    stub = Stub()
    with polyattn.backends.override("stub", stub):
        yield stub


def test_every_backend_that_can_is_timed_and_the_others_tell_why_not():
    said = report("causal", *TINY, "--grad")
    assert set(said["backends"]) | set(said["refused"]) == set(polyattn.backends.names())
    assert {"eager", "sdpa"} <= set(said["backends"])
    assert {"code", "feature", "got", "need", "hint"} == set(said["refused"]["fa"][0])
    assert said["layout"] == "causal, 8 queries x 8 keys"
    assert (said["request"]["needs_grad"], said["request"]["dtype"], said["rounds"]) == (True, "torch.float32", 1)


def test_a_run_has_medians_of_call_and_preparation_a_ratio_and_what_ran():
    (run,) = report("causal", *TINY, "--backend", "sdpa")["backends"].values()
    assert set(run) == {"call_ms", "prepare_ms", "ratio", "runs"}
    assert run["ratio"] == 1.0
    assert "scaled_dot_product_attention" in run["runs"]


def test_named_backends_keep_their_order_and_the_first_is_the_measure():
    said = report("full", *TINY, "--backend", "sdpa", "--backend", "eager")
    assert list(said["backends"]) == ["sdpa", "eager"]
    assert said["relative_to"] == "sdpa"
    said = report("full", *TINY, "--backend", "sdpa", "--relative-to", "eager")
    assert said["relative_to"] == "eager"
    assert said["backends"]["eager"]["ratio"] == 1.0


def test_rounds_go_through_the_backends_in_turn_after_one_that_warms_up(stub):
    with polyattn.backends.override("other", type("Other", (Stub,), {"name": "other"})()) as other:
        other.calls = stub.calls
        report("full", *TINY, "--rounds", 2, "--backend", "stub", "--backend", "other")
    assert stub.calls == ["stub prepare", "stub attend", "other prepare", "other attend"] * 3


def test_a_named_backend_that_cannot_is_status_1_with_its_reasons(stub):
    result = bench("causal", *TINY, "--window", 3, "--backend", "stub", "--backend", "eager")
    assert result.exit_code == 1
    assert "stub: cannot\n  - window: got window 3, need a backend with the ability 'window'" in result.stdout
    assert "eager" in result.stdout.partition("stub: cannot")[0]
    assert stub.calls == []


def test_a_backend_that_fails_while_it_runs_is_told_and_the_others_are_timed(stub):
    stub.plan = None
    said = report("causal", *TINY, "--backend", "stub", "--backend", "eager", status=1)
    assert said["backends"]["stub"]["error"].startswith("TypeError: ")
    assert said["relative_to"] == "eager"
    assert "stub: failed\n  - TypeError: " in bench("causal", *TINY, "--backend", "stub").stdout


def test_when_nobody_can_the_status_is_1_and_every_reason_is_told(monkeypatch):
    monkeypatch.setenv("POLYATTN_ALLOW", "polyattn-fa2")
    result = bench("causal", *TINY)
    assert result.exit_code == 1
    assert "fa: cannot\n  - device: got cpu" in result.stdout
    assert "eager: cannot\n  - plugin: " in result.stdout


def test_every_feature_of_a_request_is_run():
    scores = ["--bias-grad", "--sinks", "--lse-grad", "--softcap", 5, "--scale", 0.3, "--training", "--dropout", 0.1]
    sizes = ["--lengths", "3,0", *TINY, "--kv-heads", 1, "--v-head-dim", 4]
    said = report("padded", *sizes, *scores, "--backend", "eager")
    assert "call_ms" in said["backends"]["eager"]
    asked = said["request"]
    assert all(asked[feature] for feature in ("has_bias", "has_sinks", "needs_lse", "needs_grad"))
    assert (asked["batch"], asked["v_head_dim"]) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["causal", "--backend", "sdap"], "did you mean 'sdpa'?"),
        (["causal", "--relative-to", "sdap"], "did you mean 'sdpa'?"),
        (
            ["causal", "--relative-to", "fa"],
            "--relative-to must name a backend that can do this, got 'fa': device: got cpu",
        ),
        (["causal", "--backend", "eager", "--device", "meta"], "nothing is computed on meta"),
        (["causal", "--rounds", "0"], "0 is not in the range x>=1"),
        (["packed"], "the layout packed needs --lengths"),
        (["padded", "--lengths", "3,2", "--batch", "3"], "must be the 2 batch rows of the layout, got 3"),
        (["causal", "--q-len", "64", "--batch", "99999999999"], "Invalid value for '--batch': 99999999999 is not in"),
        (["causal", "--heads", "99999999999"], "Invalid value for '--heads': 99999999999 is not in"),
        (["causal", "--q-len", "64", "--batch", "2147483647", "--backend", "eager"], "and --batch is 2147483647; give"),
        (
            ["full", "--q-len", "2147483647", "--head-dim", "65536", "--backend", "eager"],
            "must fit into the memory of cpu, and the number of queries is 2147483647; give a smaller one",
        ),
        (["causal", "--backend", "eager", "--device", "xpu:7"], "Invalid value for --device: xpu:7: "),
    ],
)
def test_bad_input_is_one_message_with_status_2(arguments, said):
    result = bench(*arguments)
    assert result.exit_code == 2, result.stderr
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""
