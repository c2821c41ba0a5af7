"""The conformance kit as a pytest class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from polyattn import AttentionBackend
from polyattn_conformance.checks import CHECKS, Check
from polyattn_conformance.failure import require
from polyattn_conformance.runner import EXPECTED, FAILED, LEFT_OUT, run_check, start_trial


class BackendConformance:
    """Every check of the kit as one test.

    Subclass it in a test file and name the backend::

        from polyattn_conformance import BackendConformance


        class TestMine(BackendConformance):
            backend = "mine"

    A check that the backend refuses properly passes, one that cannot say anything here is skipped with the reason.

    Attributes:
        backend: registered name, or an object that follows the protocol.
        device: where to run; ``None`` takes the first device on which the backend runs.
        expected_failures: known failures, reasons by check id; a stale entry fails.
    """

    backend: ClassVar[str | AttentionBackend]
    device: ClassVar[str | torch.device | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def test_expected_failures_name_checks(self) -> None:
        """A misspelt id in ``expected_failures`` would hide nothing and mean nothing."""
        unknown = sorted(set(self.expected_failures) - {check.id for check in CHECKS})
        require(not unknown, f"expected_failures must name checks of the kit, got {', '.join(unknown)}")

    @pytest.mark.parametrize("check", CHECKS, ids=[check.id for check in CHECKS])
    def test_conforms(self, check: Check) -> None:
        """Honoured and right, or refused properly."""
        outcome = run_check(check, start_trial(self.backend, self.device), self.expected_failures)
        if outcome.status == LEFT_OUT:
            pytest.skip(outcome.detail)
        if outcome.status == EXPECTED:
            pytest.xfail(outcome.detail)
        if outcome.status == FAILED:
            raise AssertionError(f"{outcome.about}\n{outcome.detail}") from outcome.error
