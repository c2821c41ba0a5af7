"""What counts as a number in a configuration, and how any value is written in a message."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST = sys.float_info.max
#: The least normal and the largest number of float32.
_FLOAT32 = (1.1754943508222875e-38, 3.4028234663852886e38)
#: Of a value in a message: items of a container, containers within each other, characters of a text, of all.
_ITEMS, _DEPTH, _TEXT, _LENGTH = 12, 2, 200, 400
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
}
#: A number to people and to Python, and a text to YAML 1.1, which wants a point and a signed exponent.
_EXPONENT = re.compile(r"([-+]?)(\d+)\.?(\d*)[eE]([-+]?)(\d+)")


def is_number(value: object) -> bool:
    """Whether ``value`` is an int or a float that is finite as a float; YAML's integers may be of any size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def is_float32(value: Any) -> bool:
    """Whether ``value`` is a number that neither overflows nor vanishes in FP32."""
    least, most = _FLOAT32
    return is_number(value) and (value == 0 or least <= abs(value) <= most)


def shown(value: object) -> str:
    """``repr`` for a message: bounded in length and time, however large ``value`` is and whatever it contains.

    A text that was meant as a number, such as ``1e-6`` in YAML, comes with the way to write that number.
    """
    return shortened(_shown(value, _DEPTH), _LENGTH)


def listed(values: Iterable[object]) -> str:
    """``values`` as :func:`shown`, with commas between them; the first few of many."""
    return shortened(_items(map(shown, itertools.islice(held := list(values), _ITEMS)), len(held)))


def shortened(text: str, most: int = 2000) -> str:
    """``text`` without its middle when it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"


def _shown(value: object, depth: int) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (bytes, bytearray)):
        return repr(value[:_TEXT]) + _more(len(value), "bytes")
    if isinstance(value, Mapping) or type(value) in _BRACKETS:
        return _container(value, depth)  # type: ignore[arg-type]
    try:
        return " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the value's own fault, and not the one that the message is about
        return f"a {type(value).__name__}"


def _container(value: Mapping[object, object] | Iterable[object], depth: int) -> str:
    pairs = isinstance(value, Mapping)
    left, right = _BRACKETS.get(type(value), ("{", "}"))
    count = len(value)  # type: ignore[arg-type]
    if not depth and count:
        return f"{left}...{right}"
    first = itertools.islice(value.items() if isinstance(value, Mapping) else value, _ITEMS)
    texts = (": ".join(_shown(one, depth - 1) for one in item) if pairs else _shown(item, depth - 1) for item in first)  # type: ignore[attr-defined]
    comma = "," if type(value) is tuple and count == 1 else ""
    return f"{left}{_items(texts, count)}{comma}{right}"


def _items(texts: Iterable[str], count: int) -> str:
    return ", ".join(texts) + (f", ... ({count} in all)" if count > _ITEMS else "")


def _text(value: str) -> str:
    number = _EXPONENT.fullmatch(value)
    if not number or len(value) > _TEXT:
        return repr(value[:_TEXT]) + _more(len(value), "characters")
    sign, whole, rest, turn, exponent = number.groups()
    return f"{value!r} (text: YAML reads {sign}{whole}.{rest or 0}e{turn or '+'}{exponent} as a number)"


def _more(count: int, unit: str) -> str:
    return f"... ({count} {unit})" if count > _TEXT else ""
