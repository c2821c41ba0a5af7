"""What layers of every kind of projection have: a backend, a structure that stays, and parameters that begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from polyattn import AttentionBackend, UnsupportedAttentionError
from polyattn.registry import readers
from polyattn.select import resolve_backend
from polyattn_modules.inputs import check_attribute, check_part
from polyattn_modules.kind import LayerKind, LayerSpec

_Spec = TypeVar("_Spec", bound=LayerSpec)


class AttentionLayer(nn.Module, Generic[_Spec]):
    """Projections around prepared attention. A subclass has ``o_proj``, and sets ``kind`` last."""

    kind: LayerKind
    #: The reader of its weights, by name.
    READER: ClassVar[str]

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
        self.kind = self._able(
            LayerKind(resolve_backend(backend, options), self.kind.spec, self.kind.mesh), placed=False
        )

    @property
    def backend(self) -> AttentionBackend:
        """The backend; :meth:`set_backend` sets it."""
        return self.kind.backend

    @property
    def spec(self) -> _Spec:
        """The structure, which stays; for another one build another layer (``from_spec``)."""
        return cast("_Spec", self.kind.spec)

    def load_hf_weights(
        self, state: Mapping[str, Tensor], config: Any, *, layer: int, convention: str = "serving"
    ) -> None:
        """Load the weights of one layer of a transformers model.

        Names are the same there; Gemma's norm weights, which count from 1, are changed to ours.

        Args:
            state: the model's state dict.
            config: its configuration, or the dictionary of that; see ``from_hf`` of the layer's spec.
            layer: index of the layer.
            convention: with which the configuration is read; likewise.

        Raises:
            ConfigError: the class is not known, the configuration describes another layer than this one (but for its
                dropout), or the state dict has no such layer.
            RuntimeError: a weight is missing, unknown or of another shape; from ``load_state_dict``.
        """
        reader = readers.get(self.READER)
        self.load_state_dict(reader.weights(state, config, layer=layer, spec=self.spec, convention=convention))

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
