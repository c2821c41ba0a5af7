"""The conformance kit on sdpa."""

from __future__ import annotations

from polyattn.testing import BackendConformance


class TestSdpa(BackendConformance):
    backend = "sdpa"
