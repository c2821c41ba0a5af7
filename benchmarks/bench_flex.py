"""The flex_attention backend on a CPU against torch's flex_attention called directly, and its option ``dynamic``.

    python benchmarks/bench_flex.py [--rounds 15] [--json FILE]

Forward, FP32, B=1, H=8, D=64. Rounds alternate between the two sides, so that a busy machine slows both alike; the
ratios are what to quote. Building a block mask is measured in a process of its own, by the least wall time of three and
by how far they raise the highest resident size.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
from pathlib import Path

import click
import torch
from pairs import seconds
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from polyattn import AttentionRequest, MaskLayout, backends

HEADS, WIDTH = 8, 64


def request():
    return AttentionRequest(
        batch=1,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def windowed(window):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return mask_mod


def random_tensors(length):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


def forward(length, window, rounds, others=()):
    """Ours, prepared, against a direct call compiled for this length, with a ready BlockMask.

    With ``others`` ours is the option ``dynamic``, after it has served those lengths.
    """
    backend = backends.resolve("flex_attention", {"dynamic": bool(others)})
    for other in others:
        with torch.no_grad():
            backend.prepare(MaskLayout.causal(other, window=window), request())(*random_tensors(other))
    qkv = random_tensors(length)
    prepared = backend.prepare(MaskLayout.causal(length, window=window), request())
    block_mask = create_block_mask(windowed(window), None, None, length, length, device="cpu")
    direct = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    with torch.no_grad():
        difference = (prepared(*qkv).output - direct(*qkv, block_mask=block_mask)).abs().max().item()
        pairs = [
            (seconds(lambda: prepared(*qkv)), seconds(lambda: direct(*qkv, block_mask=block_mask)))
            for _ in range(rounds)
        ]
    ours, theirs = zip(*pairs, strict=True)
    return {
        "ours_s": statistics.median(ours),
        "direct_s": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "ratio_of_minima": min(ours) / min(theirs),
        "largest_difference": difference,
    }


def build(side, length, window, queue):
    """Build a block mask and send the seconds that it took, and by how many MiB the peak rose, through ``queue``."""

    def ours(size):
        return backends.get("flex_attention").prepare(MaskLayout.causal(size, window=window), request())

    def theirs(size):
        return create_block_mask(windowed(window), None, None, size, size, device="cpu")

    run = {"ours": ours, "create_block_mask": theirs}[side]
    run(256)  # whatever is imported or allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = min(seconds(lambda: run(length)) for _ in range(3))
    queue.put((taken, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def building(length, window):
    result = {}
    spawning = multiprocessing.get_context("spawn")
    for side in ("ours", "create_block_mask"):
        queue = spawning.Queue()
        process = spawning.Process(target=build, args=(side, length, window, queue))
        process.start()
        result[f"{side}_s"], result[f"{side}_mib"] = queue.get()
        process.join()
    return result


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(rounds, path):
    report = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "block mask, S=16384, window 512": building(16384, 512) | {"bar": "< 0.2 s, < 64 MiB"},
        "forward, S=8192, window 512": forward(8192, 512, rounds) | {"bar": "ratio <= 1.1"},
        "forward, S=2048, window 128": forward(2048, 128, rounds),
        # Last, since the kernels of the option serve all later calls of this process.
        "option dynamic, S=4096, window 512": forward(4096, 512, rounds, others=(1001, 777)) | {"bar": "ratio <= 1.1"},
        "option dynamic, S=2048, window 128": forward(2048, 128, rounds, others=(1001, 777)),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
