"""What polyattn costs before any attention: finding plugins by name, and the first command.

    python benchmarks/bench_start.py [--rounds 7] [--json benchmarks/results/start.json]

Three bars: names among 2,000 installed distributions in under 150 ms; one look at the path in a process, however much
is asked; ``polyattn list`` in at most a quarter of ``python -c "import torch"``. Every figure comes from fresh
processes, rounds alternate between the sides, and the median is taken, so that a busy machine slows all of them alike;
for the scan the CPU time is given too, which other processes do not change.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

NAMES = """
import sys, time
sys.path[:0] = sys.argv[1:]
import polyattn
from polyattn import backends
wall, cpu = time.perf_counter(), time.thread_time()
names = backends.names()
print(time.perf_counter() - wall, time.thread_time() - cpu)
assert "acme" in names
"""
PEER = """
import sys, time
sys.path[:0] = sys.argv[1:]
from importlib.metadata import entry_points
wall, cpu = time.perf_counter(), time.thread_time()
names = [entry_point.name for entry_point in entry_points(group="polyattn.backends")]
print(time.perf_counter() - wall, time.thread_time() - cpu)
assert "acme" in names
"""
SCANS = """
import sys
import importlib_metadata
look, looks = importlib_metadata.distributions, []
importlib_metadata.distributions = lambda: (looks.append(1), look())[1]
import torch, polyattn
for registry in (polyattn.backends, polyattn.rope_variants):
    registry.names(), registry.infos(), [registry.info(name) for name in registry.names()]
q = torch.zeros(1, 2, 4, 8)
for backend in ("eager", "sdpa", "auto"):
    polyattn.AttentionConfig.from_dict({"attn_backend": backend})
    polyattn.attention(q, q, q, polyattn.MaskLayout.causal(4), backend=backend)
polyattn.explain(polyattn.MaskLayout.full(4), polyattn.AttentionRequest.of(q, q, q))
print(len(looks))
"""


def write_distributions(folder, count):
    """What ``count`` distributions leave in a site-packages; every fourth has a command, one a backend."""
    for i in range(count):
        info = folder / f"pkg_{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pkg-{i}\nVersion: 1.0\n")
        if i % 4 == 0:
            (info / "entry_points.txt").write_text("[console_scripts]\nrun = pkg:main\n")
    info.joinpath("entry_points.txt").write_text("[polyattn.backends]\nacme = acme:Backend\n")


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def seconds(*arguments):
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def medians(rounds, sides):
    """The median of each side's figures; each side is a function that gives a tuple of numbers."""
    found = [[side() for side in sides.values()] for _ in range(rounds + 1)][1:]  # the first fills the file cache
    columns = zip(*found, strict=True)
    return {
        name: [statistics.median(figures) for figures in zip(*column, strict=True)]
        for name, column in zip(sides, columns, strict=True)
    }


def bench_names(rounds, distributions):
    with tempfile.TemporaryDirectory() as folder:
        write_distributions(Path(folder), distributions)
        sides = {"polyattn": NAMES, "importlib.metadata": PEER}
        found = medians(
            rounds,
            {name: lambda code=code: map(float, run("-c", code, folder).split()) for name, code in sides.items()},
        )
    return {
        "distributions": distributions,
        "seconds": {name: wall for name, (wall, _) in found.items()},
        "cpu_seconds": {name: cpu for name, (_, cpu) in found.items()},
        "bar_seconds": 0.15,
        "met": found["polyattn"][0] < 0.15,
    }


def bench_list(rounds):
    commands = {
        "python -c pass": ("-c", "pass"),
        "polyattn list": ("-m", "polyattn", "list"),
        "import torch": ("-c", "import torch"),
    }
    found = medians(rounds, {name: lambda command=command: (seconds(*command),) for name, command in commands.items()})
    share = found["polyattn list"][0] / found["import torch"][0]
    return {
        "seconds": {name: wall for name, (wall,) in found.items()},
        "share_of_import_torch": share,
        "bar_share": 0.25,
        "met": share <= 0.25,
    }


def bench_scans():
    scans = int(run("-c", SCANS))
    return {"scans_in_a_process": scans, "bar_scans": 1, "met": scans == 1}


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--distributions", default=2000, show_default=True, help="How many are installed.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.pass_context
def main(ctx, rounds, distributions, path):
    """Time what happens before any attention; exit status 1 when a bar is missed."""
    results = {
        "python": platform.python_version(),
        "rounds": rounds,
        "names": bench_names(rounds, distributions),
        "list": bench_list(rounds),
        "scans": bench_scans(),
    }
    print(json.dumps(results, indent=2))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    ctx.exit(0 if all(part["met"] for part in results.values() if isinstance(part, dict)) else 1)


if __name__ == "__main__":
    main()
