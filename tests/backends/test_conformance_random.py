"""Random layouts, sizes, dtypes and features on every first-party backend: right, or refused properly.

``POLYATTN_HYPOTHESIS=long`` tries thousands of calls that nobody has tried before instead of the same few hundred.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given

from fa_stand_in import stand_in
from polyattn import backends
from polyattn_conformance.runner import start_trial
from polyattn_conformance.strategies import PROFILES, calls
from polyattn_conformance.trial import one_thread

PROFILE = PROFILES[os.environ.get("POLYATTN_HYPOTHESIS", "ci")]


def check(backend, calls):
    """Every call is right or refused properly, and a fair share of them is not refused."""
    trial = start_trial(backend)

    @PROFILE
    @given(calls)
    def right_or_refused(call):
        trial.compare_one(*call)

    with one_thread():
        right_or_refused()
    assert trial.honoured > PROFILE.max_examples / 5


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_random_calls_are_right_or_refused_properly(backend):
    check(backend, calls())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
def test_random_calls_of_uncompiled_flex_are_right_or_refused_properly():
    check(backends.resolve("flex_attention", {"compiled": False}), calls())


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["flash_attn", "torch_varlen"])
def test_random_calls_of_fa_on_a_stand_in_are_right_or_refused_properly(provider):
    with stand_in(provider):
        backend = backends.resolve("fa", {"provider": provider})
        check(backend, calls(backend.abilities))
