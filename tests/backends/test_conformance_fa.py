"""The conformance kit on fa, with stand-ins for its kernels."""

from __future__ import annotations

import pytest

from fa_stand_in import stand_in
from polyattn_conformance.runner import start_trial
from polyattn_fa2 import FlashBackend, FlashOptions
from quick_kit import QuickConformance


class TestFlashAttn(QuickConformance):
    backend = "fa"
    expected_failures = {"nothing_kept": "the stand-in records the calls that it gets"}

    @pytest.fixture(autouse=True)
    def kernels(self):
        with stand_in("flash_attn"):
            yield

    def test_the_stand_in_is_what_is_checked(self):
        assert not start_trial(self.backend).absent


class TestTorchVarlen(QuickConformance):
    backend = FlashBackend(FlashOptions(provider="torch_varlen"))

    @pytest.fixture(autouse=True)
    def kernels(self):
        with stand_in("torch_varlen"):
            yield

    def test_the_stand_in_is_what_is_checked(self):
        assert not start_trial(self.backend).absent
