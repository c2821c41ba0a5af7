"""The conformance kit in a short form: ``make test`` runs some families of checks, ``make nightly`` all of them."""

from __future__ import annotations

import pytest

from polyattn.testing import BackendConformance
from polyattn_conformance.checks import CHECKS

FAMILIES = (
    "values", "lse", "fully_masked_rows", "bias", "softcap", "sinks", "together", "window", "two_sided_window", "gqa",
    "width", "dtype", "unknown_field", "mixture[small]", "compiled[packed]", "recompiles", "packed_is_separate",
    "sink_tokens_survive", "branch_is_a_row",
)  # fmt: skip


def _param(check):
    family = check.id.partition("[")[0]
    quick = check.id in FAMILIES or family in FAMILIES
    return pytest.param(check, id=check.id, marks=() if quick else pytest.mark.nightly)


class QuickConformance(BackendConformance):
    """What two other backends pass whole in ``make test``, a backend whose kernels run slowly here passes in part."""

    @pytest.mark.parametrize("check", [_param(check) for check in CHECKS])
    def test_conforms(self, check):
        super().test_conforms(check)
