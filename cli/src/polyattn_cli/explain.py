"""``polyattn explain``: which backend would do a piece of attention, and why not the others."""

from __future__ import annotations

import json
from typing import Any

import click

from polyattn import backends
from polyattn_cli import plugins_print_to_stderr
from polyattn_cli.question import ask, question_options


def _one(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> str:
    if len(names) > 1:
        raise click.BadParameter(f"must be given once, got {', '.join(names)}; without it all are asked")
    return names[0] if names else "auto"


@click.command()
@question_options
@click.option("--backend", multiple=True, callback=_one, metavar="NAME", help="Ask this backend only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def explain(ctx: click.Context, /, backend: str, as_json: bool, **given: Any) -> None:
    """Say which backend would do attention under a layout, and why the others would not.

    KIND is the mask; the exit status is 1 when no backend, or not the one that --backend names, can do it.
    """
    with plugins_print_to_stderr():
        if backend != "auto":
            backends.get(backend)  # what cannot be loaded is an error, not a refusal
        layout, request = ask(given)

        from polyattn import Decision
        from polyattn import explain as decide
        from polyattn.select import reasons_of

        if backend == "auto":
            decision = decide(layout, request)
        else:
            reasons = reasons_of(backend, layout, request)
            decision = Decision(None if reasons else backend, {backend: reasons}, "asked for by name")
    click.echo(json.dumps(decision.to_dict(), indent=2) if as_json else f"{layout.describe()}\n{decision}")
    ctx.exit(0 if decision.chosen else 1)
