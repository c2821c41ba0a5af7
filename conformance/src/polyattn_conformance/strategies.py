"""Random attention calls for hypothesis."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from polyattn import FEATURES
from polyattn_conformance.case import Case, Mode
from polyattn_conformance.random_calls import Draw

#: name -> settings. ``ci`` is the same on every run; ``long`` looks for what nobody has seen yet.
PROFILES = {
    "ci": settings(max_examples=300, derandomize=True, deadline=None, database=None),
    "long": settings(
        max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    ),
}


def calls(features: Collection[str] = FEATURES) -> st.SearchStrategy[tuple[Case, Mode]]:
    """Whole attention calls and what is asked of them.

    Args:
        features: words of :data:`polyattn.FEATURES` that a call may use, such as a backend's abilities.
    """
    return st.randoms(use_true_random=False).map(lambda random: Draw(random, features).call())
