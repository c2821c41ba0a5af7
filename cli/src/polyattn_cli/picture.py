"""A figure as a file, for every subcommand that draws one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyattn import PolyattnError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: str, option: str) -> None:
    """Write ``figure`` in the format that the ending of ``path`` names, PNG without one.

    Raises:
        PolyattnError: it cannot be written; the message names ``option``.
    """
    try:
        figure.savefig(path, format=Path(path).suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise PolyattnError(f"{option} cannot write {path}: {error}") from error
