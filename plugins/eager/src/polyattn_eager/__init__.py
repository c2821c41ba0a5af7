"""The readable reference backend, in plain torch operations.

Every feature of the vocabulary is honoured on every device that runs them, ``torch.func`` transforms and second
derivatives included. The cost is quadratic in memory: the scores ``[B, Hq, Q, K]`` are materialised.
"""

from __future__ import annotations

from polyattn_eager._backend import EagerBackend, EagerState

__all__ = ["EagerBackend", "EagerState"]
