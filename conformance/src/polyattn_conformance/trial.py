"""A backend under test: everything is either honoured, and then right, or refused properly."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from polyattn import (
    FEATURES,
    AttentionBackend,
    AttentionRequest,
    MaskLayout,
    PreparedAttention,
    Reason,
    UnsupportedAttentionError,
)
from polyattn.kernels import features_of
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, INFER_LSE, TRAIN, TRAIN_LSE, Case, Mode, evaluate, make_case
from polyattn_conformance.failure import CheckFailed, require
from polyattn_conformance.layouts import LAYOUTS

#: The dtypes in which a backend is tried, best known numbers first.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
#: What a reason may be about besides the features.
ABSENCES = ("device", "kernel")
MODES = (INFER_LSE, TRAIN, TRAIN_LSE)

_E = TypeVar("_E", bound=Exception)


class LeftOut(Exception):  # noqa: N818 - not an error
    """A check cannot say anything about this backend here; the text says why."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine threads that wait for each other cost twenty times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Trial:
    """One backend on one device, and what happened in the check that is running.

    Attributes:
        backend: the backend; nothing but the protocol is assumed of it.
        device: where the tensors are.
        abilities: what the backend declares, or ``None`` when it declares nothing.
        absent: why nothing can run on ``device``, or ``""``.
        dtype: the dtype in which checks run that are not about dtypes.
        honoured: how many calls ran and were right in this check.
        refusals: the reasons of those that were refused.
        notes: what else is worth reporting.
    """

    def __init__(self, backend: AttentionBackend, device: torch.device) -> None:
        self.backend = backend
        self.device = device
        self.absent = ""
        try:
            self.device = torch.empty(0, device=device).device  # with its index
        except (RuntimeError, AssertionError) as error:  # torch says so in either way
            self.absent = f"torch has no {device} here: {str(error).partition(chr(10))[0]}"
        declared = getattr(backend, "abilities", None)
        self.abilities: frozenset[str] | None = None if declared is None else frozenset(declared)
        layout = MaskLayout.full(4)
        answers = {dtype: self._reasons_of_simplest(layout, dtype) for dtype in DTYPES}
        self.dtype = next((dtype for dtype, reasons in answers.items() if not reasons), torch.float32)
        absences = [reason for reason in answers[self.dtype] if reason.feature in ABSENCES]
        self.absent = self.absent or "; ".join(map(str, absences))
        self.start()

    def start(self) -> None:
        """Forget what happened in the last check."""
        self.honoured = 0
        self.refusals: list[tuple[Reason, ...]] = []
        self.notes: list[str] = []

    def case(self, layout: MaskLayout, **kwargs: object) -> Case:
        """A case on the trial's device, in its dtype unless ``kwargs`` say otherwise; see :func:`make_case`."""
        return make_case(layout, **{"dtype": self.dtype, "device": self.device, **kwargs})  # type: ignore[arg-type]

    def featured(self, layout: MaskLayout, **kwargs: object) -> Case:
        """A case with those of softcap, bias and sinks that the backend does not refuse here."""
        shape = (1, 1, layout.q_len, layout.kv_len)
        features: dict[str, object] = {}
        for name, value in {"softcap": 2.0, "bias": shape, "sinks": True}.items():
            case = self.case(layout, **{**kwargs, **features, name: value})
            if not self.backend.unsupported(case.layout, case.request(TRAIN if self.declares("grad") else INFER)):
                features[name] = value
        return self.case(layout, **{**kwargs, **features})

    def declares(self, feature: str) -> bool:
        """Whether the backend declares the ability; a backend that declares nothing may have any."""
        return self.abilities is None or feature in self.abilities

    def compare(self, *cases: Case, modes: Iterable[Mode] = MODES) -> None:
        """Every mode of every case: right or refused properly.

        A backend that refuses all ``modes`` of a case is tried without LSE and gradients.
        """
        for case in cases:
            ran = [self.compare_one(case, mode) for mode in modes]
            if not any(ran):
                self.compare_one(case, INFER)

    def compare_one(self, case: Case, mode: Mode, **changes: object) -> bool:
        """One call; True when it ran, False when it was refused properly.

        Raises:
            AssertionError: wrong numbers, or a refusal that is not proper.
        """
        visible = case.visible.clone()
        prepared = self.prepare(case.layout, case.request(mode, **changes))
        if prepared is None:
            return False
        try:
            results = evaluate(prepared, case, mode)
            require(torch.equal(case.visible, visible), "the backend wrote into the layout")
            assert_within(results, expected_results(case, mode))
        except AssertionError as error:
            raise AssertionError(f"{mode}, {case}: {error}") from error
        self.honoured += 1
        return True

    def prepare(self, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention | None:
        """The prepared attention, or ``None`` after a proper refusal.

        Raises:
            AssertionError: the refusal is not proper, or a feature that is not declared was accepted.
        """
        reasons = self.backend.unsupported(layout, request)
        assert_reasons(reasons)
        if reasons:
            self._assert_refuses(layout, request, reasons)
            self.refusals.append(reasons)
            return None
        if self.abilities is not None:
            undeclared = [feature for feature in features_of(layout, request) if feature not in self.abilities]
            require(
                not undeclared,
                f"accepted {', '.join(undeclared)}, which abilities does not list; declare it or refuse it",
            )
        prepared = self.backend.prepare(layout, request)
        if not isinstance(prepared, PreparedAttention):
            raise CheckFailed(f"prepare must return a PreparedAttention, got {type(prepared).__name__}")
        return prepared

    def must_prepare(self, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """As :meth:`prepare`, but a refusal ends the check.

        Raises:
            LeftOut: the backend refuses properly, so there is nothing to look at.
        """
        prepared = self.prepare(layout, request)
        if prepared is None:
            raise LeftOut(f"refused: {'; '.join(map(str, self.refusals[-1]))}")
        return prepared

    def accepted(self, names: Iterable[str]) -> list[str]:
        """Those of the named layouts that the backend accepts without LSE and gradients; it refuses the rest properly.

        Raises:
            LeftOut: it accepts none.
        """
        cases = {name: self.case(LAYOUTS[name]()) for name in names}
        found = [name for name, case in cases.items() if self.prepare(case.layout, case.request(INFER)) is not None]
        if not found:
            raise LeftOut(f"refuses all of {', '.join(cases)}")
        return found

    def strongest(self, case: Case) -> Mode:
        """The mode that asks for most among those that the backend accepts for ``case``.

        Raises:
            LeftOut: it accepts none.
        """
        for mode in (TRAIN_LSE, TRAIN, INFER_LSE, INFER):
            if not self.backend.unsupported(case.layout, case.request(mode)):
                return mode
        raise LeftOut(f"refuses {case} in every mode")

    def _assert_refuses(self, layout: MaskLayout, request: AttentionRequest, reasons: tuple[Reason, ...]) -> None:
        refusal = raised(UnsupportedAttentionError, lambda: self.backend.prepare(layout, request))
        if refusal is None:
            raise CheckFailed(f"unsupported gives reasons, yet prepare accepts: {'; '.join(map(str, reasons))}")
        require(
            refusal.backend == self.backend.name,
            f"the refusal must name '{self.backend.name}', got '{refusal.backend}'",
        )
        require(
            set(refusal.reasons) == set(reasons),
            f"prepare must raise the reasons that unsupported gives, got {refusal.reasons} and {reasons}",
        )

    def _reasons_of_simplest(self, layout: MaskLayout, dtype: torch.dtype) -> tuple[Reason, ...]:
        request = AttentionRequest(
            batch=1, heads=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype=dtype, device=self.device
        )
        return tuple(self.backend.unsupported(layout, request))


def raised(kind: type[_E], call: Callable[[], object]) -> _E | None:
    """The exception of ``kind`` that ``call`` raises, or ``None`` when it raises nothing."""
    try:
        call()
    except kind as error:
        return error
    return None


def assert_reasons(reasons: object) -> None:
    """Refusals must be machine-readable.

    Raises:
        AssertionError: not a tuple of :class:`Reason`, or one lacks code, feature, got or need.
    """
    if not isinstance(reasons, tuple):
        raise CheckFailed(f"unsupported must return a tuple of Reason, got {type(reasons).__name__}")
    for reason in reasons:
        require(isinstance(reason, Reason), f"unsupported must return Reason objects, got {type(reason).__name__}")
        fields = reason.to_dict()
        empty = [name for name in ("code", "feature", "got", "need") if not fields[name]]
        require(not empty, f"{reason!r} must say {', '.join(empty)}")
        known = (*FEATURES, *ABSENCES, "options")
        require(reason.feature in known, f"{reason!r}: feature must be one of {', '.join(known)}")
        require(json.loads(json.dumps(fields)) == fields, f"{reason!r} must be JSON")
