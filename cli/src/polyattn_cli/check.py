"""``polyattn check``: the conformance kit on one backend."""

from __future__ import annotations

import json
import sys
from collections import Counter

import click

from polyattn import PolyattnError
from polyattn_cli import plugins_print_to_stderr

# The kit lies on a higher floor than the other commands need; it is imported with the command, like torch.
from polyattn_conformance.runner import FAILED, LEFT_OUT, STATUSES, Outcome, check_backend, start_trial


@click.command("check")
@click.argument("name")
@click.option("--device", help="Where to run, such as cuda:0; by default the first device on which the backend runs.")
@click.option("--only", default="*", show_default=True, help="A pattern of check ids, such as 'window*'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(name: str, device: str | None, only: str, as_json: bool) -> None:
    """Check that the backend NAME honours or properly refuses everything.

    Exit status 1 when a check failed, 2 when every one was left out, so that nothing is known.
    """
    outcomes = []
    with plugins_print_to_stderr():
        where = str(start_trial(name, device).device)
        for outcome in check_backend(name, device=where, only=only):
            outcomes.append(outcome)
            if outcome.status == FAILED and not as_json:
                click.echo(f"FAILED {outcome.check}: {outcome.about}\n  {outcome.detail}", err=True)
    counts = Counter(outcome.status for outcome in outcomes)
    if as_json:
        listed = [outcome.to_dict() for outcome in outcomes]
        counted = {status: counts[status] for status in STATUSES}
        click.echo(json.dumps({"backend": name, "device": where, "counts": counted, "checks": listed}, indent=2))
    else:
        _draw(name, where, outcomes, counts)
    if counts[FAILED]:
        sys.exit(1)
    if counts[LEFT_OUT] == len(outcomes):
        why = "; ".join(dict.fromkeys(outcome.detail for outcome in outcomes))
        raise PolyattnError(f"nothing was checked, all of {len(outcomes)} were left out: {why}")


def _draw(name: str, device: str, outcomes: list[Outcome], counts: Counter[str]) -> None:
    from polyattn_cli.table import draw

    draw(
        ("check", "result", "detail"),
        [(outcome.check, outcome.status, outcome.detail) for outcome in outcomes],
        title=f"{name} on {device}",
    )
    click.echo(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
