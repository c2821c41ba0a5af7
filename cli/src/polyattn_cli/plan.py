"""``polyattn plan``: what sharing sequences out to ranks would move and compute, without processes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from polyattn import PolyattnError
from polyattn_cli.question import ask, question_options


@click.command()
@question_options
@click.option("--ranks", type=click.IntRange(1, 65536), required=True, help="Ranks that share the tokens.")
@click.option("--node", type=click.IntRange(1), default=8, show_default=True, help="Ranks of one node.")
@click.option("--balance", default="auto", show_default=True, help="contiguous, zigzag, documents or auto.")
@click.option("--method", default="auto", show_default=True, help="gather, ring, ulysses or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(ranks: int, node: int, balance: str, method: str, as_json: bool, **given: Any) -> None:
    """Say what context parallelism would move, hold and take for each method, forward and backward of one layer.

    KIND is the mask of the whole sequences. Nothing is run: pairs and keys are counted on the intervals of the mask,
    and times follow from rates that the documentation states.
    """
    try:
        from polyattn_context_parallel import plan as planned
    except ImportError as error:
        raise PolyattnError(
            "`polyattn plan` needs the distribution polyattn-context-parallel, which is not installed; "
            "`pip install polyattn-context-parallel` brings it"
        ) from error
    layout, request = ask(given)
    found = planned(layout, ranks, request=request, node=node, balance=balance, method=method)
    if not as_json:
        click.echo(f"{layout.describe()}\n{found}")
        return
    fields = {
        "ranks": found.ranks,
        "balance": found.balance,
        "method": found.method,
        "imbalance": found.imbalance,
        "tokens": found.tokens.tolist(),
        "pairs": found.pairs.tolist(),
        "received_keys": (found.keys.sum(1) - found.keys.diagonal()).tolist(),
        "costs": [dataclasses.asdict(cost) for cost in found.costs],
    }
    click.echo(json.dumps(fields, indent=2))
