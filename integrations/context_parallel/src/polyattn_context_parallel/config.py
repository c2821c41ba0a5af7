"""Context parallelism as a training config names it, found through the entry-point group ``polyattn.scopes``.

::

    context_parallel: {mesh: cp, method: auto, balance: auto}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from polyattn import MaskLayout
from polyattn.messages import listed, shown
from polyattn_context_parallel.attention import CHECKS, METHODS, check_choice
from polyattn_context_parallel.balance import BALANCES
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.scope import ContextParallelScope
from polyattn_context_parallel.shard import Shard


@dataclasses.dataclass(frozen=True)
class ContextParallelConfig:
    """How sequences are shared out to ranks; it needs no processes, and is checked when it is built.

    Args:
        mesh: the dimension of the device mesh whose ranks share the tokens.
        method: see :class:`ContextParallelScope`.
        balance: see :meth:`Shard.of`.
        check: see :class:`ContextParallelScope`.

    Raises:
        ContextParallelError: an argument is none of these.
    """

    name: ClassVar[str] = "context_parallel"
    api_version: ClassVar[int] = 1

    mesh: str = "cp"
    method: str = "auto"
    balance: str = "auto"
    check: str = "once"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, str) or not self.mesh:
            raise ContextParallelError(f"mesh must be the name of a dimension of the mesh, got {shown(self.mesh)}")
        check_choice("method", self.method, ("auto", *METHODS))
        check_choice("balance", self.balance, ("auto", *BALANCES))
        check_choice("check", self.check, CHECKS)

    def configure(self, options: Mapping[str, Any]) -> ContextParallelConfig:
        """This with other fields, as a config names them.

        Raises:
            ContextParallelError: an unknown field, or a value that it cannot have.
        """
        known = [field.name for field in dataclasses.fields(self)]
        unknown = [key for key in options if key not in known]
        if unknown:
            raise ContextParallelError(f"unknown key {listed(unknown)}; the keys are {', '.join(known)}")
        return dataclasses.replace(self, **options)

    def scope(self, layout: MaskLayout | Mapping[str, MaskLayout], device_mesh: Any) -> ContextParallelScope:
        """The scope of this rank; its ``shard`` takes the rank's part of tensors. Every rank calls this.

        Args:
            layout: the mask of the whole sequences, the same on every rank; or several by name.
            device_mesh: a ``DeviceMesh`` with a dimension called :attr:`mesh`.

        Raises:
            ContextParallelError: the mesh has no such dimension, or see :meth:`Shard.of`.
        """
        names = getattr(device_mesh, "mesh_dim_names", None) or ()
        if self.mesh not in names:
            raise ContextParallelError(
                f"device_mesh must be a DeviceMesh with a dimension {shown(self.mesh)}, which context_parallel.mesh "
                f"names, got {f'dimensions {listed(names)}' if names else shown(device_mesh)}; give "
                "init_device_mesh(..., mesh_dim_names=...) that name"
            )
        part = device_mesh if len(names) == 1 else device_mesh[self.mesh]
        return ContextParallelScope(Shard.of(layout, part, balance=self.balance), method=self.method, check=self.check)
