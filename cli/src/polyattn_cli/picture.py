"""A figure as a file, for every subcommand that draws one."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from polyattn import PolyattnError
from polyattn.messages import shortened, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: str, option: str) -> None:
    """Write ``figure`` in the format that the ending of ``path`` names, PNG without one; whole, or not at all.

    Raises:
        PolyattnError: it cannot be written; the message names ``option``, and what was there before is unchanged.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=Path(path).suffix[1:] or "png")
        _write(Path(path), picture.getvalue())
    except OSError as error:
        raise PolyattnError(f"{option} cannot write {shown(path)}: {error.strerror}; name another file") from error
    except (ValueError, RuntimeError) as error:  # an unknown format, or one whose program is not installed
        raise PolyattnError(f"{option} cannot write {shown(path)}: {shortened(str(error), 200)}") from error


def _write(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of ``path`` in one move; what is not a file, such as a pipe, is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    unfinished = path.with_name(f".{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
