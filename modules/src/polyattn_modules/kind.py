"""What layers that ask for the same have in common: a backend and a structure."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from polyattn import AttentionBackend, AttentionRequest, MaskLayout, Reason
from polyattn.select import refusals
from polyattn_modules.latent_spec import LatentSpec
from polyattn_modules.spec import AttentionSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LayerSpec = AttentionSpec | LatentSpec

#: Features that a layer uses in every forward, or in every training step.
_CERTAIN = frozenset({"gqa", "unequal_width", "softcap", "sinks", "window", "dropout"})
_OF_THE_DEVICE = frozenset({"device", "kernel"})


class LayerKind:
    """A backend and a structure; it never changes.

    Attributes:
        backend: the backend.
        spec: the structure.
        mesh: whose ranks share the heads; ``None`` for a layer of one process.
        local: the structure with this rank's heads alone, which requests, caches and given keys have.
        early, late: its norm of queries and keys, if that comes before the rotation, or after it.
        name: equal for layers of one backend object and equal structures; compared in every forward, so a string.
    """

    def __init__(self, backend: AttentionBackend, spec: LayerSpec, mesh: DeviceMesh | None = None) -> None:
        self.backend = backend
        self.spec: LayerSpec = spec
        self.local: LayerSpec = spec
        self.mesh = mesh
        if mesh is not None and isinstance(spec, AttentionSpec):
            heads, kv_heads = spec.num_heads // mesh.size(), spec.num_kv_heads // mesh.size()
            self.local = dataclasses.replace(spec, num_heads=heads, num_kv_heads=kv_heads)
        norm = spec.qk_norm
        self.early = norm if norm is not None and norm.position == "before" else None
        self.late = norm if self.early is None else None
        self.name = f"{id(backend)} {spec!r}" + ("" if mesh is None else f" {mesh.size()}")

    @functools.cached_property
    def absorbed(self) -> LayerKind:
        """The kind of a latent layer that attends to the latents themselves."""
        assert isinstance(self.spec, LatentSpec)
        return LayerKind(self.backend, self.spec.absorbed)

    def request(self, **call: Any) -> AttentionRequest:
        """The request of a forward; the LSE's gradient is asked for with the LSE wherever gradients are.

        Args:
            call: the fields of :class:`AttentionRequest` that the structure does not say.
        """
        spec = self.local
        return AttentionRequest(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            scale=spec.scale,
            dropout_p=spec.dropout,
            softcap=spec.softcap,
            has_sinks=spec.sinks,
            **call,
        )

    @property
    def heads_here(self) -> tuple[int, int]:
        """The first of this rank's query heads, and the first after them."""
        heads, rank = self.local.num_heads, 0 if self.mesh is None else self.mesh.get_local_rank()
        return rank * heads, (rank + 1) * heads

    def refusals(self, dtype: torch.dtype, device: torch.device | None) -> tuple[Reason, ...]:
        """Why the backend cannot serve the structure, whatever the forwards bring.

        Args:
            dtype: of the parameters.
            device: where the layer will run; ``None`` when that is not known, and then nothing is said about it.
        """
        where = torch.device("cpu") if device is None else device
        request = self.request(batch=1, dtype=dtype, device=where, training=True)
        reasons = refusals(self.backend, MaskLayout.causal(1, window=self.spec.window), request)
        certain = _CERTAIN if device is None or device.type == "meta" else _CERTAIN | _OF_THE_DEVICE
        return tuple(reason for reason in reasons if reason.feature in certain)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerKind:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerKind, (self.backend, self.spec, self.mesh)
