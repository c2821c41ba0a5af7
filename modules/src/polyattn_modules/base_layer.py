"""What layers of every kind of projection have: a backend, a structure that stays, and parameters that begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from polyattn import AttentionBackend, UnsupportedAttentionError
from polyattn.select import resolve_backend
from polyattn_modules.inputs import check_attribute, check_part
from polyattn_modules.kind import LayerKind


class AttentionLayer(nn.Module):
    """Projections around prepared attention. A subclass has ``o_proj``, and sets ``kind`` last."""

    kind: LayerKind

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change the structure, and parts that it knows nothing of: no forward would use them.

        Other names are free, for what a subclass adds.
        """
        if "kind" in self.__dict__:
            check_attribute(type(self).__name__, type(self.spec), name, value)
            check_part(self.spec, name, value)
        super().__setattr__(name, value)

    def set_backend(self, backend: str | AttentionBackend, options: Mapping[str, Any] | None = None) -> None:
        """Use another backend from now on.

        Raises:
            UnsupportedAttentionError: it cannot do what the layer needs; the old backend stays.
        """
        self.kind = self._able(LayerKind(resolve_backend(backend, options), self.kind.spec), placed=False)

    @property
    def backend(self) -> AttentionBackend:
        """The backend; :meth:`set_backend` sets it."""
        return self.kind.backend

    @property
    def spec(self) -> Any:
        """The structure, which stays; for another one build another layer (``from_spec``)."""
        return self.kind.spec

    def reset_parameters(self) -> None:
        """Draw every parameter afresh: torch's own rule for the projections, one for norm weights, zero for sinks."""
        for module in self.children():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def extra_repr(self) -> str:
        """Backend and window, for ``print(model)``."""
        return f"backend={self.backend.name!r}, window={self.kind.spec.window}"

    def _able(self, kind: LayerKind, *, placed: bool) -> LayerKind:
        """``kind``, if its backend can do it; ``placed``: the parameters stay on the device they are on."""
        weight: Any = self._modules["o_proj"]
        weight = weight.weight
        here = placed or weight.device.type not in {"cpu", "meta"}
        reasons = kind.refusals(weight.dtype, weight.device if here else None)
        if reasons:
            raise UnsupportedAttentionError(kind.backend.name, reasons)
        return kind
