"""The sdpa backend against the path of transformers' ``attn_implementation="sdpa"``, mask function included.

    python benchmarks/bench_attention.py [--rounds 5] [--only NAME] [--json FILE]

Forward and backward, FP32, H=8, D=64 unless a line says otherwise. Rounds alternate between the two sides and each
figure is a median, so that a busy machine slows both alike; the ratios are what to quote.

The lines "BF16" and "FP16" compare the sdpa backend with itself, its option ``upcast_backward`` on and off. On a CPU
with AMX run them as on one without:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 python benchmarks/bench_attention.py --only upcast
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import click
import psutil
import torch
from pairs import against, report, seconds
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import polyattn
from polyattn import AttentionRequest, MaskLayout

HEADS, WIDTH = 8, 64
SDPA = polyattn.backends.get("sdpa")


class Peer(torch.nn.Module):
    """What transformers' sdpa reads off an attention module."""

    is_causal = True
    num_key_value_groups = 1


def config_of(window=None):
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=1
    )
    config.sliding_window = window
    config._attn_implementation = "sdpa"
    return config


def tensors(length, batch=1, heads=HEADS, grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, length, WIDTH, generator=generator).requires_grad_(grad) for _ in range(3)]


def ours(qkv, layout, grad, backend=SDPA):
    def run():
        made = layout()
        output = backend.prepare(made, AttentionRequest.of(*qkv))(*qkv).output
        torch.autograd.grad(output, qkv, grad)

    return run


def theirs(qkv, grad, window=None, position_ids=None, attention_mask=None):
    config, module = config_of(window), Peer()
    embeds = torch.empty(qkv[0].shape[0], qkv[0].shape[2], 1)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask

    def run():
        mask = make(
            config=config,
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        output, _ = sdpa_attention_forward(module, *qkv, mask, scaling=WIDTH**-0.5)
        torch.autograd.grad(output.transpose(1, 2), qkv, grad)

    return run


def documents(rounds):
    length, count = 8192, 16
    qkv, grad = tensors(length), torch.randn(1, HEADS, length, WIDTH)
    size = length // count
    positions = torch.arange(size).repeat(count)[None]
    return against(
        ours(qkv, lambda: MaskLayout.packed([size] * count), grad), theirs(qkv, grad, position_ids=positions), rounds
    ) | {"bar": ">= 12"}


def window_of(width, bar):
    def run(rounds):
        length = 8192
        qkv, grad = tensors(length), torch.randn(1, HEADS, length, WIDTH)
        return against(
            ours(qkv, lambda: MaskLayout.causal(length, window=width), grad), theirs(qkv, grad, window=width), rounds
        ) | {"bar": bar}

    return run


def growth(rounds):
    runs = []
    for length in (8192, 16384):
        qkv, grad = tensors(length), torch.randn(1, HEADS, length, WIDTH)
        runs.append(ours(qkv, lambda n=length: MaskLayout.causal(n, window=512), grad))
    return against(*runs, rounds) | {"bar": "<= 2.3"}


def padded(active, bar):
    def run(rounds):
        lengths = torch.linspace(256, 2048, 8).long()
        valid = torch.arange(2048)[None] < lengths[:, None]
        qkv, grad = tensors(2048, batch=8), torch.randn(8, HEADS, 2048, WIDTH)
        queries = {"active_queries": valid} if active else {}
        return against(
            ours(qkv, lambda: MaskLayout.padded(valid, **queries), grad),
            theirs(qkv, grad, attention_mask=valid.long()),
            rounds,
        ) | {"bar": bar}

    return run


def plain(length):
    def run(rounds):
        qkv, grad = tensors(length), torch.randn(1, HEADS, length, WIDTH)
        prepared = SDPA.prepare(MaskLayout.causal(length), AttentionRequest.of(*qkv))

        def direct():
            torch.autograd.grad(scaled_dot_product_attention(*qkv, is_causal=True), qkv, grad)

        def call():
            torch.autograd.grad(prepared(*qkv).output, qkv, grad)

        pairs = max(15, rounds)
        itself = against(direct, direct, pairs)["ratio"]
        return against(direct, call, pairs) | {"bar": "<= 1.03", "direct against itself": itself}

    return run


def overhead(rounds):
    """Microseconds that a prepared call costs over the direct one on ``[1, 4, 16, 64]``, forward."""
    result = {"bar": "<= 8 (full, causal), <= 80 (one packed document)"}
    qkv = tensors(16, heads=4, grad=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, layout, causal, calls in (
        ("full", MaskLayout.full(16), False, 2000),
        ("causal", MaskLayout.causal(16), True, 2000),
        ("one document", MaskLayout.packed([16]), True, 500),
    ):
        prepared = SDPA.prepare(layout, AttentionRequest.of(*qkv))

        def many(call, calls=calls):
            def run():
                for _ in range(calls):
                    call()

            return run

        timed = against(
            many(lambda c=causal: scaled_dot_product_attention(*qkv, is_causal=c)),
            many(lambda p=prepared: p(*qkv)),
            max(15, rounds),
        )
        result[name] = (timed["peer_s"] - timed["ours_s"]) / calls * 1e6
    torch.set_num_threads(threads)
    return result


def peak_of(qkv, layout, grad, backend=SDPA):
    """Peak growth of the process in bytes, q, k, v and the output's gradient counted, and its ratio to what is held.

    That is twice their size: q, k, v, the output, and a gradient of each.
    """
    process = psutil.Process()
    peak = Path("/proc/self/clear_refs")
    if not peak.exists():
        return {"skipped": "needs /proc/self/clear_refs to reset the peak"}
    small = [x[:, :, :256].detach().requires_grad_() for x in qkv]
    ours(small, lambda: MaskLayout.causal(256, window=64), grad[:, :, :256], backend)()  # what torch allocates once
    before = process.memory_info().rss
    peak.write_text("5")
    ours(qkv, layout, grad, backend)()
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    top = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    already = sum(x.numel() * x.element_size() for x in (*qkv, grad))
    grown = top - before + already
    return {"ratio": grown / (2 * already), "bytes": grown}


def memory(rounds):
    """Peak growth of the process at S=16384, window 512, over the size of q, k, v, output and their gradients."""
    length = 16384
    qkv, grad = tensors(length), torch.randn(1, HEADS, length, WIDTH)
    return peak_of(qkv, lambda: MaskLayout.causal(length, window=512), grad) | {"bar": "<= 1.3"}


def upcast(dtype, layout):
    """Option ``upcast_backward`` of the sdpa backend, on against off: time and peak memory."""
    on, off = (polyattn.backends.resolve("sdpa", {"upcast_backward": value}) for value in (True, False))

    def run(rounds):
        qkv = [x.detach().to(dtype).requires_grad_() for x in tensors(4096)]
        grad = torch.randn_like(qkv[0])
        result = against(ours(qkv, layout, grad, on), ours(qkv, layout, grad, off), rounds)
        peaks = {f"peak {name}": peak_of(qkv, layout, grad, side) for name, side in (("on", on), ("off", off))}
        return result | {"bar": ">= 2 without AMX"} | {f"{k} ratio": v.get("ratio") for k, v in peaks.items()}

    return run


def rate(rounds):
    """FP32 matrix product of 2048, GFLOP/s: what shares of peak refer to."""
    a = torch.randn(2048, 2048)
    a @ a
    return {"gflops": 2 * 2048**3 / statistics.median(seconds(lambda: a @ a) for _ in range(rounds)) / 1e9}


BENCHES = {
    "matrix product": rate,
    "16 documents in 8192": documents,
    "window 512 in 8192": window_of(512, ">= 9"),
    "window 128 in 8192": window_of(128, ">= 15"),
    "window 512, 16384 over 8192": growth,
    "8 padded rows, every row computed": padded(False, ">= 2"),
    "8 padded rows, padding inactive": padded(True, ">= 3.5"),
    "plain causal 4096": plain(4096),
    "overhead of a call, microseconds": overhead,
    "peak memory at 16384, window 512": memory,
    "BF16 upcast, 8 documents in 4096": upcast(torch.bfloat16, lambda: MaskLayout.packed([512] * 8)),
    "BF16 upcast, window 512 in 4096": upcast(torch.bfloat16, lambda: MaskLayout.causal(4096, window=512)),
    "BF16 upcast, causal 4096": upcast(torch.bfloat16, lambda: MaskLayout.causal(4096)),
    "FP16 upcast, window 512 in 4096": upcast(torch.float16, lambda: MaskLayout.causal(4096, window=512)),
}


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="Run the benchmarks whose name contains this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(rounds, only, path):
    """Print the ratios, and their bars, of the sdpa backend against transformers' sdpa."""
    report({name: functools.partial(bench, rounds) for name, bench in BENCHES.items()}, only, path)


if __name__ == "__main__":
    main()
