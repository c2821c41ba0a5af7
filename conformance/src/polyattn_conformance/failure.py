"""What a check raises: an error of its own, since ``python -O`` strips ``assert``."""

from __future__ import annotations


class CheckFailed(AssertionError):  # noqa: N818 - the statement failed, not the program
    """What a check states does not hold; the text says what was found and what must hold."""


def require(condition: object, message: str) -> None:
    """Go on only where ``condition`` is true.

    Raises:
        CheckFailed: it is false, with ``message``.
    """
    if not condition:
        raise CheckFailed(message)
