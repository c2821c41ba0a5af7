"""A table on the terminal; one plain line for each row, however wide, when written to a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click


def draw(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print rows of text under their columns.

    Args:
        columns: headings.
        rows: one text per column each; brackets in them mean nothing special.
        title: a line above.
    """
    if sys.stdout.isatty():
        _draw(columns, rows, title)
    else:
        _write(columns, rows, title)


def _write(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> None:
    """For programs and files: the last column is never padded, and no row is broken into several lines."""
    lines = [tuple(columns), *(tuple(" ".join(cell.split()) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        click.echo(title)
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _draw(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> None:
    """For people: rich folds what is wider than the window."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
