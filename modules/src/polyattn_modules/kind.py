"""What equal layers share: backend, structure, and the attention requests that follow from them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from polyattn import AttentionBackend, AttentionRequest, MaskLayout, Reason
from polyattn_modules.spec import AttentionSpec

#: Features that a layer uses in every forward, or in every training step.
_CERTAIN = frozenset({"gqa", "unequal_width", "softcap", "sinks", "window", "dropout"})
_OF_THE_DEVICE = frozenset({"device", "kernel"})


class Call(NamedTuple):
    """What one forward adds to the structure: the fields of :class:`AttentionRequest` of those names."""

    batch: int
    dtype: torch.dtype
    device: torch.device
    training: bool
    needs_grad: bool
    has_bias: bool
    needs_bias_grad: bool
    needs_lse: bool
    deterministic: bool


class LayerKind:
    """A backend and a structure. There is one object for the same ones (:func:`layer_kind`), so identity says all.

    Attributes:
        backend: the backend.
        spec: the structure.
    """

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec) -> None:
        self.backend = backend
        self.spec = spec

    def request(self, call: Call) -> AttentionRequest:
        """The request of a forward; the LSE's gradient is asked for with the LSE wherever gradients are."""
        spec = self.spec
        return AttentionRequest(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            scale=spec.scale,
            dropout_p=spec.dropout,
            softcap=spec.softcap,
            has_sinks=spec.sinks,
            needs_lse_grad=call.needs_lse and call.needs_grad,
            **call._asdict(),
        )

    def refusals(self, dtype: torch.dtype, device: torch.device | None) -> tuple[Reason, ...]:
        """Why the backend cannot serve the structure, whatever the forwards bring.

        Args:
            dtype: of the parameters.
            device: where the layer will run; ``None`` when that is not known, and then nothing is said about it.
        """
        where = torch.device("cpu") if device is None else device
        request = self.request(Call(1, dtype, where, True, False, False, False, False, False))
        reasons = self.backend.unsupported(MaskLayout.causal(1, window=self.spec.window), request)
        certain = _CERTAIN if device is None or device.type == "meta" else _CERTAIN | _OF_THE_DEVICE
        return tuple(reason for reason in reasons if reason.feature in certain)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerKind:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return layer_kind, (self.backend, self.spec)


def layer_kind(backend: AttentionBackend, spec: AttentionSpec) -> LayerKind:
    """The kind of a backend object and a structure."""
    # The kind keeps its backend alive, so while it is listed no other object can have that id.
    return _kinds.setdefault((id(backend), spec), LayerKind(backend, spec))


_kinds: weakref.WeakValueDictionary[tuple[int, AttentionSpec], LayerKind] = weakref.WeakValueDictionary()
