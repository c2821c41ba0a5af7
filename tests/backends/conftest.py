"""Fixtures for tests of backends."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import polyattn
from polyattn import AttentionRequest
from polyattn_flex import _reasons


@pytest.fixture
def any_compiler(monkeypatch):
    """As if the machine could compile for its CPU: for tests that prepare and compile nothing."""
    monkeypatch.setattr(_reasons, "_of_cpu", lambda: ())


@pytest.fixture
def compiled_step():
    """A compiled call of sdpa through a scope, ``step(q, k, v, layout)``, and the counter of its graphs."""
    counter, sdpa = CompileCounter(), polyattn.backends.get("sdpa")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, layout):
        scope = polyattn.AttentionScope(layout)
        return scope.prepare(sdpa, AttentionRequest.of(q, k, v))(q, k, v).output

    return step, counter
