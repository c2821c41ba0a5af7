"""The conformance kit on eager: everything is honoured, nothing refused."""

from __future__ import annotations

from polyattn.testing import BackendConformance


class TestEager(BackendConformance):
    backend = "eager"
