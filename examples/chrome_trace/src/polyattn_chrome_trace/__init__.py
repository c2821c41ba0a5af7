"""The hooks ``polyattn_backend_loaded`` and ``polyattn_prepared`` as marks and counters of a Chrome trace."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from polyattn import AttentionBackend, PreparedAttention

__all__ = ["VARIABLE", "Tracer"]

#: Names the folder for the files; nothing is recorded without it.
VARIABLE = "POLYATTN_CHROME_TRACE"
_hookimpl = pluggy.HookimplMarker("polyattn")


class Tracer:
    """Writes one file for each process, an event a line, complete after every event but for the closing bracket.

    Args:
        folder: where the files go; ``None`` asks the environment variable.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        given = folder or os.environ.get(VARIABLE)
        self._folder = Path(given) if given else None
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._process = 0
        self._prepared: Counter[str] = Counter()
        atexit.register(self.close)

    @_hookimpl
    def polyattn_backend_loaded(self, name: str, backend: AttentionBackend) -> None:
        """Mark that a backend was loaded."""
        self._mark(f"loaded {name}", {"class": f"{type(backend).__module__}.{type(backend).__qualname__}"})

    @_hookimpl
    def polyattn_prepared(self, prepared: PreparedAttention) -> None:
        """Mark what was prepared, and count it."""
        backend = prepared.backend
        describe = getattr(backend, "describe", None)  # optional in the protocol
        request = {key: _plain(value) for key, value in dataclasses.asdict(prepared.request).items()}
        self._mark(
            f"prepared {backend.name}",
            {
                "layout": prepared.layout.describe(),
                "plan": describe(prepared) if describe else backend.name,
                "request": request,
            },
            counted=backend.name,
        )

    def close(self) -> None:
        """Write the closing bracket; a later event begins a new file."""
        with self._lock:
            if self._file is not None and self._process == os.getpid():
                self._file.write("\n]\n")
                self._file.close()
            self._file = None

    def _mark(self, name: str, details: dict[str, Any], counted: str = "") -> None:
        if self._folder is None:
            return
        event = {
            "name": name,
            "cat": "polyattn",
            "ph": "i",
            "s": "t",
            "tid": threading.get_native_id(),
            "args": details,
        }
        with self._lock:
            self._write(event)
            if counted:
                self._prepared[counted] += 1
                self._write({"name": "prepared", "ph": "C", "args": dict(self._prepared)})

    def _write(self, event: dict[str, Any]) -> None:
        # A forked process has a file of its own and leaves its parent's alone.
        if self._file is None or self._process != os.getpid():
            self._process = os.getpid()
            self._file = self._open()
        stamped = {**event, "pid": self._process, "ts": time.perf_counter_ns() / 1000}
        self._file.write(f"{',' if self._file.tell() > 1 else ''}\n{json.dumps(stamped)}")
        self._file.flush()

    def _open(self) -> IO[str]:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / f"polyattn-{self._process}.json").open("w", encoding="utf-8")
        file.write("[")
        return file


def _plain(value: object) -> object:
    """As JSON: torch's dtypes and devices by their names."""
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
