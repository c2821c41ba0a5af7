"""Which backend does a piece of attention: ``explain``, and the name ``auto``.

The order of ``auto`` is deterministic: the site's policy (the hook ``polyattn_select_backend``) first, then the
highest ``preference(layout, request)`` among the backends without reasons, ties by name.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from polyattn._backend import AttentionBackend, BackendBase, PreparedAttention, origin, refusals, saved_by_autograd
from polyattn._boundary import check_layout_type, wrong_answer
from polyattn._errors import AttentionInputError, ConfigError, LayoutError, PolyattnError, UnsupportedAttentionError
from polyattn._layout import MaskLayout
from polyattn._reasons import Reason
from polyattn._request import AttentionRequest
from polyattn.messages import shown
from polyattn.registry import AUTO, backends, brief, hooks

__all__ = ["Decision", "explain", "prepare", "reasons_of", "refusals", "resolve_backend"]

_logger = logging.getLogger("polyattn")

_OUTSIDE = "{}; name the backend and look it up before: polyattn.backends.get(name)"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What ``auto`` decides for one layout and request.

    Attributes:
        chosen: name of the backend, or ``None`` when none can.
        candidates: every installed backend's reasons against it; empty for those that can.
        because: why the chosen one came first.
    """

    chosen: str | None
    candidates: Mapping[str, tuple[Reason, ...]]
    because: str = ""

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen} ({self.because})" if self.chosen else "chosen: none, no installed backend can"]
        for name, reasons in self.candidates.items():
            lines.append(f"{name}: {'can' if not reasons else 'cannot'}")
            lines += [f"  - {reason}" for reason in reasons]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        listed = {name: [reason.to_dict() for reason in reasons] for name, reasons in self.candidates.items()}
        return {"chosen": self.chosen, "because": self.because, "candidates": listed}


def explain(layout: MaskLayout, request: AttentionRequest) -> Decision:
    """Every installed backend's reasons against ``layout`` and ``request``, and what ``auto`` decides.

    A plugin that cannot be loaded or asked is listed with the cause.

    Raises:
        ConfigError: the site's policy names a backend that cannot do the request.
        LayoutError, AttentionInputError: ``layout`` or ``request`` is something else.
    """
    check_layout_type(layout)
    if not isinstance(request, AttentionRequest):
        raise AttentionInputError(
            f"request must be an AttentionRequest, got {type(request).__name__}; AttentionRequest.of(q, k, v) makes one"
        )
    answers = {name: _ask(name, layout, request) for name in backends.names()}
    candidates = {name: reasons for name, (reasons, _) in answers.items()}
    usable = tuple(name for name, reasons in candidates.items() if not reasons)
    if not usable:
        return Decision(None, candidates)
    if hooks.installed("polyattn_select_backend"):
        policy = hooks.call("polyattn_select_backend", layout=layout, request=request, candidates=usable)
        if policy is not None:
            if policy not in usable:
                raise ConfigError(
                    f"the hook polyattn_select_backend must return one of {', '.join(usable)} or None, "
                    f"got {shown(policy)}"
                )
            return Decision(policy, candidates, "the site's policy")
    preference, chosen = min((-answers[name][1], name) for name in usable)
    return Decision(chosen, candidates, f"highest preference, {-preference}")


def prepare(backend: AttentionBackend, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
    """``backend.prepare``, with a refusal that says which loaded backend can, and names the others.

    Raises:
        UnsupportedAttentionError: the backend refuses.
        PolyattnError: it answers with something else than a :class:`PreparedAttention`.
    """
    try:
        if getattr(type(backend), "prepare", None) in _SAVING:
            prepared = backend.prepare(layout, request)
        else:
            prepared = saved_by_autograd(backend.prepare, layout, request)
    except UnsupportedAttentionError as refusal:
        if refusal.alternatives is not None or torch.compiler.is_compiling():
            raise
        loaded = backends.loaded()
        can = [name for name in loaded if name != backend.name and not reasons_of(name, layout, request)]
        others = [name for name in backends.names() if name not in loaded and name != backend.name]
        asleep = [name for name in others if backends.info(name).status in {"available", "registered"}]
        raise UnsupportedAttentionError(refusal.backend, refusal.reasons, can, asleep) from refusal.__cause__
    if not isinstance(prepared, PreparedAttention):
        raise wrong_answer(backend.name, "prepare must return a PreparedAttention", type(prepared).__name__)
    return prepared


def resolve_backend(backend: str | AttentionBackend, options: Any = None) -> AttentionBackend:
    """The backend object for a name from a config, or the object itself; ``"auto"`` decides per request.

    Raises:
        UnknownBackendError, DuplicatePluginError, BackendLoadError, IncompatiblePluginError, BlockedPluginError:
            see the registry.
        ConfigError: options that the backend does not have, or neither a name nor an object.
    """
    if backend is None or isinstance(backend, (bool, int, float, list, tuple, dict)):
        raise ConfigError(
            f"backend must be a name ('polyattn list' shows them), 'auto' or a backend object, got {shown(backend)}"
        )
    if isinstance(backend, str) and torch.compiler.is_compiling():
        raise ConfigError(
            _OUTSIDE.format(f"backend must be an object inside a compiled function, got {shown(backend)}")
        )
    if backend == AUTO:
        if options:
            raise ConfigError(
                f"backend_options must be empty with attn_backend 'auto', got {shown(options)}; name the backend"
            )
        return _auto
    resolved: AttentionBackend = backends.resolve(backend, options)
    return resolved


#: The last decision of ``auto`` about each layout, and in which state of the registry it was made.
_last: weakref.WeakKeyDictionary[MaskLayout, tuple[object, AttentionRequest, AttentionBackend]]
_last = weakref.WeakKeyDictionary()


class AutoBackend:
    """The name ``auto``: decides for each layout and request, and hands over to the chosen backend.

    The same layout object with an equal request, asked again, gets the same backend without asking the others, as long
    as nothing was registered, installed, allowed or disabled in between and no site has a policy.
    """

    name = AUTO
    api_version = 1

    def unsupported(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Empty when some installed backend can; otherwise every reason of each."""
        return _refusals(explain(layout, request))

    def prepare(self, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """Prepare with the chosen backend; see :func:`explain` for how it is chosen."""
        if torch.compiler.is_compiling():
            raise ConfigError(_OUTSIDE.format("'auto' cannot decide inside a compiled function"))
        check_layout_type(layout)
        state, last = backends.state(), _last.get(layout)
        lasting = not hooks.installed("polyattn_select_backend")
        if lasting and last is not None and last[0] == state and last[1] == request:
            return prepare(last[2], layout, request)
        decision = explain(layout, request)
        if decision.chosen is None:
            raise UnsupportedAttentionError(AUTO, _refusals(decision), ())
        _log_once(str(decision))
        chosen: AttentionBackend = backends.get(decision.chosen)
        features = {reason.feature for reasons in decision.candidates.values() for reason in reasons}
        if lasting and "plugin" not in features:  # else another question may meet another answer
            _last[layout] = state, request, chosen
        return prepare(chosen, layout, request)

    def attend(
        self, q: Any, k: Any, v: Any, prepared: PreparedAttention, *, bias: Any = None, sinks: Any = None
    ) -> Any:
        """Run the backend that prepared."""
        return prepared.backend.attend(q, k, v, prepared, bias=bias, sinks=sinks)

    def __reduce__(self) -> tuple[Any, ...]:
        return (resolve_backend, (AUTO,))

    def __repr__(self) -> str:
        return "<backend auto>"


_auto = AutoBackend()
#: Those that hand on to autograd only what it can save.
_SAVING = frozenset({BackendBase.prepare, AutoBackend.prepare})


def reasons_of(name: str, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
    """Why the backend ``name`` refuses; a plugin that cannot be loaded or asked is a reason too."""
    return _ask(name, layout, request)[0]


def _ask(name: str, layout: MaskLayout, request: AttentionRequest) -> tuple[tuple[Reason, ...], int]:
    """Why the backend ``name`` refuses, and its preference where it does not."""
    doctor, question = "see `polyattn doctor`", "unsupported"
    try:
        backend = backends.get(name)
    except PolyattnError as error:
        return (Reason("not_loadable", "plugin", str(error).splitlines()[0], "a plugin that loads", doctor),), 0
    try:
        reasons = backend.unsupported(layout, request)
        if not isinstance(reasons, tuple) or not all(isinstance(reason, Reason) for reason in reasons):
            raise TypeError(f"must return a tuple of Reason, got {shown(reasons)}")  # noqa: TRY301 - as if it had raised it
        preference, question = getattr(backend, "preference", None), "preference"
        return reasons, 0 if reasons or preference is None else operator.index(preference(layout, request))
    except (KeyboardInterrupt, LayoutError, AttentionInputError):
        raise  # the last two are about the question, not about the backend
    except BaseException as error:  # noqa: BLE001 - a backend that fails when asked must not take others along
        got = f"{question}: {brief(error)}{origin(name)}"
        return (Reason("fails_when_asked", "plugin", got, "a backend that answers", doctor),), 0


def _refusals(decision: Decision) -> tuple[Reason, ...]:
    if decision.chosen is not None:
        return ()
    if not decision.candidates:
        return (Reason("no_backend", "plugin", "no installed backend", "at least one", "pip install polyattn-sdpa"),)
    return tuple(
        dataclasses.replace(reason, got=f"{reason.got} [{name}]")
        for name, reasons in decision.candidates.items()
        for reason in reasons
    )


@functools.lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    _logger.info("attention backend auto\n%s", text)
