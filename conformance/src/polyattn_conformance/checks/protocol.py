"""The protocol: attributes, refusals, declared abilities, copies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyattn import FEATURES, MaskLayout, PolyattnError, StructuredMask, backends
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, INFER_LSE, TRAIN, TRAIN_LSE, Case, Mode, evaluate
from polyattn_conformance.checks.host_reads import forbid_host_reads
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.layouts import LAYOUTS
from polyattn_conformance.trial import LeftOut, Trial, assert_reasons, raised
from polyattn_conformance.variants import poisoned


@check(without_kernel=True)
def attributes(trial: Trial) -> None:
    """It has a name, an integer api_version and the three methods; abilities, if declared, are known features."""
    backend = trial.backend
    require(isinstance(backend.name, str), f"name must be a string, got {backend.name!r}")
    require(backend.name, "name must not be empty")
    require(type(backend.api_version) is int, f"api_version must be an int, got {backend.api_version!r}")
    for method in ("unsupported", "prepare", "attend"):
        require(callable(getattr(backend, method, None)), f"{method} must be a method")
    unknown = set(trial.abilities or ()) - set(FEATURES)
    require(not unknown, f"abilities lists {sorted(unknown)}; the features are {', '.join(FEATURES)}")
    trial.honoured += 1


@check()
def optional_methods(trial: Trial) -> None:
    """If it has them, ``describe`` gives a text and ``preference`` an int for everything that the backend accepts."""
    backend: Any = trial.backend
    for name in trial.accepted(("full", "causal", "packed", "dense")):
        case = trial.case(LAYOUTS[name]())
        request = case.request(trial.strongest(case))
        if hasattr(backend, "describe"):
            text = backend.describe(trial.must_prepare(case.layout, request))
            require(isinstance(text, str) and text, f"describe must return a text, got {text!r}")
        if hasattr(backend, "preference"):
            preference = backend.preference(case.layout, request)
            require(type(preference) is int, f"preference must return an int, got {preference!r}")
        require(isinstance(repr(backend), str), "repr must return a text")
        trial.honoured += 1


@check(without_kernel=True)
def unsupported_is_pure(trial: Trial) -> None:
    """``unsupported`` gives a tuple of reasons, the same when asked twice, and reads no tensor data."""
    for build in LAYOUTS.values():
        case = trial.case(build(), heads=4)
        for mode in (INFER, TRAIN_LSE):
            request = case.request(mode)
            with forbid_host_reads("unsupported"):
                reasons = trial.backend.unsupported(case.layout, request)
            assert_reasons(reasons)
            require(trial.backend.unsupported(case.layout, request) == reasons, "two questions, two answers")
    trial.honoured += 1


@dataclasses.dataclass(frozen=True)
class _Use:
    """The simplest use of a feature."""

    layouts: tuple[Callable[[], MaskLayout], ...] = (
        lambda: MaskLayout.full(4),
        lambda: MaskLayout.causal(4),
        lambda: MaskLayout.dense(torch.ones(4, 4, dtype=torch.bool)),
    )
    mode: Mode = INFER
    case: dict[str, object] = dataclasses.field(default_factory=dict)
    leaves: tuple[str, ...] = ("q", "k", "v")
    request: dict[str, object] = dataclasses.field(default_factory=dict)


_ACTIVE = torch.tensor([[True, False, True, True]])
_VALID = torch.tensor([[True, True, True, False]])
USES = {
    "float64": _Use(case={"dtype": torch.float64}),
    "float32": _Use(case={"dtype": torch.float32}),
    "bfloat16": _Use(case={"dtype": torch.bfloat16}),
    "float16": _Use(case={"dtype": torch.float16}),
    "full": _Use((lambda: MaskLayout.full(4),)),
    "causal": _Use((lambda: MaskLayout.causal(4),)),
    "window": _Use((
        lambda: MaskLayout.causal(4, window=2),
        lambda: MaskLayout(q_len=4, kv_len=4, batch=1, heads=1, visibility=StructuredMask(causal=False, window=2)),
    )),
    "padded": _Use((lambda: MaskLayout.padded(_VALID, causal=False), lambda: MaskLayout.padded(_VALID))),
    "packed": _Use((lambda: MaskLayout.packed([1, 3]), lambda: MaskLayout.packed([1, 3], causal=False))),
    "prefix_lm": _Use((lambda: MaskLayout.prefix_lm([2], 4),)),
    "chunked": _Use((lambda: MaskLayout.chunked(2, 4),)),
    "positions": _Use((LAYOUTS["positions"], lambda: MaskLayout.causal(4).select_queries([1, 2]))),
    "dense": _Use((lambda: MaskLayout.dense(torch.ones(4, 4).tril().bool()),)),
    "mask_mod": _Use((LAYOUTS["mask_mod"],)),
    "per_head_mask": _Use((LAYOUTS["dense_heads"], LAYOUTS["mask_mod_heads"])),
    "active_queries": _Use((
        lambda: MaskLayout.causal(4, active_queries=_ACTIVE), lambda: MaskLayout.full(4, active_queries=_ACTIVE)
    )),
    "gqa": _Use(case={"heads": 4, "kv_heads": 2}),
    "unequal_width": _Use(case={"head_dim": 8, "v_head_dim": 16}),
    "bias": _Use(case={"bias": (4, 4)}),
    "bias_grad": _Use(case={"bias": (4, 4)}, mode=TRAIN, leaves=("q", "k", "v", "bias")),
    "softcap": _Use(case={"softcap": 2.0}),
    "sinks": _Use(case={"sinks": True}),
    "lse": _Use(mode=INFER_LSE),
    "lse_grad": _Use(mode=TRAIN_LSE),
    "grad": _Use(mode=TRAIN),
    "dropout": _Use(mode=TRAIN, request={"dropout_p": 0.5, "training": True}),
    "deterministic": _Use(request={"deterministic": True}),
}  # fmt: skip


@check(USES, without_kernel=True)
def ability(trial: Trial, use: _Use) -> None:
    """A declared ability is honoured in its simplest use; one that is not declared is refused by its name."""
    if trial.abilities is None:
        raise LeftOut("the backend declares no abilities; whatever it does not refuse is held to the reference")
    feature = next(name for name, value in USES.items() if value is use)
    if feature in trial.abilities and trial.absent:
        raise LeftOut(trial.absent)
    accepted = 0
    for build in use.layouts:
        case = trial.case(build(), **use.case).change(leaves=use.leaves)
        accepted += trial.prepare(case.layout, case.request(use.mode, **use.request)) is not None
    refusals = "; ".join(str(reason) for reasons in trial.refusals for reason in reasons)
    if feature in trial.abilities:
        require(accepted, f"abilities lists '{feature}', yet its simplest use is refused: {refusals}")
        trial.honoured += accepted
        return
    for reasons in trial.refusals:
        require(feature in {reason.feature for reason in reasons}, f"no reason names '{feature}': {refusals}")


def _copied(trial: Trial, copied: Callable[[object], object]) -> None:
    for name in trial.accepted(("causal", "packed", "dense", "right_padding")):
        case = poisoned(trial.case(LAYOUTS[name]()), torch.nan)  # a copy must also know what to leave out
        mode = trial.strongest(case)
        prepared = copied(trial.must_prepare(case.layout, case.request(mode)))
        assert_within(evaluate(prepared, case, mode), expected_results(case, mode))  # type: ignore[arg-type]
    for backend in (trial.backend, *_configured(trial.backend)):
        other = copied(backend)
        require(other == backend, f"a copy of the backend must equal it, got {other!r} of {backend!r}")
        require(hash(other) == hash(backend), "a copy of the backend must hash as it does")
    trial.honoured += 1


def _configured(backend: Any) -> Iterator[Any]:
    """The backend with each of its switches turned the other way."""
    options = getattr(backend, "Options", None)
    for field in dataclasses.fields(options) if options is not None else ():
        if isinstance(field.default, bool):
            other = backend.configure({field.name: not getattr(backend.options, field.name)})
            require(other != backend, f"a backend with another {field.name} must not equal this one")
            yield other


@check()
def deepcopy(trial: Trial) -> None:
    """Copies of the backend and of what it prepared work as they do."""
    _copied(trial, copy.deepcopy)


@check()
def pickled(trial: Trial) -> None:
    """Backend and prepared attention survive pickling, as they must to reach a worker process."""
    name, kind = trial.backend.name, type(trial.backend)
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if name not in backends.names():
        scope = backends.override(name, trial.backend)
    elif type(backends.get(name)) is not kind:
        raise LeftOut(f"'{name}' is registered as another backend, and a backend pickles by its registered name")
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        raise LeftOut(f"{kind.__qualname__} cannot be imported from {kind.__module__}, and a class pickles by its name")
    with scope:
        _copied(trial, lambda x: pickle.loads(pickle.dumps(x)))  # noqa: S301 - our own bytes


def _longer(case: Case) -> Case:
    return case.change(k=torch.cat([case.k, case.k], 2), v=torch.cat([case.v, case.v], 2))


@check({
    "batch": lambda case: case.change(q=case.q[:1], k=case.k[:1], v=case.v[:1]),
    "heads": lambda case: case.change(q=case.q[:, :2]),
    "length": _longer,
    "width": lambda case: case.change(q=case.q[..., :4], k=case.k[..., :4]),
    "dtype": lambda case: case.to(torch.float64 if case.q.dtype is not torch.float64 else torch.float32),
    "mixed_dtypes": lambda case: case.change(k=case.k.to(torch.complex64)),
    "bias": lambda case: case.change(bias=case.q.new_zeros(5, 5)),
    "sinks": lambda case: case.change(sinks=case.q.new_zeros(4)),
})  # fmt: skip
def mismatch(trial: Trial, change: Callable[[Case], Case]) -> None:
    """Tensors other than those prepared for are an error of polyattn, before any kernel."""
    case = trial.case(MaskLayout.causal(5), heads=4, kv_heads=2)
    prepared = trial.must_prepare(case.layout, case.request(INFER))
    other = change(case)
    error = raised(PolyattnError, lambda: prepared(other.q, other.k, other.v, bias=other.bias, sinks=other.sinks))
    require(error is not None, "attend accepts tensors that it was not prepared for")
    require(str(error), "the error must say what differs")
    trial.honoured += 1
