"""Two ways of doing the same, timed in turn."""

from __future__ import annotations

import statistics
import time


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
