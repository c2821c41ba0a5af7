"""How far a run is: a bar on a terminal, lines as they come elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: How many lines a log gets at least, if there are as many steps.
LINES = 20

OnStep = Callable[[float, float], None]


@contextlib.contextmanager
def shown(label: str, done: int, steps: int) -> Iterator[OnStep]:
    """A function that shows the loss and the tokens per second after each step.

    Args:
        label: of the run.
        done: how many steps were taken before.
        steps: the number of the last step.
    """
    if not sys.stdout.isatty():
        yield _lines(label, done, steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(label, total=steps, completed=done, status="")

        def show(loss: float, speed: float) -> None:
            progress.update(task, advance=1, status=_status(loss, speed))

        yield show


def _lines(label: str, done: int, steps: int) -> OnStep:
    every = max(1, (steps - done) // LINES)

    def show(loss: float, speed: float) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == steps:
            click.echo(f"{label}  step {done} of {steps}  {_status(loss, speed)}")  # echo flushes each line

    return show


def _status(loss: float, speed: float) -> str:
    return f"loss {loss:.3f}  {speed:,.0f} tokens/s"
