"""Positions with several axes: which axis each rotary lane reads its angle from.

Text and images share one sequence in multimodal models: a token has a position on each of several axes (time, height,
width). Every lane (one frequency) follows one axis. Which lanes follow which axis is structure: it combines with every
variant and with either pairing of channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyattn._errors import RopeConfigError
from polyattn.messages import shown


@dataclasses.dataclass(frozen=True)
class RopeAxes:
    """The lanes that each axis of the positions owns.

    Attributes:
        sections: number of lanes of each axis, in the order of the position axes; they add up to ``rotary_dim / 2``.
            An axis with 0 of them turns nothing.
        layout: how the sections lie over the lanes, one of

            * ``"contiguous"``: all lanes of axis 0, then all of axis 1, ... (Qwen2-VL, GLM-4V);
            * ``"interleaved"``: lane ``i`` follows axis ``i % A`` while ``i < A * sections[axis]``, and axis 0
              otherwise (Qwen3-VL);
            * ``"glm"``: lane ``i`` starts at axis ``i % A`` and moves on while an axis has used up its section;
            * ``"ernie"``: axes 1, 2, ... take turns in equal sections, axis 0 has the last lanes (ERNIE-4.5-VL).
    """

    sections: tuple[int, ...]
    layout: str

    def __post_init__(self) -> None:
        sections = self.sections
        if isinstance(sections, str) or not isinstance(sections, Sequence) or len(sections) < 2:
            raise RopeConfigError(f"axes['sections'] must list the lanes of at least two axes, got {shown(sections)}")
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in sections) or not any(sections):
            got = shown(list(sections))
            raise RopeConfigError(f"axes['sections'] must hold ints >= 0, not all of them 0, got {got}")
        if not isinstance(self.layout, str) or self.layout not in _LAYOUTS:
            raise RopeConfigError(f"axes['layout'] must be one of {', '.join(_LAYOUTS)}, got {shown(self.layout)}")
        if self.layout == "ernie" and len(set(sections[1:])) > 1:
            raise RopeConfigError(
                f"axes['sections'] must give all axes but the first equally many lanes under layout 'ernie', "
                f"got {shown(list(sections))}"
            )
        object.__setattr__(self, "sections", tuple(sections))

    @classmethod
    def of(cls, value: RopeAxes | Mapping[str, Any]) -> RopeAxes:
        """``value`` itself, or the axes that a dictionary ``{"sections": [...], "layout": "..."}`` describes."""
        if isinstance(value, RopeAxes):
            return value
        if not isinstance(value, Mapping) or set(value) != {"sections", "layout"}:
            got = shown(sorted(map(str, value)) if isinstance(value, Mapping) else value)
            raise RopeConfigError(f"axes must be None or have exactly the keys 'sections' and 'layout', got {got}")
        return cls(sections=value["sections"], layout=value["layout"])

    def lanes(self) -> tuple[int, ...]:
        """The axis of every lane, ``sum(sections)`` of them."""
        return _LAYOUTS[self.layout](self.sections)

    def to_dict(self) -> dict[str, Any]:
        """The axes as a JSON object."""
        return {"sections": list(self.sections), "layout": self.layout}


def _contiguous(sections: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, n in enumerate(sections) for _ in range(n))


def _interleaved(sections: tuple[int, ...]) -> tuple[int, ...]:
    count = len(sections)
    return tuple(i % count if i < count * sections[i % count] else 0 for i in range(sum(sections)))


def _glm(sections: tuple[int, ...]) -> tuple[int, ...]:
    left = list(sections)
    lanes = []
    for i in range(sum(sections)):
        axis = next(a % len(left) for a in range(i, i + len(left)) if left[a % len(left)])
        left[axis] -= 1
        lanes.append(axis)
    return tuple(lanes)


def _ernie(sections: tuple[int, ...]) -> tuple[int, ...]:
    turns = len(sections) - 1
    return tuple(1 + i % turns for i in range(sum(sections[1:]))) + (0,) * sections[0]


_LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "contiguous": _contiguous,
    "interleaved": _interleaved,
    "glm": _glm,
    "ernie": _ernie,
}
