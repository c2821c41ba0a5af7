"""Command lines of click in a test."""

from __future__ import annotations

import inspect

from click.testing import CliRunner


def runner():
    """A runner that keeps standard output and standard error apart: click 8.1 does so on demand, later ones always."""
    return CliRunner(**({"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}))
