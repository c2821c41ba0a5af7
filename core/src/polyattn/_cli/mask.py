"""``polyattn mask``: a layout drawn, in the terminal or as a picture."""

from __future__ import annotations

from typing import Any

import click

from polyattn._cli.layouts import build, layout_options


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
    layout = build(**given, default_len=16)
    if row >= layout.batch:
        raise click.BadParameter(f"the layout has {layout.batch} batch rows, got row {row}", param_hint="--row")
    if out is None:
        click.echo(f"{layout.describe()}\n{layout.draw(batch=row)}")
        return
    layout.plot(batch=row).savefig(out)
    click.echo(f"{layout.describe()}: written to {out}")
