"""The conformance kit on flex_attention without a compiler; the compiled kernels have tests of their own."""

from __future__ import annotations

import pytest

from polyattn.testing import BackendConformance
from polyattn_flex import FlexBackend


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
class TestFlexUncompiled(BackendConformance):
    backend = FlexBackend().configure({"compiled": False})
    device = "cpu"
