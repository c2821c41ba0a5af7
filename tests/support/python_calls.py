"""How many Python functions a piece of work calls."""

from __future__ import annotations

import sys
from collections.abc import Callable


def python_calls(work: Callable[[], object], package: str = "", files: str | tuple[str, ...] = "") -> list[str]:
    """The names of the functions that ``work`` calls, itself left out; steps of generators count.

    Args:
        work: what to call.
        package: only functions of files with this in their path.
        files: only functions of files whose path ends so.
    """
    found: list[str] = []

    def watch(frame, event, arg):
        code = frame.f_code
        if event == "call" and code is not own and package in code.co_filename and code.co_filename.endswith(files):
            found.append(code.co_name)

    own = getattr(work, "__code__", None)
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found
