"""One of two gloo processes: trains the tiny decoder under DDP and FSDP2 and writes what it found as JSON.

``python two_ranks.py RANK FOLDER``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from decoder import SEGMENTATIONS, Decoder, batch_of, config_of
from polyattn import AttentionScope

WORLD = 2


def model_of(**made: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config_of("sdpa", sinks=True), **made)


def rows(rank: int) -> Any:
    """The batch of one rank, one row. The scope is made outside: a root that casts its inputs rebuilds dataclasses."""
    tokens, layout, positions = batch_of(SEGMENTATIONS[1][rank : rank + 1], seed=rank)
    return tokens, AttentionScope(layout), positions


def reference() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of each rank's batch and gradients of the mean loss, in one process."""
    model = model_of()
    logits = [model(*rows(rank)) for rank in range(WORLD)]
    (sum(x.sin().sum() for x in logits) / WORLD).backward()
    return [x.detach() for x in logits], {name: p.grad for name, p in model.named_parameters()}


def largest(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got.float() - want).abs().max().item()


def compare(model: nn.Module, rank: int) -> dict[str, Any]:
    """Train one step and compare with one process."""
    want_logits, want = reference()
    logits = model(*rows(rank))
    logits.float().sin().sum().backward()
    errors = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        errors[name] = largest(grad, want[name.removeprefix("module.")])
    return {"logits": largest(logits.detach(), want_logits[rank]), "gradients": max(errors.values())}


def sharded(model: Decoder, policy: MixedPrecisionPolicy | None = None) -> Decoder:
    mesh = init_device_mesh("cpu", (WORLD,))
    keywords: dict[str, Any] = {"mesh": mesh} | ({} if policy is None else {"mp_policy": policy})
    for block in model.layers:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)
    return model


def watched(model: Decoder) -> tuple[Decoder, list[Any]]:
    """The scopes that layers are given, as they arrive behind every wrapper."""
    scopes: list[Any] = []
    for block in model.layers:
        block.attention.register_forward_pre_hook(lambda module, args: scopes.append(args[1]))
    return model, scopes


def mixed_precision(rank: int) -> dict[str, Any]:
    model, scopes = watched(model_of())
    errors = compare(sharded(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16)), rank)
    scope = scopes[0]
    return {
        **errors,
        "one scope": all(other is scope for other in scopes),
        "builds": scope.builds,
        "tables": sorted({str(tables.cos.dtype) for tables in scope.kept("rotary")}),
        "requests": sorted({str(prepared.request.dtype) for prepared in scope.kept("attention")}),
    }


def from_meta(rank: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(config_of("sdpa", sinks=True))
    sharded(model).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    positions = torch.arange(60)[None]
    tables = model.layers[0].attention.rotary(positions), model_of().layers[0].attention.rotary(positions)
    return {
        "finite": all(bool(torch.isfinite(value).all()) for value in whole.values()),
        "norms": all(bool((value == 1).all()) for name, value in whole.items() if "norm" in name),
        "sinks": all(not value.any() for name, value in whole.items() if "sinks" in name),
        "drawn": all(value.std().item() > 0 for name, value in whole.items() if "proj.weight" in name),
        "tables": torch.equal(tables[0].cos, tables[1].cos),
        "logits": bool(torch.isfinite(model(*rows(rank))).all()),
    }


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {
        "ddp": compare(DistributedDataParallel(model_of()), rank),
        "fsdp": compare(sharded(model_of()), rank),
        "mixed precision": mixed_precision(rank),
        "meta": from_meta(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
