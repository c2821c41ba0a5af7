"""``apply_rotary`` against transformers' own ``apply_rotary_pos_emb``.

    python benchmarks/bench_rope.py [--rounds 9] [--only NAME] [--json FILE]

q ``[B, 32, S, 128]``, k ``[B, 8, S, 128]``, contiguous or as the view ``[B, S, H, D]`` that a projection gives. The
peer takes its tables in the dtype of q, as its models do. Rounds alternate between the two sides and each ratio is the
median of the rounds, so that a busy machine slows both alike; but many short operations suffer more from one than few
long ones, so quote figures of a quiet machine only.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click
import torch
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as peer_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as peer_halves

import polyattn
from polyattn import RopeSpec, RotaryEmbedding, apply_rotary

PEERS = {False: peer_halves, True: peer_adjacent}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def inputs(dtype, length, view, interleaved, grad):
    """q and k, our tables as an embedding makes them, and the peer's."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for heads in (32, 8):
        shape = (1, length, heads, 128) if view else (1, heads, length, 128)
        x = torch.randn(shape, generator=generator).to(dtype)
        made.append((x.transpose(1, 2) if view else x).requires_grad_(grad))
    spec = RopeSpec(
        variant="default",
        theta=10000.0,
        head_dim=128,
        rotary_dim=128,
        interleaved=interleaved,
        max_position=4096,
        original_max_position=None,
        parameters={},
    )
    tables = RotaryEmbedding(spec)(torch.arange(4096 - length, 4096)[None])
    theirs = [torch.cat((table, table), -1).to(dtype) for table in (tables.cos, tables.sin)]
    return made, tables, theirs


def sides(dtype, length=4096, *, view=False, interleaved=False, backward=False, compiled=False):
    """The same work by the peer and by us, as two functions without arguments."""
    (q, k), tables, (cos, sin) = inputs(dtype, length, view, interleaved, backward)
    peer = PEERS[interleaved]

    def rotate(q, k, tables):
        return apply_rotary(q, k, tables, interleaved=interleaved)

    if compiled:
        torch.compiler.reset()
        peer, rotate = (torch.compile(function, fullgraph=True) for function in (peer, rotate))
    grads = [torch.randn_like(x) for x in (q, k)]

    def run(function, *given):
        def once():
            rotated = function(q, k, *given)
            return torch.autograd.grad(rotated, (q, k), grads) if backward else rotated

        return once

    return run(peer, cos, sin), run(rotate, tables)


def seconds(run, times):
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def compare(peer, ours, rounds, times=1):
    """Medians of both sides, and of the ratio peer / ours round by round."""
    peer()
    ours()
    pairs = [(seconds(peer, times), seconds(ours, times)) for _ in range(rounds)]
    return {
        "peer_ms": statistics.median(a for a, _ in pairs) * 1e3,
        "ours_ms": statistics.median(b for _, b in pairs) * 1e3,
        "times faster": statistics.median(a / b for a, b in pairs),
    }


def benches():
    """Name, bar on "times faster", how often to repeat within a round, and how to build the two sides."""
    for layout, view in (("contiguous", False), ("view", True)):
        for name, dtype in DTYPES.items():
            forward, backward = (1.6, 1.8) if name == "bf16" else (2.4, 2.3)
            yield f"forward {name} {layout}", forward, 1, lambda d=dtype, v=view: sides(d, view=v)
            yield (
                f"forward+backward {name} {layout}",
                backward,
                1,
                lambda d=dtype, v=view: sides(d, view=v, backward=True),
            )
            yield (
                f"adjacent forward {name} {layout}",
                forward,
                1,
                lambda d=dtype, v=view: sides(d, view=v, interleaved=True),
            )
            yield f"compiled {name} {layout}", 1.8, 1, lambda d=dtype, v=view: sides(d, view=v, compiled=True)
    for name, dtype in DTYPES.items():
        yield f"one position {name}", 1 / 1.7, 200, lambda d=dtype: sides(d, 1)
        yield f"adjacent one position {name}", 1 / 1.7, 200, lambda d=dtype: sides(d, 1, interleaved=True)


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--only", default="", help="Run the benchmarks whose name contains this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(rounds, only, path):
    """Print how many times faster than transformers the rotation is, and the bar."""
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads(), "polyattn": polyattn.__version__}
    results = {"versions": versions, "rounds": rounds}
    for name, bar, times, build in benches():
        if only not in name:
            continue
        peer, ours = build()
        results[name] = found = compare(peer, ours, rounds, times) | {"bar": bar}
        verdict = "ok" if found["times faster"] >= bar else "BELOW"
        print(
            f"{name:36} peer {found['peer_ms']:8.3f} ms  ours {found['ours_ms']:8.3f} ms  "
            f"{found['times faster']:5.2f}x  bar {bar:.2f}x  {verdict}",
            flush=True,
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
