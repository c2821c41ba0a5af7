"""The page about what each backend does is what the backends answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from versions import PINNED_TORCH, TORCH

TOOL = Path(__file__).parents[2] / "tools" / "capabilities.py"


@pytest.mark.skipif(TORCH < PINNED_TORCH, reason="the page tells what torch 2.14 can do")
def test_the_page_of_capabilities_is_current():
    done = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
