"""How many Python functions one attention call goes through before and around the kernel.

    python benchmarks/bench_calls.py [--grad] [--json benchmarks/results/calls.json]

Over one packed layout, with every plugin loaded and after one call of each kind: a ready prepared attention; making one
(``attention()`` less the ready call) by the name of a backend; ``attention()`` with ``auto``; asking every backend anew
(``explain``). Counted are calls of Python functions of any package, generators' steps included (``sys.setprofile``), so
the figures do not depend on the machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import torch

import polyattn
from polyattn import AttentionRequest, MaskLayout

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from python_calls import python_calls

#: The most calls that each may take, without gradients.
BARS = {"ready": 80, "making": 80, "auto": 130}


def calls(work):
    """How many calls of Python functions ``work`` makes when it is called for the second time."""
    work()
    return len(python_calls(work))


def load_all():
    for name in polyattn.backends.names():
        try:
            polyattn.backends.get(name)
        except polyattn.PolyattnError as error:
            click.echo(error, err=True)


@click.command()
@click.option("--backend", default="sdpa", help="Whose calls are counted.")
@click.option("--grad", is_flag=True, help="With gradients into q.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(backend, grad, path):
    load_all()
    layout = MaskLayout.packed([64, 64, 128])
    q, k = torch.randn(1, 8, 256, 64, requires_grad=grad), torch.randn(1, 2, 256, 64)
    request = AttentionRequest.of(q, k, k)
    prepared = polyattn.backends.get(backend).prepare(layout, request)
    ready = calls(lambda: prepared(q, k, k))
    figures = {
        "ready": ready,
        "making": calls(lambda: polyattn.attention(q, k, k, layout, backend=backend)) - ready,
        "auto": calls(lambda: polyattn.attention(q, k, k, layout, backend="auto")),
        "explain": calls(lambda: polyattn.explain(layout, request)),
    }
    for name, figure in figures.items():
        bar = "" if grad or name not in BARS else f"  (at most {BARS[name]})"
        click.echo(f"{name:8} {figure:5}{bar}")
    if path:
        path.write_text(json.dumps({"backend": backend, "grad": grad, "calls": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
