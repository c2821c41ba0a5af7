"""fa and flex_attention on a GPU, beside direct calls of the same kernels.

``make gpu-bench`` (or ``python benchmarks/gpu_bench.py``) prints one table: milliseconds of the direct call and of
polyattn, forward alone and forward with backward, and their ratio. What is not there is named and left out. Without a
GPU it says so and ends with status 0. ``--json FILE`` also writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from polyattn import AttentionRequest, MaskLayout, backends
from polyattn_fa2 import FlashBackend, FlashOptions

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 1, 16, 4, 8192, 128
DOCUMENTS = [LENGTH // 16] * 16
WINDOW = 1024
LAYOUTS = {
    "causal": lambda: MaskLayout.causal(LENGTH),
    "window": lambda: MaskLayout.causal(LENGTH, window=WINDOW),
    "packed": lambda: MaskLayout.packed(DOCUMENTS),
}
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Missing(Exception):  # noqa: N818 - not an error: a row of the table
    """Why a direct call cannot be timed."""


def direct_flash_attn(name: str) -> Call:
    """The public functions of the package, on tensors in polyattn's layout."""
    reasons = FlashBackend(FlashOptions("flash_attn")).device_reasons(torch.device("cuda"))
    if reasons:
        raise Missing("; ".join(map(str, reasons)))
    import flash_attn

    if name == "packed":
        offsets = _offsets()
        longest = max(DOCUMENTS)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens = (x.transpose(1, 2)[0] for x in (q, k, v))
            out = flash_attn.flash_attn_varlen_func(*tokens, offsets, offsets, longest, longest, causal=True)
            return out[None].transpose(1, 2)

        return call
    sides = (WINDOW - 1, 0) if name == "window" else (-1, -1)
    return lambda q, k, v: flash_attn.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, window_size=sides
    ).transpose(1, 2)


def direct_torch_varlen(name: str) -> Call:
    """``torch.nn.attention.varlen.varlen_attn`` on the same tensors."""
    reasons = FlashBackend(FlashOptions("torch_varlen")).device_reasons(torch.device("cuda"))
    if reasons:
        raise Missing("; ".join(map(str, reasons)))
    from torch.nn.attention.varlen import varlen_attn

    offsets = _offsets() if name == "packed" else torch.tensor([0, LENGTH], dtype=torch.int32, device="cuda")
    longest = max(DOCUMENTS) if name == "packed" else LENGTH
    sides = (WINDOW - 1, 0) if name == "window" else (-1, 0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = (x.transpose(1, 2)[0] for x in (q, k, v))
        out = varlen_attn(*tokens, offsets, offsets, longest, longest, window_size=sides, enable_gqa=True)
        return out[None].transpose(1, 2)

    return call


def direct_flex(name: str) -> Call:
    """A compiled ``flex_attention`` with a ready block mask."""
    ids = torch.arange(LENGTH, device="cuda") // DOCUMENTS[0]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < WINDOW)

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[q] == ids[k])

    mod = {"causal": causal, "window": window, "packed": packed}[name]
    blocks = create_block_mask(mod, None, None, LENGTH, LENGTH, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def through_polyattn(backend: Any, name: str, tensors: list[Tensor], *, grad: bool) -> Call:
    """The same by a prepared layout."""
    request = AttentionRequest.of(*tensors, needs_grad=grad)
    reasons = backend.unsupported(LAYOUTS[name](), request)
    if reasons:
        raise Missing("; ".join(map(str, reasons)))
    prepared = backend.prepare(LAYOUTS[name]().to("cuda"), request)
    return lambda q, k, v: prepared(q, k, v).output


def _offsets() -> Tensor:
    ends = torch.tensor(DOCUMENTS).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to("cuda", torch.int32)


def milliseconds(call: Call, tensors: list[Tensor], *, grad: bool, repeats: int = 20) -> float:
    """Median time of one call on the device."""
    leaves = [x.detach().requires_grad_(grad) for x in tensors]
    incoming = torch.randn_like(call(*leaves))

    def once() -> None:
        output = call(*leaves)
        if grad:
            torch.autograd.grad(output, leaves, incoming)

    for _ in range(3):
        once()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        once()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure() -> Iterator[dict[str, Any]]:
    """One row per backend, layout and direction."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, LENGTH, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).transpose(1, 2) for shape in shapes]
    candidates = {
        "fa, flash_attn": (direct_flash_attn, FlashBackend(FlashOptions("flash_attn"))),
        "fa, torch_varlen": (direct_torch_varlen, FlashBackend(FlashOptions("torch_varlen"))),
        "flex_attention": (direct_flex, backends.get("flex_attention")),
    }
    for title, (direct, backend) in candidates.items():
        for name in LAYOUTS:
            for grad in (False, True):
                row: dict[str, Any] = {"backend": title, "layout": name, "backward": grad}
                try:
                    with torch.set_grad_enabled(grad):
                        one = milliseconds(direct(name), tensors, grad=grad)
                        other = milliseconds(through_polyattn(backend, name, tensors, grad=grad), tensors, grad=grad)
                    row |= {"direct_ms": one, "polyattn_ms": other, "ratio": other / one}
                except Missing as why:
                    row["missing"] = str(why)
                yield row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing was run: needs a CUDA device; torch finds none")
        return
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{machine}; B={BATCH} H={HEADS}/{KV_HEADS} S={LENGTH} D={WIDTH} bfloat16")
    rows = []
    for row in measure():
        rows.append(row)
        what = f"{row['backend']:18} {row['layout']:8} {'forward+backward' if row['backward'] else 'forward':17}"
        if "missing" in row:
            result = f"left out: {row['missing']}"
        else:
            times = f"direct {row['direct_ms']:8.3f} ms, polyattn {row['polyattn_ms']:8.3f} ms"
            result = f"{times}, ratio {row['ratio']:.2f}"
        print(what, result, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
