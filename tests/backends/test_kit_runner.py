"""What the kit says of backends that can do little, live elsewhere, or are only partly right."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import polyattn_conformance
from polyattn import (
    AttentionRequest,
    AttentionResult,
    ConfigError,
    MaskLayout,
    PolyattnError,
    PreparedAttention,
    Reason,
    UnsupportedAttentionError,
    attention,
    backends,
)
from polyattn.testing import check_backend
from polyattn_cli.check import check as check_command
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, evaluate, make_case
from polyattn_conformance.checks import CHECKS
from polyattn_conformance.runner import EXPECTED, FAILED, LEFT_OUT, PASSED, REFUSED
from polyattn_eager import EagerBackend

FORWARD_ONLY = frozenset({"float32", "full", "causal"})


class Small(EagerBackend):
    """Can do plain FP32 inference only."""

    name = "small"
    abilities = FORWARD_ONLY


class Elsewhere(EagerBackend):
    """Lives on a device that is absent."""

    name = "elsewhere"
    abilities = frozenset({"bfloat16", "full", "causal", "grad"})

    def device_reasons(self, device):
        return (Reason("no_device", "device", str(device), "an abacus"),)


class Stranger:
    """Follows the protocol and nothing else: no base class, no abilities."""

    name = "stranger"
    api_version = 1

    def unsupported(self, layout, request):
        if request.needs_grad or request.needs_lse or request.has_bias or request.has_sinks or request.softcap:
            return (Reason("only_output", "lse", "more than a plain output", "a plain output"),)
        return ()

    def prepare(self, layout, request):
        if reasons := self.unsupported(layout, request):
            raise UnsupportedAttentionError(self.name, reasons)
        return PreparedAttention(self, layout, request, EagerBackend().prepare(layout, request))

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return AttentionResult(prepared.state(q, k, v).output)


class ForgetfulStranger(Stranger):
    """Has no window and does not say so."""

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        layout = prepared.layout.full(prepared.layout.q_len, prepared.layout.kv_len)
        return AttentionResult(EagerBackend().prepare(layout, prepared.request)(q, k, v).output)


def _outcomes(backend, only="*", **kwargs):
    return {outcome.check: outcome for outcome in check_backend(backend, only=only, **kwargs)}


def test_ids_of_checks_are_unique():
    assert len({check.id for check in CHECKS}) == len(CHECKS)


def test_the_documentation_lists_every_check_with_what_must_hold():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "conformance.md").read_text("utf-8")
    for check in CHECKS:
        assert check.about
        assert f"| `{check.id.partition('[')[0]}` | {check.about.replace('``', '`')} |" in page


def test_a_backend_that_can_do_little_passes_what_it_can_and_refuses_the_rest():
    outcomes = _outcomes(Small())
    assert {name for name, outcome in outcomes.items() if outcome.status == FAILED} == set()
    assert outcomes["values[causal]"].status == PASSED
    assert "grad: got needs_grad=True" in outcomes["values[causal]"].detail
    assert outcomes["values[dense]"].status == REFUSED
    assert outcomes["ability[softcap]"].status == REFUSED
    assert outcomes["dropout[plain]"].status == LEFT_OUT


def test_a_backend_on_an_absent_device_is_asked_what_it_refuses_and_the_rest_is_left_out():
    outcomes = _outcomes(Elsewhere())
    assert {outcome.status for outcome in outcomes.values()} <= {PASSED, REFUSED, LEFT_OUT}
    assert outcomes["values[causal]"].status == LEFT_OUT
    assert "need an abacus" in outcomes["values[causal]"].detail
    assert outcomes["ability[softcap]"].status == REFUSED
    assert outcomes["ability[causal]"].status == LEFT_OUT
    assert outcomes["other_device[meta]"].status == REFUSED


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_torch_lacks_leaves_the_numbers_out():
    outcome = _outcomes("eager", only="values[causal]", device="cuda")["values[causal]"]
    assert outcome.status == LEFT_OUT
    assert "torch has no cuda here" in outcome.detail


def test_a_backend_without_abilities_is_held_to_what_it_does_not_refuse():
    outcomes = _outcomes(Stranger(), only="values*")
    assert {outcome.status for outcome in outcomes.values()} == {PASSED}
    assert _outcomes(Stranger(), only="softcap*")["softcap[cap_1]"].status == REFUSED
    assert _outcomes(Stranger(), only="ability[window]")["ability[window]"].status == LEFT_OUT
    assert _outcomes(ForgetfulStranger(), only="values[causal_window]")["values[causal_window]"].status == FAILED


class Wrong(EagerBackend):
    """Ignores the softcap."""

    name = "wrong"

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)

    def plan(self, layout, request):
        if request.softcap:
            raise RuntimeError("the kernel fell over")
        return super().plan(layout, request)


def test_a_crash_is_a_failure_that_names_the_exception():
    outcome = _outcomes(Wrong(), only="softcap[cap_1]")["softcap[cap_1]"]
    assert outcome.status == FAILED
    assert outcome.detail == "RuntimeError: the kernel fell over"


def test_a_known_failure_is_expected_and_a_stale_one_fails():
    known = {"softcap[cap_1]": "kernel bug", "softcap[cap_5]": "kernel bug", "values[full]": "was broken once"}
    outcomes = _outcomes(Wrong(), only="softcap*", expected_failures=known)
    outcomes |= _outcomes(Wrong(), only="values[full]", expected_failures=known)
    assert outcomes["softcap[cap_1]"].status == EXPECTED
    assert outcomes["softcap[cap_1]"].detail.startswith("kernel bug (")
    assert outcomes["softcap[cap_50]"].status == FAILED
    assert outcomes["values[full]"].status == FAILED
    assert "take it off expected_failures" in outcomes["values[full]"].detail


def test_unknown_ids_are_refused():
    with pytest.raises(ConfigError, match="expected_failures must name checks of the kit, got softcup"):
        list(check_backend("eager", expected_failures={"softcup": "?"}))
    with pytest.raises(ConfigError, match="only must match the id of a check, got 'windo'"):
        list(check_backend("eager", only="windo"))
    with pytest.raises(ConfigError, match="device must be one that torch knows, such as cpu or cuda:0, got 'abacus'"):
        list(check_backend("eager", device="abacus", only="attributes"))


def test_a_failure_says_where_and_by_how_much():
    class Twice(EagerBackend):
        name = "twice"

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
            return AttentionResult(result.output * 2, result.lse)

    detail = _outcomes(Twice(), only="values[full]")["values[full]"].detail
    assert "output[0, 0, 0, 0]: got " in detail
    assert "of 448 elements are wrong" in detail


def test_nothing_that_the_kit_does_stays_behind():
    names, deterministic = backends.names(), torch.are_deterministic_algorithms_enabled()
    state = torch.get_rng_state()
    _outcomes("eager", only="d*")
    assert backends.names() == names
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_prints_a_table_and_succeeds():
    result = CliRunner().invoke(check_command, ["eager", "--only", "values[causal*"])
    assert result.exit_code == 0, result.output
    assert "values[causal_window]" in result.output
    assert "6 pass" in result.output


def test_the_command_prints_json_and_exits_with_1_on_a_failure():
    with backends.override("wrong", Wrong()):
        result = CliRunner().invoke(check_command, ["wrong", "--only", "softcap*", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["backend"] == "wrong"
    assert report["device"] == "cpu"
    assert report["counts"] == {PASSED: 0, REFUSED: 0, FAILED: 3, EXPECTED: 0, LEFT_OUT: 0}
    assert report["checks"][0]["detail"] == "RuntimeError: the kernel fell over"


_UNDER_O = """
import sys
import torch
from click.testing import CliRunner
from polyattn import AttentionResult, backends
from polyattn_cli.check import check
from polyattn_eager import EagerBackend

class Twice(EagerBackend):
    name = "twice"

    def attend(self, *args, **kwargs):
        result = super().attend(*args, **kwargs)
        return AttentionResult(result.output * 2, result.lse)

assert False, "not under -O"
backends.register("twice", Twice())
for name in ("twice", "eager"):
    result = CliRunner().invoke(check, [name, "--only", "values[causal*"])
    print(name, result.exit_code)
"""


def test_the_command_finds_a_wrong_backend_under_python_o_as_well():
    done = subprocess.run(
        [sys.executable, "-O", "-c", _UNDER_O], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split() == ["twice", "1", "eager", "0"]


def test_no_check_is_an_assert_statement():
    root = pathlib.Path(polyattn_conformance.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path.name


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda result: result.output, "attend must return an AttentionResult, got Tensor"),
        (lambda result: None, "attend must return an AttentionResult, got NoneType"),
        (lambda result: AttentionResult(result.output[:, :1], result.lse), "output must have shape and dtype"),
        (lambda result: AttentionResult(result.output.double(), result.lse), "output must have shape and dtype"),
        (lambda result: AttentionResult(None, result.lse), "output must have shape and dtype"),
        (lambda result: AttentionResult(result.output), "lse must have shape and dtype"),
    ],
    ids=["tensor", "none", "shape", "dtype", "output_none", "lse_none"],
)
def test_a_wrong_answer_is_an_error_with_the_backends_name_and_passes_no_kit(answer, text):
    class Answers(EagerBackend):
        name = "answers"

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            return answer(super().attend(q, k, v, prepared, bias=bias, sinks=sinks))

    q = torch.randn(2, 2, 3, 4)
    with pytest.raises(PolyattnError) as caught:
        attention(q, q, q, MaskLayout.causal(3), backend=Answers(), return_lse=True)
    assert str(caught.value).startswith(f"backend 'answers': {text}")
    assert _outcomes(Answers(), only="values[causal]")["values[causal]"].status == FAILED


def test_a_wrong_answer_of_a_later_call_is_an_error_too():
    class Tires(EagerBackend):
        name = "tires"
        tired = False

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
            return result.output if self.tired else result

    q, backend = torch.randn(2, 2, 3, 4), Tires()
    prepared = backend.prepare(MaskLayout.causal(3), AttentionRequest.of(q, q, q))
    prepared(q, q, q)
    backend.tired = True
    with pytest.raises(PolyattnError, match="backend 'tires': attend must return an AttentionResult, got Tensor"):
        prepared(q, q, q)


def test_an_answer_of_a_subclass_is_an_answer():
    class Telling(AttentionResult):
        pass

    class Tells(EagerBackend):
        name = "tells"

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
            return Telling(result.output, result.lse)

    q = torch.randn(2, 2, 3, 4)
    result = attention(q, q, q, MaskLayout.causal(3), backend=Tells(), return_lse=True)
    assert isinstance(result, Telling)


def test_something_else_than_a_prepared_attention_is_an_error_with_the_backends_name():
    class Prepares(EagerBackend):
        name = "prepares"

        def prepare(self, layout, request):
            return None

    q = torch.randn(2, 2, 3, 4)
    with pytest.raises(
        PolyattnError, match="backend 'prepares': prepare must return a PreparedAttention, got NoneType"
    ):
        attention(q, q, q, MaskLayout.causal(3), backend=Prepares())
    assert _outcomes(Prepares(), only="values[full]")["values[full]"].status == FAILED


def test_another_order_of_the_sums_is_within_the_bounds_under_a_small_softcap():
    """The cap makes scores small, but not the rounding errors of the products that they come from."""
    for seed in range(20):
        case = make_case(MaskLayout.full(9), dtype=torch.float64, head_dim=128, seed=seed, scale=-0.7, softcap=0.5)
        expected = expected_results(case, INFER)
        mixed = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
        result = evaluate(EagerBackend().prepare(case.layout, case.request(INFER)), case, INFER)
        other = case.change(q=case.q[..., mixed].contiguous(), k=case.k[..., mixed].contiguous())
        assert_within(evaluate(EagerBackend().prepare(case.layout, case.request(INFER)), other, INFER), expected)
        assert_within(result, expected)
