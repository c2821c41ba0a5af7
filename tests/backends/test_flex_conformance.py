"""The conformance kit on flex_attention without a compiler; the compiled kernels have tests of their own."""

from __future__ import annotations

import pytest

from polyattn_flex import FlexBackend
from quick_kit import QuickConformance


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
class TestFlexUncompiled(QuickConformance):
    backend = FlexBackend().configure({"compiled": False})
    device = "cpu"
