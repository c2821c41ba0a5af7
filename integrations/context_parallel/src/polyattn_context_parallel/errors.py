"""The error of this distribution."""

from __future__ import annotations

from collections.abc import Sequence

from polyattn import PolyattnError


class ContextParallelError(PolyattnError, ValueError):
    """What was asked for cannot run in parallel, the ranks disagree, or one did not come.

    Attributes:
        ranks: the ranks of the group that the error is about, where it is about some.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
