"""Two ways of doing the same, timed in turn, and the report of a file of benchmarks."""

from __future__ import annotations

import json
import statistics
import time

import torch

import polyattn


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def against(first, second, rounds):
    """Medians of both sides and of the ratio second / first, pair by pair, after a warm-up of each."""
    first()
    second()
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    a, b = zip(*pairs, strict=True)
    return {
        "ours_s": statistics.median(a),
        "peer_s": statistics.median(b),
        "ratio": statistics.median(y / x for x, y in pairs),
    }


def report(benches, only, path):
    """Print the figures of the benchmarks whose names contain ``only``, and write them to ``path``, if it is given."""
    results = {
        "versions": {"torch": torch.__version__, "threads": torch.get_num_threads(), "polyattn": polyattn.__version__}
    }
    for name, bench in benches.items():
        if only in name:
            results[name] = bench()
            shown = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in results[name].items())
            print(f"{name}: {shown}", flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
