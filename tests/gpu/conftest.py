"""Everything in this folder needs a CUDA device; without one each test is skipped and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())
