"""The conformance kit on fa, with stand-ins for its kernels."""

from __future__ import annotations

import pytest

from fa_stand_in import stand_in
from polyattn.testing import BackendConformance
from polyattn_conformance.checks import CHECKS
from polyattn_conformance.runner import start_trial
from polyattn_fa2 import FlashBackend, FlashOptions


class TestFlashAttn(BackendConformance):
    backend = "fa"
    expected_failures = {"nothing_kept": "the stand-in records the calls that it gets"}

    @pytest.fixture(autouse=True)
    def kernels(self):
        with stand_in("flash_attn"):
            yield

    def test_the_stand_in_is_what_is_checked(self):
        assert not start_trial(self.backend).absent


#: What the other provider does alike.
QUICK = ("values", "lse", "fully_masked_rows", "mixture[small]", "compiled[packed]")


class TestTorchVarlen(BackendConformance):
    backend = FlashBackend(FlashOptions(provider="torch_varlen"))

    @pytest.mark.parametrize(
        "check",
        [pytest.param(of, id=of.id, marks=[] if of.id.startswith(QUICK) else [pytest.mark.nightly]) for of in CHECKS],
    )
    def test_conforms(self, check):
        super().test_conforms(check)

    @pytest.fixture(autouse=True)
    def kernels(self):
        with stand_in("torch_varlen"):
            yield

    def test_the_stand_in_is_what_is_checked(self):
        assert not start_trial(self.backend).absent
