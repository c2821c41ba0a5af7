"""A layout and a request from command-line options, for every subcommand that asks backends about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from polyattn.kernels import DTYPES
from polyattn_cli.layouts import COUNT, LARGEST, build, layout_options

if TYPE_CHECKING:
    from polyattn import AttentionRequest, MaskLayout

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--batch", type=COUNT, help="Batch rows; those of the layout unless given."),
    click.option("--heads", type=click.IntRange(1, LARGEST), default=8, show_default=True, help="Query heads."),
    click.option(
        "--kv-heads", type=click.IntRange(1, LARGEST), help="Key/value heads; as many as query heads unless given."
    ),
    click.option(
        "--head-dim", type=click.IntRange(1), default=64, show_default=True, help="Width of queries and keys."
    ),
    click.option("--v-head-dim", type=click.IntRange(1), help="Width of values; that of keys unless given."),
    click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True),
    click.option("--device", default="cpu", show_default=True),
    click.option("--scale", type=float, help="Factor of the scores."),
    click.option("--softcap", type=float, help="Soft cap of the scores."),
    click.option("--dropout", "dropout_p", type=float, default=0.0, help="Dropout probability; acts with --training."),
    click.option("--training", is_flag=True),
    click.option("--bias", "has_bias", is_flag=True, help="With a bias."),
    click.option("--bias-grad", "needs_bias_grad", is_flag=True, help="With gradients into the bias."),
    click.option("--sinks", "has_sinks", is_flag=True, help="With sink logits."),
    click.option("--grad", "needs_grad", is_flag=True, help="With gradients."),
    click.option("--lse", "needs_lse", is_flag=True, help="Return the log-sum-exp."),
    click.option("--lse-grad", "needs_lse_grad", is_flag=True, help="With gradients through the log-sum-exp."),
    click.option("--deterministic", is_flag=True, help="Only deterministic kernels."),
)


def question_options(command: _Function) -> _Function:
    """Give ``command`` the argument KIND and the options that :func:`ask` understands."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return layout_options(command)


def ask(given: dict[str, Any]) -> tuple[MaskLayout, AttentionRequest]:
    """The layout and the request that the options describe.

    Args:
        given: the values of :func:`question_options`.

    Raises:
        click.UsageError: an option is wrong, missing or means nothing for this kind of layout.
        LayoutError, AttentionInputError: the values contradict each other.
    """
    import torch

    from polyattn import AttentionRequest

    fields = {field.name for field in dataclasses.fields(AttentionRequest)}
    layout = build(**{name: value for name, value in given.items() if name not in fields}, default_len=1024)
    request = {name: value for name, value in given.items() if name in fields}
    try:
        request["device"] = torch.device(request["device"])
    except RuntimeError as error:
        raise click.BadParameter(str(error).splitlines()[0], param_hint="--device") from error
    request["dtype"] = getattr(torch, request["dtype"])
    if request["batch"] is not None and layout.batch not in (1, request["batch"]):
        raise click.BadParameter(
            f"must be the {layout.batch} batch rows of the layout, got {request['batch']}; leave it out",
            param_hint="--batch",
        )
    for name, default in (("batch", layout.batch), ("kv_heads", request["heads"]), ("v_head_dim", request["head_dim"])):
        request[name] = default if request[name] is None else request[name]
    # Asking for the gradient of something asks for the thing.
    request["has_bias"] |= request["needs_bias_grad"]
    request["needs_lse"] |= request["needs_lse_grad"]
    request["needs_grad"] |= request["needs_bias_grad"] or request["needs_lse_grad"]
    return layout, AttentionRequest(**request)
