"""One of several gloo processes: layers whose heads ranks share, against one process.

``python tensor_ranks.py RANK WORLD FOLDER``: two ranks share the heads of layers; four do as two by two with FSDP2.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from decoder import NORM, SEGMENTATIONS, Decoder, batch_of, config_of, rope_of
from polyattn import (
    AttentionScope,
    GroupedQueryAttention,
    KVCache,
    MaskLayout,
    PolyattnError,
    QKNorm,
    RopeSpec,
)

S = 15  # an odd number of tokens
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"qk_norm": QKNorm(**NORM), "sinks": True, "bias": True, "output_bias": True, "window": 5},
    "fused": {"qk_norm": QKNorm(**NORM), "sinks": True, "bias": True, "fused_qkv": True, "v_head_dim": 6},
    "late norm": {"qk_norm": QKNorm(**{**NORM, "position": "after"})},
    "norm over the projection": {"qk_norm": QKNorm(**{**NORM, "scope": "projection"})},
    "norm without weight": {"qk_norm": QKNorm(**{**NORM, "weighted": False})},
}


def layer_of(heads: tuple[int, int] = (4, 2), **options: Any) -> GroupedQueryAttention:
    """A layer in which no weight has its first value."""
    torch.manual_seed(0)
    rope = RopeSpec.from_dict(rope_of())
    layer = GroupedQueryAttention(32, *heads, 8, rope=rope, backend="eager", dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def whole(x: Any) -> Tensor:
    """A tensor of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest(got: Any, want: Any) -> float:
    return (whole(got).detach() - want.detach()).abs().max().item()


def named_gradients(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def wanted_of(name: str, got: dict[str, Any], want: dict[str, Tensor], widths: Any = ()) -> Tensor:
    """The gradient of one process for a parameter that was part of a fused one."""
    if name in want:
        return want[name]
    part, kind = name.split(".")
    return want[f"qkv_proj.{kind}"].split(widths)[("q_proj", "k_proj", "v_proj").index(part)]


def hidden_of(seed: int = 2, length: int = S) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, length, 32, dtype=torch.float64)


def placed(x: Tensor, how: str, mesh: DeviceMesh) -> Tensor:
    if how == "plain":
        return x.clone().requires_grad_()
    return distribute_tensor(x, mesh, [Shard(1) if how == "tokens" else Replicate()]).requires_grad_()


def error_of(options: dict[str, Any], layout: MaskLayout, how: str, mesh: DeviceMesh) -> dict[str, Any]:
    """The largest errors of a layer against one process, and how its output and gradients are placed."""
    alone, shared = layer_of(**options), layer_of(**options).parallelize(mesh)
    positions, weights = torch.arange(S)[None], hidden_of(3)
    x = hidden_of().requires_grad_()
    want = alone(x, AttentionScope(layout), positions)
    (want * weights).sum().backward()
    own = placed(x.detach(), how, mesh)
    scope = AttentionScope(layout)
    shared.fill(scope, own, positions)
    got = shared(own, scope, positions)
    weights = weights if how == "plain" else distribute_tensor(weights, mesh, got.placements)
    (got * weights).sum().backward()
    wanted, found = named_gradients(alone), named_gradients(shared)
    errors = {name: largest(grad, wanted_of(name, found, wanted, alone._widths)) for name, grad in found.items()}
    return {
        "output": largest(got, want),
        "hidden": largest(own.grad, x.grad),
        "gradients": max(errors.values()),
        "builds": scope.builds["attention"],
        "placements": str(got.placements) if isinstance(got, DTensor) else "plain",
        "gradients are placed as parameters": all(p.grad.placements == p.placements for p in shared.parameters()),
    }


def keys_from_elsewhere(mesh: DeviceMesh, rank: int) -> dict[str, float]:
    """Contexts, given keys, caches, LSE and a bias: of this rank's heads."""
    options, found = LAYERS["all"] | {"window": None}, {}
    alone, shared = layer_of(**options), layer_of(**options).parallelize(mesh)
    x, context, positions = hidden_of(), hidden_of(5, 4), torch.arange(4, S + 4)[None]
    heads, kv_heads = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    before, layout = torch.arange(4)[None], MaskLayout.causal(S, S + 4)
    bias = torch.randn(1, 4, S, S + 4, dtype=torch.float64)
    want = alone(x, AttentionScope(layout), positions, context, kv_positions=before, return_lse=True)
    got = shared(x, AttentionScope(layout), positions, context, kv_positions=before, return_lse=True)
    found["context"] = largest(got.output, want.output)
    found["lse"] = largest(got.lse, want.lse[:, heads])
    past = alone.keys_values(context, before), shared.keys_values(context, before)
    found["keys"] = largest(past[1][0], past[0][0][:, kv_heads])
    want = alone(x, AttentionScope(layout), positions, past=past[0], attention_bias=bias)
    got = shared(x, AttentionScope(layout), positions, past=past[1], attention_bias=bias[:, heads])
    found["past"] = largest(got, want)
    with torch.no_grad():
        outputs = []
        for layer in (alone, shared):
            cache = KVCache(layer.local_spec, 2, 32, dtype=torch.float64)
            for length in (S, 1):
                step = layer(x[:, :length], AttentionScope(cache.layout(length)), None, cache=cache)
            outputs.append(step)
    found["cache"] = largest(outputs[1], outputs[0])
    return found


def refused(call: Any) -> str:
    try:
        call()
    except PolyattnError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    layer, alone, x, positions = layer_of().parallelize(mesh), layer_of(), hidden_of(), torch.arange(S)[None]
    changed = layer_of()
    changed.k_proj = nn.Sequential(changed.k_proj)

    def forward(hidden: Tensor = x, layer: Any = layer, positions: Tensor = positions, **call: Any) -> None:
        layer(hidden, AttentionScope(MaskLayout.causal(S)), positions, **call)

    def with_projections() -> str:
        before = {name: id(parameter) for name, parameter in odd.named_parameters()}
        said = refused(lambda: odd.parallelize(mesh))
        return said if before == {name: id(parameter) for name, parameter in odd.named_parameters()} else "changed"

    odd = layer_of((3, 1), dropout=0.5)
    return {
        "heads": with_projections(),
        "mesh": refused(lambda: layer_of().parallelize("tp")),  # type: ignore[arg-type]
        "twice": refused(lambda: layer.parallelize(mesh)),
        "changed": refused(lambda: changed.parallelize(mesh)),
        "sharded": refused(lambda: fully_shard(layer_of(), mesh=mesh).parallelize(mesh)),
        "rows": refused(lambda: forward(distribute_tensor(x, mesh, [Shard(0)]))),
        "not parallelised": refused(lambda: forward(distribute_tensor(x, mesh, [Replicate()]), alone)),
        "keys of one": refused(lambda: alone.keys_values(distribute_tensor(x, mesh, [Replicate()]), positions)),
        "positions": refused(lambda: forward(positions=distribute_tensor(positions, mesh, [Replicate()]))),
        "bias": refused(lambda: forward(attention_bias=torch.zeros(1, 1, S, S).double().requires_grad_())),
        "all keys": refused(lambda: forward(keys_values=(torch.zeros(2, 2, S, 8).double(),) * 2)),
    }


def state_dicts(mesh: DeviceMesh, folder: Path) -> dict[str, float]:
    """Every way into a layer that ranks share, and out of it; the largest error of a forward."""
    options = LAYERS["fused"]
    source, found = layer_of(**options), {}
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    parted = layer_of(**{**options, "fused_qkv": False})
    parted.load_state_dict(source.state_dict())
    x, positions, layout = hidden_of(), torch.arange(S)[None], MaskLayout.causal(S)
    want = source(x, AttentionScope(layout), positions)

    def error(layer: nn.Module) -> float:
        return largest(layer(x, AttentionScope(layout), positions), want)

    def fresh(**changes: Any) -> GroupedQueryAttention:
        return layer_of(**{**options, **changes}).parallelize(mesh)

    for name, state in (("fused", source.state_dict()), ("parted", parted.state_dict())):
        layer = fresh()
        layer.load_state_dict(state)
        found[f"{name} state dict"] = error(layer)
    layer = fresh()
    set_model_state_dict(layer, parted.state_dict(), options=StateDictOptions(full_state_dict=True))
    found["full state dict by torch"] = error(layer)
    sharded = fully_shard(layer_of(**options), mesh=mesh)
    sharded.load_state_dict(parted.state_dict())
    found["parted state dict into a sharded fused layer"] = error(sharded)
    sharded = fully_shard(layer_of(**options), mesh=mesh)
    set_model_state_dict(sharded, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    found["full state dict by torch into a sharded fused layer"] = error(sharded)
    full = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    again = layer_of(**options)
    again.load_state_dict(full)
    found["full state dict out of it"] = error(again)
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder / "shared")
    loaded = fully_shard(layer_of(**{**options, "fused_qkv": False}), mesh=mesh)
    state = {"layer": loaded.state_dict()}
    dcp.load(state, checkpoint_id=folder / "shared")
    loaded.load_state_dict(state["layer"])
    found["checkpoint into a sharded layer"] = error(loaded)
    loaded = fresh()
    state = {"layer": loaded.state_dict()}
    dcp.load(state, checkpoint_id=folder / "shared")
    loaded.load_state_dict(state["layer"])
    found["checkpoint into a shared layer"] = error(loaded)
    return found


def decoder_of(mesh: DeviceMesh, *, tokens: bool) -> Decoder:
    """The decoder with its heads and channels shared; ``tokens``: what lies between is sharded along the tokens."""
    torch.manual_seed(0)
    model = Decoder(config_of("sdpa", sinks=True), layers=2).double()
    place = Shard(1) if tokens else Replicate()
    for block in model.layers:
        block.attention.parallelize(mesh)
        plan: dict[str, Any] = {
            "up": ColwiseParallel(input_layouts=place),
            "down": RowwiseParallel(output_layouts=place, use_local_output=not tokens),
        }
        parallelize_module(block, mesh, plan | ({"attention_norm": SequenceParallel()} if tokens else {}))
    if tokens:
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=place, use_local_output=False)
        head = ColwiseParallel(input_layouts=place, output_layouts=Replicate())
        parallelize_module(model, mesh, {"embedding": embedding, "norm": SequenceParallel(), "head": head})
    return model


def decoder(mesh: DeviceMesh, data: DeviceMesh, *, tokens: bool) -> dict[str, float]:
    """A whole decoder against one process, with FSDP2 over ``data``."""
    torch.manual_seed(0)
    alone, model = Decoder(config_of("sdpa", sinks=True), layers=2).double(), decoder_of(mesh, tokens=tokens)
    batches = [batch_of(SEGMENTATIONS[i], seed=i) for i in range(data.size())]
    wants = [alone(ids, AttentionScope(layout), positions) for ids, layout, positions in batches]
    torch.stack([want.sin().sum() for want in wants]).mean().backward()
    for block in model.layers:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    mine = data.get_local_rank()
    ids, layout, positions = batches[mine]
    got = model(ids, AttentionScope(layout), positions)
    got.sin().sum().backward()
    wanted = named_gradients(alone)
    errors = {name: largest(grad, wanted[name]) for name, grad in named_gradients(model).items()}
    for trained in (alone, model):
        if tokens:  # else torch clips no parameters of several meshes together
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        torch.optim.AdamW(trained.parameters(), lr=0.1, foreach=False).step()
    weights = dict(alone.named_parameters())
    steps = {name: largest(parameter, weights[name]) for name, parameter in model.named_parameters()}
    return {"output": largest(got, wants[mine]), "gradients": max(errors.values()), "step": max(steps.values())}


def compiled(mesh: DeviceMesh) -> float:
    layer = layer_of(**LAYERS["all"]).parallelize(mesh)
    x, positions, layout = hidden_of(), torch.arange(S)[None], MaskLayout.causal(S)
    scope = AttentionScope(layout)
    layer.fill(scope, x, positions)
    want = layer(x, scope, positions)
    return largest(torch.compile(layer, backend="aot_eager")(x, scope, positions), want)


def copied(mesh: DeviceMesh) -> float:
    layer = layer_of(**LAYERS["all"]).parallelize(mesh)
    twin = copy.deepcopy(layer)
    twin.set_backend("sdpa")
    x, positions = hidden_of(), torch.arange(S)[None]
    want = layer(x, AttentionScope(MaskLayout.causal(S)), positions)
    return largest(twin(x, AttentionScope(MaskLayout.causal(S)), positions), want)


def main(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    if world == 2:
        mesh = init_device_mesh("cpu", (2,))
        for name, options in LAYERS.items():
            for how in ("plain", "whole", "tokens") if name in ("all", "fused") else ("tokens",):
                found[f"{name}, {how}"] = error_of(options, MaskLayout.packed([[4, 11], [9, 6]]), how, mesh)
        torch.manual_seed(1)  # one mask on all ranks
        found["mask of each head"] = error_of({}, MaskLayout.dense(torch.rand(1, 4, S, S) > 0.4), "plain", mesh)
        found = {
            "layers": found,
            "keys": keys_from_elsewhere(mesh, rank),
            "refusals": refusals(mesh),
            "states": state_dicts(mesh, folder),
            "copied": copied(mesh),
            "compiled": compiled(mesh),
        }
    elif world == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for tokens in (False, True):
            found[f"tokens {tokens}"] = decoder(both["tp"], both["dp"], tokens=tokens)
        found["mesh"] = {"two": refused(lambda: layer_of().parallelize(both))}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
