"""Random layouts, sizes, dtypes and features on every first-party backend: right, or refused properly.

``POLYATTN_HYPOTHESIS=long`` tries thousands of calls that nobody has tried before instead of the same few hundred.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given

from polyattn.testing.runner import start_trial
from polyattn.testing.strategies import PROFILES, calls
from polyattn.testing.trial import one_thread

PROFILE = PROFILES[os.environ.get("POLYATTN_HYPOTHESIS", "ci")]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_random_calls_are_right_or_refused_properly(backend):
    trial = start_trial(backend)

    @PROFILE
    @given(calls())
    def right_or_refused(call):
        trial.compare_one(*call)

    with one_thread():
        right_or_refused()
    assert trial.honoured > PROFILE.max_examples / 4
