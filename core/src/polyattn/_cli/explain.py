"""``polyattn explain``: which backend would do a piece of attention, and why not the others."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from polyattn._cli.layouts import build, layout_options
from polyattn._registry import backends
from polyattn._request import DTYPES


@click.command()
@layout_options
@click.option("--backend", default="auto", help="Ask this backend only.")
@click.option("--batch", type=click.IntRange(0), help="Batch rows; those of the layout unless given.")
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads; as many as query heads unless given.")
@click.option("--head-dim", type=click.IntRange(1), default=64, show_default=True, help="Width of queries and keys.")
@click.option("--v-head-dim", type=click.IntRange(1), help="Width of values; that of keys unless given.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--scale", type=float, help="Factor of the scores.")
@click.option("--softcap", type=float, help="Soft cap of the scores.")
@click.option("--dropout", "dropout_p", type=float, default=0.0, help="Dropout probability; acts with --training.")
@click.option("--training", is_flag=True)
@click.option("--bias", "has_bias", is_flag=True, help="With a bias.")
@click.option("--bias-grad", "needs_bias_grad", is_flag=True, help="With gradients into the bias.")
@click.option("--sinks", "has_sinks", is_flag=True, help="With sink logits.")
@click.option("--grad", "needs_grad", is_flag=True, help="With gradients.")
@click.option("--lse", "needs_lse", is_flag=True, help="Return the log-sum-exp.")
@click.option("--lse-grad", "needs_lse_grad", is_flag=True, help="With gradients through the log-sum-exp.")
@click.option("--deterministic", is_flag=True, help="Only deterministic kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def explain(ctx: click.Context, /, backend: str, as_json: bool, **given: Any) -> None:
    """Say which backend would do attention under a layout, and why the others would not.

    KIND is the mask; the exit status is 1 when no backend, or not the one that --backend names, can do it.
    """
    asked = None if backend == "auto" else backends.get(backend)

    import torch

    from polyattn._request import AttentionRequest
    from polyattn._select import Decision
    from polyattn._select import explain as decide

    fields = {field.name for field in dataclasses.fields(AttentionRequest)}
    request = {name: given.pop(name) for name in list(given) if name in fields}
    layout = build(**given, default_len=1024)
    try:
        request["device"] = torch.device(request["device"])
    except RuntimeError as error:
        raise click.BadParameter(str(error).splitlines()[0], param_hint="--device") from error
    request["dtype"] = getattr(torch, request["dtype"])
    for name, default in (("batch", layout.batch), ("kv_heads", request["heads"]), ("v_head_dim", request["head_dim"])):
        request[name] = default if request[name] is None else request[name]
    # Asking for the gradient of something asks for the thing.
    request["has_bias"] |= request["needs_bias_grad"]
    request["needs_lse"] |= request["needs_lse_grad"]
    question = AttentionRequest(**request)
    if asked is None:
        decision = decide(layout, question)
    else:
        reasons = tuple(asked.unsupported(layout, question))
        decision = Decision(None if reasons else backend, {backend: reasons}, "asked for by name")
    click.echo(json.dumps(decision.to_dict(), indent=2) if as_json else f"{layout.describe()}\n{decision}")
    ctx.exit(0 if decision.chosen else 1)
