"""``polyattn mask``: a layout drawn, in the terminal or as a picture."""

from __future__ import annotations

from typing import Any

import click

from polyattn_cli.layouts import build, layout_options
from polyattn_cli.picture import save

_MOST = 65536  # queries and keys of a square mask: each pair is looked at, those of one line of cells at once


@click.command()
@layout_options
@click.option("--row", type=click.IntRange(0), default=0, show_default=True, help="Batch row to draw.")
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True), help="Write a picture here instead (PNG, SVG, PDF)."
)
def mask(row: int, out: str | None, **given: Any) -> None:
    """Draw what may see what: queries down, keys across.

    KIND is the mask.
    """
    layout = build(**given, default_len=16, check_size=_check_size)
    if row >= layout.batch:
        raise click.BadParameter(f"the layout has {layout.batch} batch rows, got row {row}", param_hint="--row")
    if out is None:
        click.echo(f"{layout.describe()}\n{layout.draw(batch=row)}")
        return
    save(layout.plot(batch=row), out, "--out")
    click.echo(f"{layout.describe()}: written to {out}")


def _check_size(queries: int, keys: int) -> None:
    if max(queries, 64) * max(keys, 64) > _MOST**2:
        raise click.UsageError(
            f"a mask that is drawn must have at most as many pairs as {_MOST} queries x {_MOST} keys, "
            f"got {queries} x {keys}; draw a shorter one"
        )
