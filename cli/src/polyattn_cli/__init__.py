"""The command ``polyattn``.

A subcommand's module is imported when it is asked for, torch only by those that need it, and rich only to draw a table.
An error that polyattn raises on purpose ends a command with its message on stderr and exit status 2.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from polyattn import PolyattnError, __version__
from polyattn.messages import shortened

_LONGEST = 400  # characters of a message about arguments
#: Subcommand -> where its click command is, and its line in ``polyattn --help``.
COMMANDS = {
    "bench": ("polyattn_cli.bench:bench", "Time backends side by side."),
    "check": ("polyattn_cli.check:check", "Check that a backend honours or refuses everything."),
    "doctor": ("polyattn_cli.doctor:doctor", "Say what is wrong with this installation."),
    "explain": ("polyattn_cli.explain:explain", "Say why a backend would be chosen or refused."),
    "list": ("polyattn_cli.listing:list_plugins", "List what is installed, without importing any of it."),
    "mask": ("polyattn_cli.mask:mask", "Draw what may see what."),
    "new": ("polyattn_cli.new:new", "Write a package for a plugin of your own."),
    "plan": ("polyattn_cli.plan:plan", "Say what sharing sequences out to ranks would cost."),
    "rope": ("polyattn_cli.rope:rope", "Print the rotary spec that a model's config means."),
}


class _Refusal(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _short_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _short_errors():
                return super().invoke(ctx)
        except PolyattnError as error:
            raise _Refusal(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise _Refusal("there is not enough memory for what was asked; give smaller numbers") from error


def lacks_memory(error: Exception) -> bool:
    """Whether ``error`` says that memory on the host could not be had; torch has no type for it."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Bound the messages of click, which repeat an argument however long it is."""
    try:
        yield
    except click.UsageError as error:
        message = error.format_message()
        if len(message) <= _LONGEST:
            raise
        raise click.UsageError(shortened(message, _LONGEST), error.ctx) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="polyattn %(version)s")
def cli() -> None:
    """Attention backends and RoPE variants as plugins."""


@contextlib.contextmanager
def plugins_print_to_stderr() -> Iterator[None]:
    """Around whatever runs plugins: what they and their child processes print stays out of a command's answer."""
    if sys.stderr is None:  # closed by whoever started the process: nothing to keep apart
        yield
        return
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(answer, 1)
        os.close(answer)


def main() -> None:
    """Run the command line with ``sys.argv``."""
    if sys.stderr is not None:
        faulthandler.enable()  # a plugin whose native code crashes ends the process; this says where it was
    if sys.stdout is None:  # closed by whoever started the process, who wants the exit status alone
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the whole life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or a summary may hold what a terminal cannot show
    try:
        try:
            cli(prog_name="polyattn")
        finally:
            sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered must not fail again at exit
        if error.errno == errno.EPIPE:  # the reader has seen enough
            sys.exit(1)
        click.echo(f"Error: {error}" if error.filename else f"Error: the output cannot be written: {error}", err=True)
        sys.exit(_Refusal.exit_code)
