"""The folder for the results of a run: what may be in it, and who may write to it.

One process writes to a folder at a time. A lock of the operating system says so, which ends with its process, however
that ends.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from tiny_lm.checkpoint import leftovers

LOCK = ".lock"


class FolderError(ValueError):
    """The folder for results cannot be used; the text says why, and what to do."""


def refuse_what_is_there(out: Path, files: Sequence[str], cure: str, written: Sequence[str]) -> None:
    """Refuse a folder in which results cannot be written, or would replace others.

    Args:
        out: the folder.
        files: names of results that may not be there.
        cure: the options that say what to do with those that are there.
        written: names of all results that the run will write.

    Raises:
        FolderError: ``out`` cannot be a path, it or one of its parents is a file, a folder has the name of a result, or
            one of ``files`` is there.
    """
    try:
        out.exists()
    except OSError as error:
        raise FolderError(f"--out cannot be {reprlib.repr(str(out))}: {error.strerror}; give another --out") from error
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise FolderError(f"--out must be a folder, got {out}, but {path} is a file; give another --out")
    folders = [str(out / name) for name in written if (out / name).is_dir()]
    if folders:
        raise FolderError(f"{', '.join(folders)} must be a file or absent, got a folder; give another --out")
    there = [str(out / name) for name in files if (out / name).exists()]
    if there:
        raise FolderError(f"{', '.join(there)} exists; give {cure}, or another --out")


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Make the folder, and keep others out of it; remove what a killed run left half written.

    Raises:
        FolderError: the folder cannot be made or written to, or another run writes to it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"--out {out} cannot be made: {error.strerror}; give another --out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise FolderError(f"--out {out} must be a folder that one may write to; give another --out")
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderError(f"another run writes to {out}; wait until it ends, or give another --out") from None
    try:
        for path in leftovers(out):
            path.unlink(missing_ok=True)
        yield
    finally:
        lock.release()
