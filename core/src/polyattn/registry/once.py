"""Computing a value once for all threads, without ever holding a lock while plugin code runs.

A thread that finds a computation under way waits for it, unless it could be part of a cycle: a thread that is itself
inside an import or inside such a computation may hold a module lock that the other one needs. It then computes as
well, under Python's own module locks, which detect cycles. The first success is what everybody gets.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_inside = threading.local()
_everything: weakref.WeakSet[TableLock | Once[Any, Any]] = weakref.WeakSet()


class TableLock:
    """A reentrant lock for table updates that a forked child finds open, whoever held it in the parent."""

    def __init__(self) -> None:
        self._restart()
        _everything.add(self)

    def _restart(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class Once(Generic[K, V]):
    """A table of values that are computed at their first use.

    Args:
        final: whether a value is kept whoever computed it. Another (a failure) is kept only when the thread that was
            first comes to it, so that a nested attempt which met a half-imported module condemns nobody.
    """

    def __init__(self, final: Callable[[V], bool] = lambda _: True) -> None:
        self._final = final
        self._values: dict[K, V] = {}
        self._forgotten = 0
        self._lock = TableLock()
        self._restart()
        _everything.add(self)

    def _restart(self) -> None:
        self._running: dict[K, threading.Event] = {}

    def peek(self, key: K) -> V | None:
        """The value of ``key`` if it was computed."""
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Give ``key`` a value without computing it."""
        with self._lock:
            self._values[key] = value

    def forget(self, unwanted: Callable[[K, V], bool]) -> None:
        """Drop the values that ``unwanted(key, value)`` names; they are computed again when next asked for."""
        with self._lock:
            self._forgotten += 1
            self._values = {key: value for key, value in self._values.items() if not unwanted(key, value)}

    def get(self, key: K, compute: Callable[[], V]) -> tuple[V, bool]:
        """The value of ``key``, and whether this call brought it into the table.

        What ``compute`` raises passes through, nothing is remembered, and a waiting thread takes over.
        """
        while True:
            with self._lock:
                if key in self._values:
                    return self._values[key], False
                running = self._running.get(key)
                if running is None:
                    mine = self._running[key] = threading.Event()
                    break
            if not _may_wait():
                return self._run(key, compute, first=False)
            running.wait()
        try:
            return self._run(key, compute, first=True)
        finally:
            with self._lock:
                if self._running.get(key) is mine:
                    del self._running[key]
            mine.set()

    def _run(self, key: K, compute: Callable[[], V], *, first: bool) -> tuple[V, bool]:
        started = self._forgotten
        depth = getattr(_inside, "depth", 0)
        _inside.depth = depth + 1
        try:
            value = compute()
        finally:
            _inside.depth = depth
        with self._lock:
            final = self._final(value)
            known = self._values.get(key)
            if known is not None and (self._final(known) or not final):
                return known, False
            # What was forgotten meanwhile is not remembered as failed: the attempt began before.
            keep = final or (first and started == self._forgotten)
            if keep:
                self._values[key] = value
            return value, keep


def _may_wait() -> bool:
    if getattr(_inside, "depth", 0):
        return False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the one way to ask whether this thread is importing
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is None


def _after_fork() -> None:
    # The threads that were computing, and perhaps held a lock, do not exist in the child.
    for shared in list(_everything):
        shared._restart()  # noqa: SLF001 - same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
