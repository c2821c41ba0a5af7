"""``polyattn list``: what is installed, from metadata alone."""

from __future__ import annotations

import json

import click

from polyattn import backends, rope_variants
from polyattn.registry import hooks

#: Section of the output -> what it holds.
SECTIONS = {"backends": backends.infos, "rope": rope_variants.infos, "hooks": hooks.infos}


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """List backends, RoPE variants and hooks by name, without importing any of them."""
    found = {section: infos() for section, infos in SECTIONS.items()}
    if as_json:
        click.echo(
            json.dumps({section: [info.to_dict() for info in infos] for section, infos in found.items()}, indent=2)
        )
        return
    rows = [
        (section, info.name, info.status, info.dist, info.version, info.summary)
        for section, infos in found.items()
        for info in infos
    ]
    if not rows:
        click.echo("no plugin is installed; start with: pip install polyattn-eager polyattn-sdpa")
        return
    from polyattn_cli.table import draw

    draw(("kind", "name", "status", "distribution", "version", "summary"), rows)
    errors = {(info.name, info.error): None for infos in found.values() for info in infos if info.error}
    for name, error in errors:  # rivals share one
        click.echo(f"{name}: {error}\n")
