"""A table on the terminal; whole, however wide, when written to a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def draw(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print rows of text under their columns.

    Args:
        columns: headings.
        rows: one text per column each; brackets in them mean nothing special.
        title: a line above.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
