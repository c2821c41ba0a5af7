"""What tells PyInstaller about polyattn: the entry point ``pyinstaller40`` of this distribution leads here."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folder with ``hook-polyattn.py``."""
    return [str(Path(__file__).parent)]
