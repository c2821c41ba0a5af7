"""One of several gloo processes: attention over tokens of all ranks against one process; writes what it found as JSON.

``python context_ranks.py RANK WORLD FOLDER``
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from decoder import Decoder, config_of
from polyattn import AttentionScope, MaskLayout, PolyattnError, attention
from polyattn_context_parallel import ContextParallelScope, Shard, context_parallel_attention

S = 46  # divides by none of 3 and 4


def no_diagonal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx != kv_idx


def layouts() -> dict[str, MaskLayout]:
    torch.manual_seed(1)
    dense = torch.rand(2, 1, S, S) > 0.6
    holes = torch.rand(2, S) > 0.3
    return {
        "full": MaskLayout.full(S),
        "causal": MaskLayout.causal(S),
        "window": MaskLayout.causal(S, window=7),
        "window and sink tokens": MaskLayout.causal(S, window=7, sink_tokens=3),
        "packed": MaskLayout.packed([20, 3, 9, 14]),
        "packed, two rows": MaskLayout.packed([[20, 3, 9, 14], [30, 16]]),
        "packed and window": MaskLayout.packed([20, 3, 9, 14], window=5),
        "padded": MaskLayout.padded(lengths=[46, 17], kv_len=S, side="left"),
        "holes": MaskLayout.padded(holes),
        "prefix": MaskLayout.prefix_lm([9, 21], S),
        "chunked": MaskLayout.chunked(8, S),
        "shared prefix": MaskLayout.shared_prefix(10, [12, 24]),
        "union": MaskLayout.causal(S, window=4) | MaskLayout.packed([20, 26]),
        "dense": MaskLayout.dense(dense),
        "dense heads": MaskLayout.dense(torch.rand(1, 4, S, S) > 0.5),
        "mask_mod": MaskLayout.from_mod(no_diagonal, q_len=S, kv_len=S),
        "inactive": MaskLayout.causal(S, active_queries=(torch.arange(S) % 5 > 0)[None]),
        "nothing": MaskLayout.dense(torch.zeros(1, 1, S, S, dtype=torch.bool)),
    }


def tensors(layout: MaskLayout, heads: int, kv_heads: int, width: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(2)
    shapes = [(2, heads, layout.q_len, width), (2, kv_heads, layout.q_len, width), (2, kv_heads, layout.q_len, width)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*made, torch.randn(heads, dtype=torch.float64)]


def loss(result: Any, weights: torch.Tensor) -> torch.Tensor:
    lse = torch.where(result.lse == -torch.inf, 0.0, result.lse)
    return (result.output * weights).sum() + (lse * weights[..., 0]).sum()


def error_of(case: tuple[Any, ...], group: Any) -> float:
    """The largest error of output, LSE and gradients against one process; infinite where two runs differ."""
    layout, method, balance, backend, (heads, kv_heads), softcap = case
    shard = Shard.of(layout, group, balance=balance)
    whole = [x.requires_grad_() for x in tensors(layout, heads, kv_heads)]
    torch.manual_seed(3)
    weights = torch.randn(2, heads, layout.q_len, 8, dtype=torch.float64)
    want = attention(*whole[:3], layout, backend=backend, sinks=whole[3], return_lse=True, softcap=softcap)
    wanted = torch.autograd.grad(loss(want, weights), whole)
    runs = []
    for _ in range(2):
        mine = [shard.take(x.detach(), 2).requires_grad_() for x in whole[:3]]
        sinks = whole[3].detach().requires_grad_()
        asked: dict[str, Any] = {"backend": backend, "method": method, "return_lse": True, "softcap": softcap}
        got = context_parallel_attention(*mine, shard, sinks=sinks, **asked)
        grads = torch.autograd.grad(loss(got, shard.take(weights, 2)), [*mine, sinks])
        dist.all_reduce(grads[3], group=group)
        runs.append((got.output.detach(), got.lse.detach(), *grads))
    if not all(map(torch.equal, runs[0], runs[1])):
        return float("inf")
    parts = [shard.take(x.detach(), 2) for x in (want.output, want.lse, *wanted[:3])]
    return max(map(difference, runs[0], [*parts, wanted[3]]))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = (torch.where(x == -torch.inf, -1e4, x) for x in (a, b))
    return (a - b).abs().max().item() if a.numel() else 0.0


def grid(group: Any, *, whole: bool) -> dict[str, float]:
    """The error of each case that one process can do; the full grid, or every third of it."""
    backends, heads = ("eager", "sdpa"), ((4, 2), (4, 1), (6, 3))
    cases = list(
        itertools.product(layouts().items(), ("gather", "ulysses", "ring"), ("contiguous", "zigzag", "documents"))
    )
    found = {}
    for i, ((name, layout), method, balance) in enumerate(cases):
        for j, (backend, pair) in enumerate(itertools.product(backends, heads)):
            if (not whole and j != i % 6) or (layout.heads > 1 and pair[0] != layout.heads):
                continue
            softcap = 2.0 if backend == "eager" and i % 2 else None
            found[f"{name} {method} {balance} {backend} {pair}"] = error_of(
                (layout, method, balance, backend, pair, softcap), group
            )
    return found


def refused(call: Any) -> str:
    try:
        call()
    except PolyattnError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagreements(rank: int, group: Any) -> dict[str, str]:
    """The errors of ranks that ask for different things."""
    torch.manual_seed(0)
    other = MaskLayout.packed([20, 26] if rank else [26, 20])
    causal = Shard.of(MaskLayout.causal(S), group, balance="contiguous")
    q = torch.randn(1, 4, len(causal.mine), 8)
    packed = Shard.of(other, group, balance="contiguous")

    def attend(shard: Shard = causal, x: torch.Tensor = q, **asked: Any) -> None:
        context_parallel_attention(x, x, x, shard, **{"backend": "eager", **asked})

    return {
        "layout": refused(lambda: attend(packed)),
        "dtype": refused(lambda: attend(x=q.double() if rank else q)),
        "method": refused(lambda: attend(method="ring" if rank else "gather")),
        "backend": refused(lambda: attend(backend="sdpa" if rank else "eager")),
        "one refuses": refused(lambda: attend(dropout_p=0.5, training=bool(rank))),
        "dropout": refused(lambda: attend(dropout_p=0.5, training=True)),
        "whole tensor": refused(lambda: attend(x=torch.randn(1, 4, S, 8))),
        "heads": refused(lambda: attend(x=q[:, :1], method="ulysses")),
        "still works": refused(attend),
    }


def late(rank: int, group: Any) -> str:
    """What the first rank says about one that does not come."""
    shard = Shard.of(MaskLayout.causal(S), group)
    q = torch.randn(1, 4, len(shard.mine), 8)
    if rank:
        time.sleep(2)
        return ""
    return refused(lambda: context_parallel_attention(q, q, q, shard, backend="eager", timeout=0.5))


def model(group: Any) -> dict[str, Any]:
    """A decoder with rotary embeddings and windows, packed documents, against one process."""
    torch.manual_seed(0)
    decoder = Decoder(config_of("sdpa", sinks=True), layers=2).double()
    layout = MaskLayout.packed([20, 3, 9, 14])
    tokens, positions = torch.randint(50, (1, S)), layout.token_positions()
    want = decoder(tokens, AttentionScope(layout), positions)
    want.sin().sum().backward()
    wanted = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    shard = Shard.of(layout, group, balance="zigzag")
    scope, mine = ContextParallelScope(shard), shard.take(positions)
    got = decoder(shard.take(tokens), scope, mine)
    got.sin().sum().backward()
    for parameter in decoder.parameters():
        dist.all_reduce(parameter.grad, group=group)
    errors = [difference(p.grad, w) for p, w in zip(decoder.parameters(), wanted, strict=True)]
    local = torch.arange(len(shard.mine))[None]
    other = MaskLayout.causal(len(shard.mine))
    request = scope.kept("attention")[0].request
    return {
        "output": difference(shard.gather(got), want.detach()),
        "gradients": max(errors),
        "builds": scope.builds["attention"],
        "local positions": refused(lambda: decoder(shard.take(tokens), ContextParallelScope(shard), local)),
        "other layout": refused(lambda: scope.prepare("sdpa", request, layout=other)),
    }


def handshake(group: Any) -> float:
    """Milliseconds that the ranks need to agree, the median."""
    from polyattn_context_parallel.handshake import agree

    times = []
    for _ in range(21):
        dist.barrier(group)
        start = time.perf_counter()
        agree(group, {"layout": "abc", "method": "gather"}, "", 30.0)
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[10]


def main(rank: int, world: int, folder: Path, what: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    group = dist.group.WORLD
    found: dict[str, Any] = {"grid": grid(group, whole=what == "whole")}
    if what != "whole":
        found["disagreements"] = disagreements(rank, group)
        found["model"] = model(group)
        found["handshake"] = handshake(group)
        found["late"] = late(rank, dist.new_group(list(range(world))))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    with contextlib.suppress(RuntimeError):  # after a rank was late, the group may be gone
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
