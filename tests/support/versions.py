"""What the installed torch and transformers lack, said once: tests skip with these words."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers
from packaging.version import Version

from polyattn import ConfigError

TORCH, TRANSFORMERS = Version(torch.__version__), Version(transformers.__version__)
#: What the documentation and the expectations of the tests were made with.
PINNED_TORCH, PINNED_TRANSFORMERS = Version("2.14"), Version("5.19")

#: Mask functions that transformers makes inside the graph: those of windows and of documents.
whole_graphs = pytest.mark.skipif(
    Version("2.11") > TORCH, reason="Dynamo of torch 2.10 does not look into a function that is made inside the graph"
)


def of_transformers(name):
    """An attribute of transformers, where the installed version has it."""
    if not hasattr(transformers, name) and TRANSFORMERS < PINNED_TRANSFORMERS:
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, name)


@contextlib.contextmanager
def refused_before():
    """Building a model that older versions of transformers write without their attention interface: refused there."""
    try:
        yield
    except ConfigError as error:
        if TRANSFORMERS >= PINNED_TRANSFORMERS:
            raise
        pytest.skip(f"refused: {error}")
