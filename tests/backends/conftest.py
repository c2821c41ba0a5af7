"""Fixtures for tests of backends."""

from __future__ import annotations

import pytest

from polyattn_flex import _reasons


@pytest.fixture
def any_compiler(monkeypatch):
    """As if the machine could compile for its CPU: for tests that prepare and compile nothing."""
    monkeypatch.setattr(_reasons, "_of_cpu", lambda: ())
