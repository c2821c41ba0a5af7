"""Run the kit on one backend and say how each check ended; needs no pytest."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from polyattn import AttentionBackend, ConfigError, backends
from polyattn.messages import shown
from polyattn_conformance.checks import CHECKS, Check
from polyattn_conformance.trial import LeftOut, Trial, one_thread

PASSED = "pass"
REFUSED = "refused properly"
FAILED = "failed"
EXPECTED = "expected failure"
LEFT_OUT = "left out"
#: How many different reasons a detail lists.
_SHOWN = 8
#: Every way in which a check can end.
STATUSES = (PASSED, REFUSED, FAILED, EXPECTED, LEFT_OUT)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one check ended.

    Attributes:
        check: the check's id.
        status: one of :data:`STATUSES`.
        detail: what failed, what was refused and why, or why the check was left out; empty for a plain pass.
        about: the statement that was checked.
        seconds: wall time.
        error: what the check raised, for a failure.
    """

    check: str
    status: str
    detail: str
    about: str
    seconds: float
    error: Exception | None = None

    def to_dict(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {
            "check": self.check,
            "status": self.status,
            "detail": self.detail,
            "about": self.about,
            "seconds": round(self.seconds, 3),
        }


def start_trial(backend: str | AttentionBackend, device: str | torch.device | None = None) -> Trial:
    """A backend ready to be checked.

    Args:
        backend: a registered name, or an object.
        device: where to run; ``None`` takes CUDA when the backend runs there and not on the CPU, else the CPU.

    Raises:
        ConfigError: the device is not known to torch.
        PolyattnError: the name cannot be resolved; see the registry.
    """
    resolved: AttentionBackend = backends.resolve(backend)
    if device is not None:
        try:
            named = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(
                f"device must be one that torch knows, such as cpu or cuda:0, got {shown(device)}"
            ) from error
        return Trial(resolved, named)
    trial = Trial(resolved, torch.device("cpu"))
    return Trial(resolved, torch.device("cuda")) if trial.absent and torch.cuda.is_available() else trial


def run_check(check: Check, trial: Trial, expected_failures: Mapping[str, str] | None = None) -> Outcome:
    """Run one check.

    Args:
        check: what to check.
        trial: on which backend.
        expected_failures: reasons by check id. A check that is listed there and passes has failed: the list is stale.
    """
    trial.start()
    begin = time.perf_counter()
    with one_thread():
        status, detail, error = _status(check, trial)
    reason = (expected_failures or {}).get(check.id)
    if reason is not None and status == FAILED:
        status, detail, error = EXPECTED, f"{reason} ({detail})", None
    elif reason is not None and status == PASSED:
        status, error = FAILED, None
        detail = f"passes although a failure is expected ({reason}); take it off expected_failures"
    return Outcome(check.id, status, detail, check.about, time.perf_counter() - begin, error)


def _status(check: Check, trial: Trial) -> tuple[str, str, Exception | None]:
    if trial.absent and not check.without_kernel:
        return LEFT_OUT, f"nothing runs on {trial.device}: {trial.absent}", None
    try:
        check.run(trial)
    except LeftOut as why:
        return LEFT_OUT, str(why), None
    except AssertionError as failure:
        return FAILED, str(failure), failure
    except Exception as crash:  # noqa: BLE001 - whatever a backend raises is its failure, and is reported
        return FAILED, "".join(traceback.format_exception_only(crash)).strip(), crash
    reasons = list(dict.fromkeys([*(str(reason) for reasons in trial.refusals for reason in reasons), *trial.notes]))
    refused = "; ".join(reasons[:_SHOWN])
    if len(reasons) > _SHOWN:
        refused += f"; and {len(reasons) - _SHOWN} more"
    if not trial.honoured:
        return REFUSED, refused, None
    if refused:
        count = len(trial.refusals) + len(trial.notes)
        return PASSED, f"{trial.honoured} calls right, {count} refused properly: {refused}", None
    return PASSED, "", None


def check_backend(
    backend: str | AttentionBackend,
    *,
    device: str | torch.device | None = None,
    only: str = "*",
    expected_failures: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """Run the kit.

    Args:
        backend: a registered name, or an object that follows the protocol.
        device: where to run; see :func:`start_trial`.
        only: a shell pattern of check ids, such as ``"window*"``.
        expected_failures: known failures, reasons by check id.

    Yields:
        One outcome a check, as soon as it has ended.

    Raises:
        ConfigError: ``only`` or ``expected_failures`` name no check, or the device is unknown.
    """
    known = {check.id for check in CHECKS}
    unknown = sorted(set(expected_failures or ()) - known)
    if unknown:
        raise ConfigError(f"expected_failures must name checks of the kit, got {', '.join(unknown)}")
    # Brackets are part of an id, not of the pattern.
    pattern = only.replace("[", "[[]")
    chosen = [check for check in CHECKS if fnmatch.fnmatchcase(check.id, pattern)]
    if not chosen:
        raise ConfigError(
            f"only must match the id of a check, got {shown(only)}; the first ones are {', '.join(sorted(known)[:5])}"
        )
    trial = start_trial(backend, device)
    for check in chosen:
        yield run_check(check, trial, expected_failures)
