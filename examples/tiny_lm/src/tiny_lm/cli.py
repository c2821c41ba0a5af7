"""The command line: ``tiny-lm`` with ``train``, ``sample``, ``tree``, ``demo`` and ``parallel``.

What the user can put right ends with one message and exit status 2, a demo whose backends disagree with 1, and a run
that a signal ended with 128 and the signal's number, as shells have it: 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import polyattn
from tiny_lm import checkpoint, config, display, ranks, report, tree
from tiny_lm.folder import FolderError, claimed, refuse_what_is_there
from tiny_lm.sample import sample
from tiny_lm.train import Run, peak_memory, train

INTERRUPTED = 128 + signal.SIGINT
CHECKPOINT = "checkpoint.pt"
CURVES = "loss.png"
TREE = "tree.png"
RESULTS = (CHECKPOINT, report.FILE)
COMPARED = ("eager", "sdpa")
#: The modules that start a run, and options of its own.
Launch = tuple[tuple[str, ...], tuple[str, ...]]
#: What the demo lets its model go on with, at a temperature where text of a small model does not repeat itself.
PROMPT, TEMPERATURE = "The ", 0.7


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
        except (polyattn.PolyattnError, checkpoint.CheckpointError, FolderError, OSError) as error:
            raise BadInput(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):  # torch has no type
                raise
            text = "there is not enough memory; take a smaller model, fewer rows or a shorter row_length"
            raise BadInput(text) from error
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


class Stop:
    """Whether a signal asked the run to stop.

    Attributes:
        number: of the signal; ``None`` until there is one.
    """

    number: int | None = None

    def asked(self) -> bool:
        """Whether there was a signal."""
        return self.number is not None

    def handle(self, number: int, _frame: object) -> None:
        """Remember the first signal, so that no step is cut in half; the second one interrupts at once."""
        if self.asked():
            raise KeyboardInterrupt
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a question that can be asked between steps."""
    stop = Stop()
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(cls=Commands)
def commands() -> None:
    """Train a small byte-level decoder; its config names the attention backend."""


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
    """Train the model that CONFIG describes; Ctrl-C or SIGTERM saves a checkpoint and stops."""
    if resume and overwrite:
        raise BadInput("--resume and --overwrite exclude each other, got both; give one")
    replaced = () if resume or overwrite else RESULTS

    def check() -> None:
        refuse_what_is_there(out, replaced, "--resume to go on, --overwrite to start again", RESULTS)

    check()
    run = Run(config.load(config_path, attn_backend=attn_backend, steps=steps))
    if resume:
        checkpoint.load(out / CHECKPOINT)  # before a folder is made for what is not there
    if not ranks.is_first():  # it takes part in every step, and writes nothing
        if resume:
            run.restore(checkpoint.load(out / CHECKPOINT), out / CHECKPOINT)
        with interruptible() as stop:
            train(run, out / CHECKPOINT, stop=stop.asked, on_step=lambda loss, speed: None)
        return
    with claimed(out):
        check()  # another run may have ended in between
        if resume:
            run.restore(checkpoint.load(out / CHECKPOINT), out / CHECKPOINT)
        _go_on(run, out)


def _go_on(run: Run, out: Path) -> None:
    """Take the steps that are left, and write the report of all."""
    settings, path, done = run.config, out / CHECKPOINT, len(run.losses)
    if done >= settings.steps and report.is_of(out, run.losses):
        click.echo(f"{path} is at step {done} of {settings.steps}: nothing to do; give more --steps to go on")
        return
    names = sorted({settings.attention.layer(index).backend.name for index in range(settings.model.layers)})
    found = [polyattn.backends.info(name) for name in names if name in polyattn.backends.names()]
    with interruptible() as stop, display.shown(", ".join(names), done, settings.steps) as show:
        speed = train(run, path, stop=stop.asked, on_step=show)
    report.Report(
        backend=", ".join(names),
        distribution=", ".join(f"{info.dist} {info.version}" for info in found),
        losses=run.losses,
        tokens_per_second=speed or None,
        peak_memory=peak_memory(),
        processes=ranks.count(),
    ).write(out)
    if stop.number is not None:
        click.echo(f"Interrupted after step {len(run.losses)}; --resume goes on from {path}")
        raise SystemExit(128 + stop.number)


@commands.command("sample")
@config_argument
@out_option
@click.option("--prompt", default=PROMPT, show_default=True, help="Text to go on with.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="How many bytes.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest byte each time; higher draws more freely.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True, help="Of the draws.")
@click.option("--attn-backend", metavar="NAME", help="Use this backend instead of the config's.")
def sample_command(
    config_path: Path, out: Path, prompt: str, tokens: int, temperature: float, seed: int, attn_backend: str | None
) -> None:
    """Write text with the model that CONFIG describes and the checkpoint in the folder."""
    if not prompt:
        raise BadInput("--prompt must be at least one character, got none; the model goes on with it")
    run = Run(config.load(config_path, attn_backend=attn_backend))
    run.restore(checkpoint.load(out / CHECKPOINT), out / CHECKPOINT)
    _write_text(run, prompt, tokens, temperature, seed)


def _write_text(run: Run, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    start = time.perf_counter()
    text = bytes(sample(run, prompt.encode(), tokens, temperature=temperature, seed=seed))
    speed = tokens / (time.perf_counter() - start)
    click.echo(prompt + text.decode(errors="replace"))
    click.echo(f"{tokens} bytes, {speed:,.0f} tokens/s")


@commands.command("tree")
@config_argument
@out_option
@overwrite_option
@click.option("--prompt", type=click.IntRange(min=1), default=1024, show_default=True, help="Bytes of the prompt.")
@click.option("--response", type=click.IntRange(min=1), default=256, show_default=True, help="Bytes of a response.")
@click.option("--responses", type=click.IntRange(min=1), default=8, show_default=True, help="Responses to a prompt.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps, each of a new prompt.")
def tree_command(
    config_path: Path, out: Path, overwrite: bool, prompt: int, response: int, responses: int, steps: int
) -> None:
    """Train the model that CONFIG describes on responses to one prompt, as rows and as a tree, and compare them."""
    refuse_what_is_there(out, () if overwrite else (TREE,), "--overwrite to replace it", (TREE,))
    settings = config.load(config_path)
    found = tree.measure(settings, prompt=prompt, response=response, responses=responses, steps=steps)
    rows, shared = found
    with claimed(out):
        tree.plot(found, out / TREE)
    for one in found:
        saved = f"{one.saved / 2**20:,.0f} MiB kept for the backward"
        click.echo(f"{one.name}: {one.tokens} tokens, {one.seconds:.3f} s a step, {saved}")
    difference = max(abs(a - b) for a, b in zip(rows.losses, shared.losses, strict=True))
    click.echo(
        f"the tree takes {rows.seconds / shared.seconds:.1f} times less time; the losses differ by {difference:.1e}"
    )
    click.echo(f"Picture: {out / TREE}")
    if not difference <= report.LIMIT:  # a NaN is not an agreement
        raise SystemExit(1)


@commands.command("demo")
@config_argument
@out_option
@overwrite_option
def demo_command(config_path: Path, out: Path, overwrite: bool) -> None:
    """Train CONFIG with eager and with sdpa, each in a process of its own, compare the loss curves, and sample."""
    written = [*(f"{backend}/{name}" for backend in COMPARED for name in RESULTS), CURVES]
    refuse_what_is_there(out, () if overwrite else written, "--overwrite to replace them", written)
    run = Run(config.load(config_path))  # a mistake is reported once, here
    with claimed(out):
        _compare(config_path, out, {name: ((), ("--attn-backend", name)) for name in COMPARED})
    trained = out / COMPARED[-1] / CHECKPOINT
    run.restore(checkpoint.load(trained), trained)
    _write_text(run, PROMPT, 200, TEMPERATURE, seed=0)


@commands.command("parallel")
@config_argument
@out_option
@overwrite_option
@click.option("--processes", type=click.IntRange(min=2), default=2, show_default=True, help="That share the tokens.")
def parallel_command(config_path: Path, out: Path, overwrite: bool, processes: int) -> None:
    """Train CONFIG, which sets context_parallel, in one process and in several, and compare the loss curves."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m")
    runs: dict[str, Launch] = {"one": ((), ()), "several": (launcher, ())}
    written = [*(f"{name}/{result}" for name in runs for result in RESULTS), CURVES]
    refuse_what_is_there(out, () if overwrite else written, "--overwrite to replace them", written)
    if config.load(config_path).attention.context_parallel is None:
        raise BadInput("context_parallel must be set in the config, got none; add `context_parallel: {method: auto}`")
    with claimed(out):
        _compare(config_path, out, runs)


def _compare(config_path: Path, out: Path, runs: dict[str, Launch]) -> None:
    reports = []
    for backend, launch in runs.items():
        with interruptible() as stop:
            status = _train_in_process(config_path, launch, out / backend, stop)
        if stop.number is not None:
            raise SystemExit(128 + stop.number)
        if status < 0:
            raise KilledRun(backend, -status)
        if status:
            raise SystemExit(status)
        reports.append(report.Report.read(out / backend))
    console = Console()
    console.print(report.table(reports))
    difference = report.largest_difference(reports)
    report.plot(reports, out / CURVES)
    console.print(f"Largest difference between the loss curves: {difference:.2e} (at most {report.LIMIT:g} allowed)")
    console.print(f"Both curves: {out / CURVES}")
    if not difference <= report.LIMIT:  # a NaN is not an agreement
        raise SystemExit(1)


def _train_in_process(config_path: Path, launch: Launch, out: Path, stop: Stop) -> int:
    """Train in a process of its own, so that its peak memory is its own; gives its exit status."""
    launcher, own = launch
    options = [*own, "--out", str(out), "--overwrite"]
    command = [sys.executable, "-m", *launcher, "tiny_lm", "train", str(config_path), *options]
    with subprocess.Popen(command) as process:
        told = False
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if stop.number == signal.SIGTERM and not told:  # Ctrl-C reaches the child from the terminal
                    process.terminate()
                    told = True
