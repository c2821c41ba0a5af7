"""Time the installed backends side by side, forward and backward, on each kind of layout.

Rounds alternate between the backends and the median is taken, so that a busy machine slows all of them alike; the last
column is what to quote: the time relative to the first backend, from one run.
"""

from __future__ import annotations

import statistics
import time

import click
import torch
from rich.console import Console
from rich.table import Table

import polyattn
from polyattn import MaskLayout


def layouts(length):
    document = length // 8
    valid = torch.arange(length) < length - document
    return {
        "full": MaskLayout.full(length),
        "causal": MaskLayout.causal(length),
        f"causal, window {document}": MaskLayout.causal(length, window=document),
        f"packed, 8 documents of {document}": MaskLayout.packed([document] * 8),
        f"padded, {document} of {length}": MaskLayout.padded(valid[None]),
    }


def seconds(prepared, inputs):
    start = time.perf_counter()
    output = prepared(*inputs).output
    torch.autograd.grad(output.sum(), inputs)
    return time.perf_counter() - start


@click.command()
@click.option("--length", default=1024, show_default=True, help="Queries and keys.")
@click.option("--heads", default=8, show_default=True)
@click.option("--kv-heads", default=2, show_default=True)
@click.option("--width", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--backends", "names", default="eager,sdpa", show_default=True, help="Names, joined by commas.")
def main(length, heads, kv_heads, width, rounds, device, names):
    """Time backends side by side."""
    names = names.split(",")
    table = Table("layout", *(f"{name} (ms)" for name in names), "relative")
    inputs = [
        torch.randn(1, count, length, width, device=device, requires_grad=True) for count in (heads, kv_heads, kv_heads)
    ]
    request = polyattn.AttentionRequest.of(*inputs)
    for title, layout in layouts(length).items():
        prepared = [polyattn.backends.get(name).prepare(layout.to(device), request) for name in names]
        times = [[seconds(one, inputs) for one in prepared] for _ in range(rounds + 1)][1:]  # the first warms up
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        relative = "  ".join(f"{median / medians[0]:.2f}" for median in medians)
        table.add_row(title, *(f"{median * 1000:.1f}" for median in medians), relative)
    Console().print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}, float32, B=1, H={heads}")
    Console().print(table)


if __name__ == "__main__":
    main()
