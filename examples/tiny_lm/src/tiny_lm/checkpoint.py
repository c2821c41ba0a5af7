"""Checkpoints that are either whole or refused.

A file is one header line with the SHA-256 of what follows, then what ``torch.save`` wrote. It is written beside its
final name and moved there when it has reached the disk, so an interruption at any moment leaves the old file or the
new one. The digest is checked because torch reads damaged tensor data without complaint.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

MAGIC = b"tiny_lm checkpoint 1"
_UNFINISHED = ".unfinished"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, belongs to another run, or cannot be written."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one move, after it has reached the disk.

    Raises:
        CheckpointError: it cannot be written, for want of room or permission; the old file is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}; "
            "what was there before is unchanged, and --resume goes on from it"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Files that :func:`write_atomically` did not finish, since its process was killed."""
    return sorted(folder.glob(f".*.*{_UNFINISHED}"))


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, texts and containers of them) to ``path``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    write_atomically(path, MAGIC + b" " + _digest(payload) + b"\n" + payload)


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Raises:
        CheckpointError: there is no such file, or it is not what ``save`` wrote.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}; start the run without --resume")
    header, _, payload = path.read_bytes().partition(b"\n")
    if header != MAGIC + b" " + _digest(payload):
        raise CheckpointError(
            f"checkpoint {path} is damaged: its content does not match the digest in its first line; "
            "it was left as it is, restore it from a copy or start again with another --out"
        )
    state: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    return state


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()
