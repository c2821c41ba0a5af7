"""The command line: ``smollm2 compare``, ``smollm2 generate`` and ``smollm2 finetune``.

What the user can put right ends with one message and exit status 2; a comparison that fails with 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import polyattn_transformers
from polyattn import PolyattnError
from smollm2 import compare, text, weights
from smollm2.finetune import FinetuneConfig, finetune

LIMIT = 1e-4


class BadInput(click.ClickException):
    """One message, without a traceback."""

    exit_code = 2


class Commands(click.Group):
    """Turns every error that the user can put right into :class:`BadInput`."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: D102
        try:
            return super().invoke(ctx)
        except PolyattnError as error:
            raise BadInput(str(error)) from error


@click.group(cls=Commands)
def commands() -> None:
    """SmolLM2-135M-Instruct on the attention backends of polyattn."""
    polyattn_transformers.register()


@commands.command("compare")
@click.option("--backends", default="eager,sdpa,flex_attention", show_default=True, help="Names, joined by commas.")
def compare_command(backends: str) -> None:
    """Compare backends with transformers' eager attention: generation, perplexity, packed documents."""
    console = Console()
    model, tokenizer = weights.load()
    page = text.page()
    want = compare.answer(model, tokenizer, page)
    console.print(f"[bold]{compare.PROMPT}[/bold]\n{tokenizer.decode(want.tokens, skip_special_tokens=True)}\n")
    table = Table("attention", "same tokens", "perplexity", "largest leak between packed documents")
    table.add_row("transformers' eager", "", f"{want.perplexity:.6f}", "")
    fine = True
    first, second = itertools.islice(text.documents(tokenizer, seed=0), 2)
    for name in backends.split(","):
        polyattn_transformers.use(model, name)
        got = compare.answer(model, tokenizer, page, cache="static" if name == "flex_attention" else None)
        same, close = got.tokens == want.tokens, abs(got.perplexity - want.perplexity) <= LIMIT
        worst = max(compare.leak(model, first[:40], second[:60]).values())
        fine = fine and same and close and worst <= LIMIT
        table.add_row(name, "yes" if same else "no", f"{got.perplexity:.6f}", f"{worst:.1e}")
    console.print(table)
    if not fine:
        raise SystemExit(1)


@commands.command("generate")
@click.argument("prompt")
@click.option("--attn-backend", default="auto", show_default=True, help="Name of a backend.")
@click.option("--tokens", type=click.IntRange(min=1), default=60, show_default=True, help="How many to generate.")
def generate_command(prompt: str, attn_backend: str, tokens: int) -> None:
    """Answer PROMPT, greedily."""
    model, tokenizer = weights.load()
    polyattn_transformers.use(model, attn_backend)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    click.echo(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


@commands.command("finetune")
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--attn-backend", metavar="NAME", help="Use this backend instead of the config's.")
def finetune_command(config_path: Path, attn_backend: str | None) -> None:
    """Fine-tune on packed documents as CONFIG says."""
    config = FinetuneConfig.read(config_path)
    if attn_backend:
        config = dataclasses.replace(config, attn_backend=attn_backend, backend_options={})
    model, tokenizer = weights.load()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(config.attn_backend, total=config.steps, status="")
        for loss in finetune(model, tokenizer, config):
            progress.update(task, advance=1, status=f"loss {loss:.3f}")
