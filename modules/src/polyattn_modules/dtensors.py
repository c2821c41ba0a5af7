"""What a layer does with DTensors: hidden states and weights that the ranks of a mesh share.

``torch.distributed.tensor`` is imported where it is needed, so that a layer on one device does not pay for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyattn import AttentionInputError
from polyattn.messages import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from polyattn_modules.sources import KeySource


def check_tensors(
    mesh: DeviceMesh | None, hidden: Tensor, positions: Tensor | None, source: KeySource, bias: Tensor | None
) -> None:
    """Refuse DTensors that a layer cannot use, and a bias whose gradient would be a rank's part.

    Args:
        mesh: of the layer, where it is parallelised.
        hidden, positions, source, bias: what its forward is given.

    Raises:
        AttentionInputError: the first that does not fit.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # nobody has made a DTensor
    from torch.distributed.tensor import DTensor, Replicate, Shard

    inputs = {"hidden": hidden, "kv_hidden": source.kv_hidden}
    plain = {"positions": positions, "kv_positions": source.positions, "attention_bias": bias}
    plain |= dict(zip(("the keys", "the values"), source.pair or (), strict=False))
    for name, x in (*inputs.items(), *plain.items()):
        if not isinstance(x, DTensor):
            continue
        got = f"a DTensor with placements {shown(list(x.placements))} on {shown(x.device_mesh)}"
        if mesh is None:
            raise AttentionInputError(
                f"{name} must be a plain tensor for a layer that is not parallelised, got {got}; call "
                "layer.parallelize(mesh), or pass its full_tensor()"
            )
        if name in plain:
            raise AttentionInputError(f"{name} must be a plain tensor, got {got}; pass its to_local()")
        if x.device_mesh != mesh or x.placements not in ((Replicate(),), (Shard(1),)):
            raise AttentionInputError(
                f"{name} must be a plain tensor of all tokens, or a DTensor with placements [Replicate()] or "
                f"[Shard(1)] (its tokens) on the layer's mesh, {shown(mesh)}, got {got}; redistribute it"
            )
    if mesh is not None and bias is not None and bias.requires_grad and (bias.dim() < 3 or bias.shape[-3] == 1):
        raise AttentionInputError(
            "attention_bias must have rows for each of this rank's heads where its gradient is wanted and ranks share "
            f"the heads, got shape {list(bias.shape)}, of whose gradient a rank has its heads' part; make it a "
            "DTensor, expand and redistribute it over the heads and pass its to_local()"
        )


def entering(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Hidden states as the projections take them, all tokens on every rank; its gradient is summed over ranks once."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(hidden, DTensor):
        whole: Tensor = hidden.redistribute(placements=[Replicate()])
        return whole
    return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)


def leaving(output: Any, hidden: Tensor) -> Tensor:
    """The sum over ranks of their outputs, placed as the hidden states came.

    Args:
        output: a DTensor, what each rank's heads contribute.
        hidden: as the layer was given them.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(hidden, DTensor):
        placed: Tensor = output.redistribute(placements=hidden.placements)
        return placed
    plain: Tensor = output.redistribute(placements=[Replicate()]).to_local()
    return plain


def summed(weight: Tensor) -> Tensor:
    """A weight that ranks share, as a plain tensor; its gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    same = weight.redistribute(placements=weight.placements)  # its backward reduces the partial gradient
    local: Tensor = same.to_local(grad_placements=[Partial()] * len(weight.placements))
    return local


def own(weight: Tensor) -> Tensor:
    """This rank's part of a weight."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def like_parameters(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Change whole tensors of a state dict into DTensors where the parameters of ``module`` are such."""
    if "torch.distributed.tensor" not in sys.modules:
        return  # nobody has made a DTensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in module.named_parameters():
        value = state.get(f"{prefix}{name}")
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            value = value.to(parameter.device)
            state[f"{prefix}{name}"] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
