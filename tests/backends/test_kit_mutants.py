"""The kit's own test: every deliberately wrong backend is caught by the checks that are about its fault."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from polyattn.testing import check_backend
from polyattn_conformance.runner import FAILED

_SPEC = importlib.util.spec_from_file_location("polyattn_mutants", pathlib.Path(__file__).with_name("mutants.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
mutants = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda kind: kind.__name__)
def test_a_wrong_backend_is_caught(mutant):
    outcomes = [next(check_backend(mutant(), only=check)) for check in mutant.caught_by]
    assert {outcome.check: outcome.status for outcome in outcomes} == dict.fromkeys(mutant.caught_by, FAILED)
    assert all(outcome.detail for outcome in outcomes)


@pytest.mark.nightly
def test_the_backend_that_the_mutants_are_made_from_is_right():
    checks = {check for mutant in mutants.MUTANTS for check in mutant.caught_by}
    failed = [
        outcome.detail
        for check in sorted(checks)
        for outcome in check_backend(mutants.Mutant(), only=check)
        if outcome.status == FAILED
    ]
    assert failed == []
