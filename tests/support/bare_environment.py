"""An environment with this one's third-party packages and nothing of the workspace."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def bare_environment(folder):
    """Make one in ``folder`` and return its ``bin`` folder.

    The packages are linked with their metadata, so pip resolves what a wheel declares; editable installs are ``.pth``
    files and stay out.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for source in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in source.iterdir():
            if entry.suffix != ".pth" and not entry.name.startswith(("polyattn", "smollm2", "tiny_lm", "__pycache__")):
                (site / entry.name).symlink_to(entry)
    return folder / "bin"
