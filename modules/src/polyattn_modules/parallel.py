"""Tensor parallelism: each rank of a mesh holds some heads of a layer, and all ranks see all tokens.

Queries, keys and values come from column-parallel projections and stay plain tensors of this rank's heads, so backends,
rotation and caches see an ordinary layer with fewer heads. Parameters are DTensors, whose gradients are whole: what
ranks share is summed over them. Nothing here is imported or asked before a layer is parallelised.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyattn import ConfigError
from polyattn_modules.norm import RMSNorm
from polyattn_modules.projections import PARTS, WHOLE, unfuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_parallel(layer: Any, mesh: object) -> None:
    """Refuse a mesh that the layer cannot be shared out over, and a layer that has another form by now.

    Raises:
        ConfigError: one message with every fault.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"one of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(
            f"mesh must be a DeviceMesh of one dimension, got {got}; name the one of tensor parallelism: mesh['tp']"
        )
    if layer.kind.mesh is not None:
        raise ConfigError("a layer is parallelised once, got one that is already; build another layer")
    spec, ranks, problems = layer.spec, mesh.size(), []
    for name in ("num_heads", "num_kv_heads"):
        if getattr(spec, name) % ranks:
            problems.append(
                f"{name} must be a multiple of the ranks of the mesh, {ranks}, got {getattr(spec, name)}; "
                "choose a smaller mesh"
            )
    if spec.dropout:
        problems.append(
            f"dropout must be 0 under tensor parallelism, got {spec.dropout}: ranks would draw the same for other heads"
        )
    for name in (WHOLE,) if layer.fused_qkv else PARTS:
        problems += _unknown(name, getattr(layer, name), nn.Linear)
    problems += _unknown("o_proj", layer.o_proj, nn.Linear)
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            problems += _unknown(name, getattr(layer, name), RMSNorm)
    if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        problems.append("parameters must not be sharded yet, got DTensors; parallelise before fully_shard")
    if problems:
        raise ConfigError("; ".join(problems))


def _unknown(name: str, module: nn.Module, kind: type[nn.Module]) -> list[str]:
    if type(module) is kind and not hasattr(module, "parametrizations"):
        return []
    return [f"{name} must be {kind.__name__} itself, got {type(module).__name__}; parallelise before it is replaced"]


def share_out(layer: Any, mesh: DeviceMesh) -> None:
    """Make the parameters DTensors of ``mesh``, each rank's heads its own. ``layer`` was checked."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def distribute(module: nn.Module, placement: Any) -> None:
        for name, old in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(distribute_tensor(old.detach(), mesh, [placement]), requires_grad=old.requires_grad)
            module.register_parameter(name, new)

    if layer.fused_qkv:
        unfuse(layer)
    output = RowwiseParallel(output_layouts=Partial(), use_local_output=False)  # placed at the end of the forward
    parallelize_module(layer, mesh, {**{name: ColwiseParallel() for name in PARTS}, "o_proj": output})
    if layer.sinks is not None:
        distribute(layer.sinks, Shard(1))
    for norm in (layer.q_norm, layer.k_norm):
        if norm is None:
            continue
        distribute(norm, Replicate())
        if layer.spec.qk_norm is not None and layer.spec.qk_norm.scope == "projection":
            norm.register_forward_pre_hook(functools.partial(_all_heads, mesh))
            norm.register_forward_hook(_own_heads)
        else:
            norm.parted = True


def _all_heads(mesh: DeviceMesh, norm: nn.Module, inputs: Any) -> Any:
    """Before a norm over the whole projection: what it normalises, of all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    (x,) = inputs
    return (DTensor.from_local(x, mesh, [Shard(-1)], run_check=False).redistribute(placements=[Replicate()]),)


def _own_heads(norm: nn.Module, inputs: Any, output: Any) -> Tensor:
    """After it: this rank's part again."""
    from torch.distributed.tensor import Shard

    own: Tensor = output.redistribute(placements=[Shard(-1)]).to_local()
    return own
