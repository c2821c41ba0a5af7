"""What counts as a number in a configuration, and how one is written in a message."""

from __future__ import annotations

import sys

_LARGEST = sys.float_info.max


def is_number(value: object) -> bool:
    """Whether ``value`` is an int or a float that is finite as a float; YAML's integers may be of any size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def shown(value: object) -> str:
    """``repr``, but the size of an int that has more digits than anybody reads."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value)
