"""The conformance kit on fa, with stand-ins for its kernels."""

from __future__ import annotations

import pytest

from fa_stand_in import stand_in
from polyattn.testing import BackendConformance
from polyattn.testing.runner import start_trial
from polyattn_fa2 import FlashBackend, FlashOptions


class TestFlashAttn(BackendConformance):
    backend = "fa"

    @pytest.fixture(scope="class")
    @classmethod
    def trial(cls):
        with stand_in("flash_attn"):
            yield start_trial(cls.backend)


class TestTorchVarlen(BackendConformance):
    backend = FlashBackend(FlashOptions(provider="torch_varlen"))

    @pytest.fixture(scope="class")
    @classmethod
    def trial(cls):
        with stand_in("torch_varlen"):
            yield start_trial(cls.backend)
