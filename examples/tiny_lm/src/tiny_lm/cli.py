"""The command line: ``tiny-lm train`` and ``tiny-lm demo``.

What the user can put right ends with one message and exit status 2, an interrupted run with 130, a demo whose backends
disagree with 1, and one whose run was ended by a signal with 128 and its number, as shells have it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import polyattn
from tiny_lm import checkpoint, config, report
from tiny_lm.train import Run, peak_memory, train

INTERRUPTED = 130
CHECKPOINT = "checkpoint.pt"
CURVES = "loss.png"
COMPARED = ("eager", "sdpa")


class BadInput(click.ClickException):
    """One message, without a traceback."""

    exit_code = 2


class KilledRun(click.ClickException):
    """A signal ended a run of the demo, which could not say anything itself."""

    def __init__(self, backend: str, number: int) -> None:
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        cause = "a crash in native code; a report of it is welcome"
        if number == signal.SIGKILL:
            cause = "most likely there was too little memory; take fewer rows, a shorter row_length or a smaller model"
        elif number == signal.SIGTERM:
            cause = "somebody asked it to stop"
        super().__init__(f"the run with {backend} was ended by {name}: {cause}")
        self.exit_code = 128 + number  # type: ignore[misc]  # click reads it off the instance


class Commands(click.Group):
    """Turns every error that the user can put right into :class:`BadInput`, and Ctrl-C into an exit status."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: D102
        try:
            return super().invoke(ctx)
        except (polyattn.PolyattnError, checkpoint.CheckpointError, OSError) as error:
            raise BadInput(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a set event, so that no step is cut in half; the second one interrupts at once."""
    stop = threading.Event()

    def handle(_signum: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@click.group(cls=Commands)
def commands() -> None:
    """Train a small byte-level decoder; its config names the attention backend."""


def refuse_what_is_there(out: Path, files: Sequence[str], cure: str) -> None:
    """Refuse a folder for results that is none, or that holds one of the ``files`` that would be replaced."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise BadInput(f"--out must be a folder, got {out}, but {path} is a file; give another --out")
    there = [str(out / name) for name in files if (out / name).exists()]
    if there:
        raise BadInput(f"{', '.join(there)} exists; give {cure}, or another --out")


def make_folder(out: Path) -> None:
    """Make the folder for the results, before the work whose results it is for."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {out} cannot be made: {error.strerror}; give another --out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise BadInput(f"--out {out} must be a folder that one may write to; give another --out")


config_argument = click.argument(
    "config_path", metavar="CONFIG", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
out_option = click.option("--out", type=click.Path(path_type=Path), default=Path("out"), help="Folder for the results.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Start again, replacing results in the folder.")


@commands.command("train")
@config_argument
@out_option
@click.option("--attn-backend", metavar="NAME", help="Use this backend instead of the config's.")
@click.option("--steps", type=click.IntRange(min=1), help="Train until this step instead of the config's.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the folder.")
@overwrite_option
def train_command(
    config_path: Path, out: Path, attn_backend: str | None, steps: int | None, resume: bool, overwrite: bool
) -> None:
    """Train the model that CONFIG describes; Ctrl-C saves a checkpoint and stops."""
    path = out / CHECKPOINT
    if resume and overwrite:
        raise BadInput("--resume and --overwrite exclude each other, got both; give one")
    replaced = () if resume or overwrite else (CHECKPOINT, report.FILE)
    refuse_what_is_there(out, replaced, "--resume to go on, --overwrite to start again")
    settings = config.load(config_path, attn_backend=attn_backend, steps=steps)
    run = Run(settings)
    if resume:
        run.restore(checkpoint.load(path), path)
    if len(run.losses) >= settings.steps:
        click.echo(
            f"{path} is at step {len(run.losses)} of {settings.steps}: nothing to do; give more --steps to go on"
        )
        return
    make_folder(out)

    names = sorted({settings.attention.layer(index).backend.name for index in range(settings.model.layers)})
    found = [polyattn.backends.info(name) for name in names if name in polyattn.backends.names()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with interruptible() as stop, Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(", ".join(names), total=settings.steps, completed=len(run.losses), status="")

        def show(loss: float, speed: float) -> None:
            progress.update(task, advance=1, status=f"loss {loss:.3f}  {speed:,.0f} tokens/s")

        speed = train(run, path, stop=stop.is_set, on_step=show)
    report.Report(
        backend=", ".join(names),
        distribution=", ".join(f"{info.dist} {info.version}" for info in found),
        losses=run.losses,
        tokens_per_second=speed,
        peak_memory=peak_memory(),
    ).write(out)
    if stop.is_set():
        click.echo(f"Interrupted after step {len(run.losses)}; --resume goes on from {path}")
        raise SystemExit(INTERRUPTED)


@commands.command("demo")
@config_argument
@out_option
@overwrite_option
def demo_command(config_path: Path, out: Path, overwrite: bool) -> None:
    """Train CONFIG with eager and with sdpa, each in a process of its own, and compare the loss curves."""
    written = [f"{backend}/{name}" for backend in COMPARED for name in (CHECKPOINT, report.FILE)]
    refuse_what_is_there(out, () if overwrite else (*written, CURVES), "--overwrite to replace them")
    Run(config.load(config_path))  # a mistake is reported once, here
    make_folder(out)
    reports = []
    for backend in COMPARED:
        with interruptible() as stop:
            status = _train_in_process(config_path, backend, out / backend)
        if status < 0 and not stop.is_set():
            raise KilledRun(backend, -status)
        if status or stop.is_set():
            raise SystemExit(INTERRUPTED if stop.is_set() else status)
        reports.append(report.Report.read(out / backend))
    console = Console()
    console.print(report.table(reports))
    difference = report.largest_difference(reports)
    report.plot(reports, out / CURVES)
    console.print(f"Largest difference between the loss curves: {difference:.2e} (at most {report.LIMIT:g} allowed)")
    console.print(f"Both curves: {out / CURVES}")
    if not difference <= report.LIMIT:  # a NaN is no agreement
        raise SystemExit(1)


def _train_in_process(config_path: Path, backend: str, out: Path) -> int:
    """Train in a process of its own, so that its peak memory is its own; gives its exit status."""
    options = ["--attn-backend", backend, "--out", str(out), "--overwrite"]
    command = [sys.executable, "-m", "tiny_lm", "train", str(config_path), *options]
    with subprocess.Popen(command) as process:
        return process.wait()
