"""The backend protocol: what a backend implements, and what core does around it.

A layout and a request go into ``prepare``, which returns a :class:`PreparedAttention`; calling that with tensors
validates them, applies the autocast rule and runs the backend's ``attend``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from polyattn import _boundary, _derivatives
from polyattn._errors import AttentionInputError, PolyattnError, UnsupportedAttentionError
from polyattn._features import missing_abilities
from polyattn._layout import MaskLayout
from polyattn._options import configured_options
from polyattn._reasons import Reason
from polyattn._request import AttentionRequest
from polyattn._tensors import accumulation_dtype, cast_for_autocast, knows_autocast, saveable
from polyattn.registry import backends, hooks, restored


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionResult:
    """What attention returns.

    Attributes:
        output: ``[B, Hq, Q, Dv]`` in the dtype of q, k and v after the autocast rule; exactly 0 for rows that see
            nothing.
        lse: FP32 (FP64 for FP64 inputs) ``[B, Hq, Q]``, natural log of the sum of exponentials of the final scores,
            sinks excluded; ``-inf`` for rows that see nothing; ``None`` unless the request has ``needs_lse``.
    """

    output: Tensor
    lse: Tensor | None = None


@runtime_checkable
class AttentionBackend(Protocol):
    """What an entry point of ``polyattn.backends`` must provide; inheriting :class:`BackendBase` is optional."""

    name: str
    api_version: int

    def unsupported(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Every reason why this backend cannot do the request under the layout; empty when it can. Reads no data."""
        ...

    def prepare(self, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """Refuse what ``unsupported`` has reasons against; then read values, synchronise and allocate by mask."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: PreparedAttention,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionResult:
        """Run the kernel on validated tensors; never reads a value back to the host."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedAttention:
    """A layout and a request, made ready by one backend; call it with tensors.

    Attributes:
        backend: who prepared it and will attend.
        layout: the mask.
        request: sizes, dtype, device and features.
        state: the backend's own; tensors and static ints only.
        autocast_kind: the type of the request's device, where autocast knows it.
    """

    backend: AttentionBackend
    layout: MaskLayout
    request: AttentionRequest
    state: Any = None
    autocast_kind: str | None = dataclasses.field(init=False, repr=False)
    _shapes: tuple[tuple[int, ...], ...] = dataclasses.field(init=False, repr=False)
    _lse_dtype: torch.dtype = dataclasses.field(init=False, repr=False)
    _plain: bool = dataclasses.field(init=False, repr=False)
    _first_order: bool = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        request, kind = self.request, self.request.device.type
        first_order = "second_order" not in getattr(self.backend, "abilities", ())
        decided = {
            "autocast_kind": kind if knows_autocast(kind) else None,
            "_shapes": _boundary.expected_shapes(self.layout, request),
            "_lse_dtype": accumulation_dtype(request.dtype),
            "_plain": not request.has_bias and not request.has_sinks,
            "_first_order": first_order,
        }
        for name, value in decided.items():
            object.__setattr__(self, name, value)
        if not torch.compiler.is_compiling():
            if first_order and request.needs_grad:  # now: a call may run under a mode that counts operations
                _derivatives.refusal(self.backend.name, 0)
            if hooks.installed("polyattn_prepared"):
                hooks.call("polyattn_prepared", prepared=self)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, sinks: Tensor | None = None
    ) -> AttentionResult:
        """Attend.

        Args:
            q: ``[B, Hq, Q, D]``, any strides.
            k: ``[B, Hkv, K, D]``.
            v: ``[B, Hkv, K, Dv]``.
            bias: floating, broadcastable to ``[B, Hq, Q, K]``, added to the scaled and capped scores; ``-inf`` blocks a
                key. FP64 beside narrower tensors is cast to FP32, finite values staying finite.
            sinks: floating ``[Hq]``, one extra logit per head that takes part in the softmax and carries no value.

        Raises:
            AttentionInputError: a tensor differs from what was prepared.
            PolyattnError: the backend's answer is not a result, or has a wrong shape or dtype; not looked at inside
                compiled graphs.
        """
        request = self.request
        q_shape, k_shape, v_shape, shape = self._shapes
        device = request.device
        try:
            fits = (
                q.shape == q_shape
                and k.shape == k_shape
                and v.shape == v_shape
                and q.device == device
                and k.device == device
                and v.device == device
            )
        except AttributeError:  # not a tensor, which the next line says
            fits = False
        if not fits:
            _boundary.raise_mismatch(q, k, v, self.layout, request)
        if self.autocast_kind is not None and torch.is_autocast_enabled(self.autocast_kind):
            q, k, v = cast_for_autocast(q), cast_for_autocast(k), cast_for_autocast(v)
        dtype = request.dtype
        if q.dtype is not dtype or k.dtype is not dtype or v.dtype is not dtype:
            _boundary.raise_mismatch(q, k, v, self.layout, request)
        if not (self._plain and bias is None and sinks is None):
            bias = _boundary.checked_bias(bias, self.layout, request)
            _boundary.check_sinks(sinks, request)
        if not request.needs_grad and (q.requires_grad or k.requires_grad or v.requires_grad or not self._plain):
            _boundary.check_gradients(q, k, v, bias, sinks)
        if not request.deterministic and torch.are_deterministic_algorithms_enabled():
            raise AttentionInputError(
                "torch.use_deterministic_algorithms(True) was set after prepare; make the request with "
                "deterministic=True (AttentionRequest.of reads it off torch) and prepare again"
            )
        if torch.compiler.is_compiling():
            # Dynamo refuses an autograd function that gets one tensor twice, as when k is v.
            return self.backend.attend(q, k.view_as(k), v.view_as(v), self, bias=bias, sinks=sinks)
        if self._first_order and _derivatives.transforming():
            _derivatives.refuse_transforms(self.backend.name)
        result = self.backend.attend(q, k, v, self, bias=bias, sinks=sinks)
        try:
            output, lse = result.output, result.lse
            right = output.shape == shape and output.dtype is dtype
            if request.needs_lse:
                right = right and lse is not None and lse.shape == shape[:3] and lse.dtype is self._lse_dtype
        except AttributeError:
            right = False
        if not right:
            _boundary.raise_wrong_result(result, self.backend.name, self.layout, request)
        if self._first_order and request.needs_grad:
            _derivatives.refuse_others(self.backend.name, output)
            if lse is not None:
                _derivatives.refuse_others(self.backend.name, lse)
        return result


def saved_by_autograd(
    build: Callable[[MaskLayout, AttentionRequest], PreparedAttention], layout: MaskLayout, request: AttentionRequest
) -> PreparedAttention:
    """``build(layout, request)``, for gradients without tensors of inference mode, which autograd cannot save."""
    if not request.needs_grad or torch.compiler.is_compiling():
        return build(layout, request)
    with torch.inference_mode(False):
        return build(saveable(layout), request)


def refusals(backend: AttentionBackend, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
    """``backend.unsupported``; a failure of it is an error that names the backend.

    Raises:
        PolyattnError: the backend raised something of its own.
    """
    try:
        return backend.unsupported(layout, request)
    except PolyattnError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}{origin(backend.name)}"
        raise _boundary.wrong_answer(backend.name, "unsupported must return its reasons", got) from error


def origin(name: str) -> str:
    """Which distribution the loaded backend ``name`` is from, for a message; empty where it is from none."""
    made = [info.label for info in backends.infos() if info.name == name and info.status == "loaded"]
    return f", from {made[0]}" if len(made) == 1 else ""


class BackendBase:
    """What most backends want around their kernel; inherit it or not.

    A subclass sets ``name`` and ``abilities`` and overrides :meth:`plan` and :meth:`attend`. Every feature that a
    layout and a request use and ``abilities`` lacks is refused without further code; :meth:`abilities_on` is for
    abilities that depend on the device, :meth:`hint` for what to do about a refusal, and ``polyattn.kernels`` has what
    kernels share.

    Attributes:
        name: the entry point's name.
        api_version: version of the backend protocol that the class was written for.
        abilities: features that the backend honours on the best device of this machine (see ``polyattn.testing``).
        Options: a frozen dataclass with defaults, or ``None`` when there is nothing to configure.
        options: the instance's options.
    """

    name: str = ""
    api_version: int = 1
    abilities: frozenset[str] = frozenset()
    Options: ClassVar[type[Any] | None] = None

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None or self.Options is None else self.Options()

    def abilities_on(self, device: torch.device) -> frozenset[str]:
        """The features that the backend honours on ``device``."""
        return self.abilities

    def hint(self, feature: str, device: torch.device) -> str:
        """What to do about ``feature``, which :meth:`abilities_on` lacks on ``device``; may be empty."""
        return ""

    def device_reasons(self, device: torch.device) -> tuple[Reason, ...]:
        """Why nothing can run on ``device``: the kernel is absent or broken, or the device is of another kind."""
        return ()

    def extra_reasons(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Reasons beyond missing abilities, such as combinations of features or limits on sizes."""
        return ()

    def unsupported(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Every reason, device and kernel first."""
        return (
            *self.device_reasons(request.device),
            *missing_abilities(self.name, self.abilities_on(request.device), layout, request, self.hint),
            *self.extra_reasons(layout, request),
        )

    def prepare(self, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """Refuse with every reason, or check the layout, plan, and return the prepared attention."""
        if not isinstance(layout, MaskLayout):
            _boundary.check_layout_type(layout)
        reasons = refusals(self, layout, request)
        if reasons:
            raise UnsupportedAttentionError(self.name, reasons)
        _boundary.check_layout(layout, request)

        def planned(layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
            return PreparedAttention(self, layout, request, self.plan(layout, request))

        return saved_by_autograd(planned, layout, request)

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> Any:
        """Build the state of a supported, validated layout and request: tensors and static ints only."""
        raise NotImplementedError(f"{type(self).__name__} must override plan(layout, request)")

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: PreparedAttention,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionResult:
        """Run the kernel; see :class:`AttentionBackend`."""
        raise NotImplementedError(f"{type(self).__name__} must override attend(q, k, v, prepared, *, bias, sinks)")

    def preference(self, layout: MaskLayout, request: AttentionRequest) -> int:
        """How much ``auto`` should prefer this backend for the request; higher wins, ties go by name."""
        return 0

    def describe(self, prepared: PreparedAttention) -> str:
        """What will run for ``prepared``, in a few words."""
        return self.name

    def configure(self, options: Any) -> Self:
        """A backend with other options: an instance of ``Options``, or a mapping of its fields.

        Raises:
            ConfigError: an option is unknown or of the wrong type; the message lists the fields.
        """
        return type(self)(configured_options(self.name, self.Options, options))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.name == self.name and other.options == self.options

    def __hash__(self) -> int:
        return hash((type(self), self.name, self.options))

    def __repr__(self) -> str:
        return f"<backend {self.name}>" if self.options is None else f"<backend {self.name} {self.options}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (restored, (self.name, type(self), self.options))
