"""Windows: how far a query sees, as one number for both sides or as ``(left, right)``."""

from __future__ import annotations

from polyattn._errors import LayoutError
from polyattn._layout.checks import check_int
from polyattn.messages import shown

#: ``|q - k| < window``; or keys at most ``left`` before and ``right`` after the query, ``None`` for unbounded.
Window = int | tuple[int | None, int | None] | None
#: How far a query sees to earlier and to later positions, its own not counted; ``None`` where that has no bound.
Sides = tuple[int | None, int | None]


def window_sides(window: object) -> Sides:
    """A window as how far a query sees to each side.

    Raises:
        LayoutError: it is not ``None``, an int of at least 1, or a pair of ints of at least 0, -1 and ``None``.
    """
    if window is None:
        return None, None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise LayoutError(
                f"window must be an int or a pair (left, right), got {shown(window)} of {len(window)} entries"
            )
        for name, side in zip(("left", "right"), window, strict=True):
            if side is not None and side != -1:
                check_int(f"the {name} side of window (positions that a query sees; None or -1: all)", side, most=None)
        left, right = (None if side is None or side == -1 else int(side) for side in window)
        return left, right
    check_int(
        "window (how many positions a query sees, its own included; a pair (left, right); None: all)",
        window,
        1,
        most=None,
    )
    assert isinstance(window, int)
    return window - 1, window - 1


def as_window(sides: Sides, largest: int, *, one_sided: bool = False) -> Window:
    """Two sides in the shortest form: ``None`` where they bound nothing, an int where it says the same.

    Args:
        sides: as :func:`window_sides` gives them.
        largest: a number above it bounds no distance.
        one_sided: whether later keys are hidden anyway.
    """
    left, right = (None if side is None or side >= largest else side for side in sides)
    if one_sided or left == right:
        return None if left is None else left + 1
    return left, right


def narrower(a: Sides, b: Sides) -> Sides:
    """The smaller of two windows, each side by itself."""
    left, right = (x if y is None else y if x is None else min(x, y) for x, y in zip(a, b, strict=True))
    return left, right
