"""Write docs/capabilities.md from what the installed backends answer.

    python tools/capabilities.py [--check]

Each cell is a backend's own answer (``unsupported``) to one layout and one request; nothing here says what a backend
can do. ``--check`` writes nothing and fails when the page is out of date.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import polyattn
from polyattn import AttentionRequest, MaskLayout, Reason, StructuredMask

PAGE = Path(__file__).parent.parent / "docs" / "capabilities.md"
LENGTH = 8
HERE = frozenset({"device", "kernel"})  # reasons that speak of the machine, not of the backend

VALID = torch.tensor([[True] * 6 + [False] * 2])
POSITIONS = torch.arange(LENGTH)[None] * 3
LAYOUTS = {
    "full": MaskLayout.full(LENGTH),
    "causal": MaskLayout.causal(LENGTH),
    "causal, fewer queries than keys": MaskLayout.causal(3, LENGTH),
    "causal window": MaskLayout.causal(LENGTH, window=3),
    "bidirectional window": MaskLayout(
        q_len=LENGTH, kv_len=LENGTH, batch=1, heads=1, visibility=StructuredMask(window=3)
    ),
    "window of two sides": MaskLayout.full(LENGTH).with_window((3, 1)),
    "window with sink tokens": MaskLayout.causal(LENGTH, window=2, sink_tokens=1),
    "padded": MaskLayout.padded(VALID),
    "padded, holes between the keys": MaskLayout.padded(torch.tensor([[True, False] * 4])),
    "padded, holes, window": MaskLayout.padded(torch.tensor([[True, False] * 4]), window=3),
    "packed documents": MaskLayout.packed([3, 5]),
    "packed documents, window": MaskLayout.packed([3, 5], window=2),
    "prefix": MaskLayout.prefix_lm(torch.tensor([3]), LENGTH),
    "chunks": MaskLayout.chunked(4, LENGTH),
    "block causal": MaskLayout.block_causal(3, LENGTH),
    "tree": MaskLayout.tree([-1, 0, 0], [4, 2, 2]),
    "union of structures": MaskLayout.causal(LENGTH, window=2) | MaskLayout.packed([4, 4]),
    "explicit positions": MaskLayout(
        q_len=LENGTH,
        kv_len=LENGTH,
        batch=1,
        heads=1,
        visibility=StructuredMask(causal=True, window=4, q_positions=POSITIONS, kv_positions=POSITIONS),
    ),
    "dense mask": MaskLayout.dense(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
    "a mask for each head": MaskLayout.dense(torch.ones(1, 4, LENGTH, LENGTH, dtype=torch.bool)),
    "mask_mod": MaskLayout.from_mod(lambda b, h, q, k: k <= q, q_len=LENGTH, kv_len=LENGTH),
    "inactive queries": MaskLayout.causal(LENGTH, active_queries=VALID),
}
REQUESTS = {
    "bfloat16": {},
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "float64": {"dtype": torch.float64},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "values of another width": {"v_head_dim": 32},
    "gradients": {"needs_grad": True},
    "bias": {"has_bias": True},
    "bias, gradients of q, k, v": {"has_bias": True, "needs_grad": True},
    "bias with gradients": {"has_bias": True, "needs_grad": True, "needs_bias_grad": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"has_sinks": True},
    "sinks, gradients": {"has_sinks": True, "needs_grad": True},
    "LSE": {"needs_lse": True},
    "gradients through the LSE": {"needs_lse": True, "needs_lse_grad": True, "needs_grad": True},
    "LSE with a bias under gradients": {"needs_lse": True, "has_bias": True, "needs_grad": True},
    "dropout": {"dropout_p": 0.1, "training": True, "needs_grad": True},
    "dropout with LSE": {"dropout_p": 0.1, "training": True, "needs_lse": True, "needs_grad": True},
    "deterministic algorithms": {"deterministic": True, "needs_grad": True},
}
DEVICES = ("cpu", "cuda")
BASE = {
    "batch": 1,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "v_head_dim": 64,
    "dtype": torch.bfloat16,  # the dtype that every backend's kernels know
}


def answers(name: str, device: str) -> Iterator[tuple[str, tuple[Reason, ...]]]:
    """What the backend says to each layout and each request."""
    backend = polyattn.backends.get(name)
    plain = AttentionRequest(**BASE, device=torch.device(device))
    for title, layout in LAYOUTS.items():
        yield title, backend.unsupported(layout, plain)
    for title, fields in REQUESTS.items():
        yield title, backend.unsupported(LAYOUTS["causal"], dataclasses.replace(plain, **fields))


def of_device(reasons: tuple[Reason, ...]) -> bool:
    """Whether a refusal is about the kind of device."""
    return any(reason.feature == "device" for reason in reasons)


def table(device: str) -> str:
    """The answers for one kind of device, with their reasons below."""
    columns = {name: dict(answers(name, device)) for name in polyattn.backends.names()}
    absent = [name for name, column in columns.items() if device == "cpu" and all(map(of_device, column.values()))]
    names = [name for name in columns if name not in absent]
    notes: dict[str, int] = {}

    def cell(reasons: tuple[Reason, ...]) -> str:
        own = [reason for reason in reasons if reason.feature not in HERE]
        if not own:
            return "yes"
        marks = []
        for reason in own:
            text = f"`{reason.code}`: needs {reason.need}" + (f"; {reason.hint}" if reason.hint else "")
            marks.append(notes.setdefault(text, len(notes) + 1))
        return "no " + " ".join(f"[{mark}]" for mark in marks)

    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for title in [*LAYOUTS, *REQUESTS]:
        lines.append(f"| {title} | " + " | ".join(cell(columns[name][title]) for name in names) + " |")
    lines += ["", *(f"`{name}` does not run on this kind of device and refuses everything." for name in absent)]
    listed = [f"- [{mark}] {text}" for text, mark in notes.items()]
    return "\n".join([*lines, "", *listed])


def page() -> str:
    """The whole page."""
    return f"""# What each backend does

`python tools/capabilities.py` writes this page from the backends' own answers; do not edit it. "yes" means that the
numbers equal the FP64 reference within the bounds of the [conformance kit](conformance.md), which runs what is declared
here and asserts that the rest is refused. Everything else is refused before any work, with the reasons below; `polyattn
explain` and `polyattn.explain(layout, request)` give them for your own layout and request.

The questions about layouts are in bfloat16 without gradients, those about features under a causal layout. Heads are 64
wide.

## On a CPU

{table("cpu")}

## On a CUDA device

These are the backends' answers for a CUDA device, without the reasons of one machine (no GPU, a kernel that is not
installed). [gpu-results.md](gpu-results.md) says which of it has run on hardware.

{table("cuda")}
"""


def main() -> None:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit("docs/capabilities.md is out of date; run: python tools/capabilities.py")
        return
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
