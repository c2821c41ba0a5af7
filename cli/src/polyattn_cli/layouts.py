"""A mask layout from command-line options, for every subcommand that takes one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from polyattn.messages import shown
from polyattn_cli import lacks_memory

if TYPE_CHECKING:
    from polyattn import MaskLayout

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Kind of layout -> the options that it understands; any other one is refused.
KINDS = {
    "full": {"q_len", "kv_len"},
    "causal": {"q_len", "kv_len", "sink_tokens"},
    "padded": {"q_len", "kv_len", "lengths", "side", "bidirectional"},
    "packed": {"lengths", "bidirectional", "sink_tokens"},
    "prefix_lm": {"q_len", "kv_len", "prefix"},
    "chunked": {"q_len", "kv_len", "chunk_size", "bidirectional"},
    "tree": {"parents", "lengths", "bidirectional"},
    "shared_prefix": {"prefix", "lengths"},
    "block_causal": {"q_len", "kv_len", "block_size"},
}


#: A number of rows, heads or positions; positions are int32.
LARGEST = 2**31 - 1
COUNT = click.IntRange(0, LARGEST)


def _numbers(value: str) -> list[int]:
    """The whole numbers in a text, none where it holds anything else."""
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        return []


def _ints(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    numbers = _numbers(value)
    if not numbers:
        raise click.BadParameter(f"{shown(value)} must be whole numbers with commas between them, such as 3,5,8")
    if sum(map(abs, numbers)) > LARGEST:
        raise click.BadParameter(f"{shown(value)} must add up to at most {LARGEST}")
    return numbers


def _window(_: click.Context, __: click.Parameter, value: str | None) -> int | tuple[int, int] | None:
    if value is None:
        return None
    match _numbers(value):
        case [window] if window >= 1:
            return window
        case [left, right] if min(left, right) >= -1:
            return left, right
    raise click.BadParameter(
        f"{shown(value)} must be a whole number >= 1, such as 128, or how many keys are seen before and after a query, "
        "such as 128,0 (-1: all)"
    )


_OPTIONS = (
    click.argument("kind", type=click.Choice(list(KINDS))),
    click.option("--q-len", type=COUNT, help="Queries."),
    click.option("--kv-len", type=COUNT, help="Keys; the queries are the last of them."),
    click.option(
        "--lengths",
        callback=_ints,
        metavar="N,N,...",
        help="padded: valid keys of each batch row; packed: documents of a row; tree: nodes; shared_prefix: responses.",
    ),
    click.option("--side", type=click.Choice(["left", "right"]), help="padded: where the padding is."),
    click.option(
        "--parents",
        callback=_ints,
        metavar="N,N,...",
        help="tree: for each node the number of the one before it, from 0; -1 for a root.",
    ),
    click.option(
        "--prefix",
        callback=_ints,
        metavar="N,N,...",
        help="prefix_lm: prefix of each batch row; shared_prefix: what all responses share.",
    ),
    click.option("--chunk-size", type=click.IntRange(1), help="chunked: positions in a chunk."),
    click.option("--block-size", type=click.IntRange(1, LARGEST), help="block_causal: tokens in a block."),
    click.option(
        "--bidirectional",
        is_flag=True,
        default=None,
        help="padded, packed, chunked: later keys are seen too; tree: those of the same node.",
    ),
    click.option(
        "--window",
        callback=_window,
        metavar="N|L,R",
        help="Keys that a query sees at most, its own included; or how many before and after it, -1 for all.",
    ),
    click.option("--sink-tokens", type=COUNT, help="causal, packed: first keys that --window does not hide."),
)


def layout_options(command: _Function) -> _Function:
    """Give ``command`` the argument KIND and the options that :func:`build` understands, and refuse what is too large.

    Most of what a layout needs is made by what asks it, so a lack of memory may show anywhere in the command.
    """

    @functools.wraps(command)
    def within_memory(*arguments: Any, **given: Any) -> Any:
        try:
            return command(*arguments, **given)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise click.UsageError(_too_large(given)) from error

    for option in reversed(_OPTIONS):
        within_memory = option(within_memory)
    return within_memory  # type: ignore[return-value]


def _too_large(given: dict[str, Any]) -> str:
    sizes = {_flag(name): given[name] for name in ("q_len", "kv_len", "prefix", "lengths", "chunk_size") if given[name]}
    got = ", ".join(f"{flag} {shown(value)}" for flag, value in sizes.items()) or "its default sizes"
    return f"the layout must fit into memory, got {got}; give fewer queries and keys"


def build(
    kind: str,
    *,
    q_len: int | None,
    kv_len: int | None,
    window: int | tuple[int, int] | None,
    default_len: int,
    check_size: Callable[[int, int], None] = lambda queries, keys: None,
    **given: Any,
) -> MaskLayout:
    """The layout that the options describe.

    Args:
        kind: one of :data:`KINDS`.
        q_len: number of queries; like the rest ``None`` when not given.
        kv_len: number of keys.
        window: window of any kind of layout.
        default_len: length of a row when neither ``q_len`` nor ``kv_len`` is given.
        check_size: told the numbers of queries and keys before anything is made; raises when they are too many.
        given: the other options of :func:`layout_options`.

    Raises:
        click.UsageError: an option is missing, or means nothing for this kind, or ``check_size`` raises.
        LayoutError: the values contradict each other.
    """
    from polyattn import MaskLayout

    set_options = {**given, "q_len": q_len, "kv_len": kv_len}
    foreign = [_flag(name) for name, value in set_options.items() if value is not None and name not in KINDS[kind]]
    if foreign:
        raise click.UsageError(f"{', '.join(foreign)} means nothing for the layout {kind}; leave it out")
    if given["sink_tokens"] and window is None:
        raise click.UsageError("--sink-tokens means nothing without --window, which hides them; give both or neither")

    def needed(name: str) -> Any:
        if given[name] is None:
            raise click.UsageError(f"the layout {kind} needs {_flag(name)}")
        return given[name]

    def one(name: str) -> int:
        numbers = needed(name)
        if len(numbers) != 1:
            raise click.UsageError(f"{_flag(name)} must be one number for the layout {kind}, got {shown(numbers)}")
        return int(numbers[0])

    causal, sinks = not given["bidirectional"], given["sink_tokens"] or 0
    keys = kv_len if kv_len is not None else (q_len if q_len is not None else default_len)
    if "q_len" not in KINDS[kind]:
        keys = sum(needed("lengths")) + (one("prefix") if kind == "shared_prefix" else 0)
    queries = q_len if q_len is not None else keys
    check_size(queries, keys)
    made: dict[str, Callable[[], MaskLayout]] = {
        "full": lambda: MaskLayout.full(queries, keys),
        "causal": lambda: MaskLayout.causal(queries, keys, sink_tokens=sinks),
        "padded": lambda: MaskLayout.padded(
            lengths=needed("lengths"), kv_len=keys, q_len=q_len, side=given["side"] or "right", causal=causal
        ),
        "packed": lambda: MaskLayout.packed(needed("lengths"), causal=causal, sink_tokens=sinks),
        "prefix_lm": lambda: MaskLayout.prefix_lm(needed("prefix"), queries, keys),
        "chunked": lambda: MaskLayout.chunked(needed("chunk_size"), queries, keys, causal=causal),
        "tree": lambda: MaskLayout.tree(needed("parents"), needed("lengths"), causal=causal),
        "shared_prefix": lambda: MaskLayout.shared_prefix(one("prefix"), needed("lengths")),
        "block_causal": lambda: MaskLayout.block_causal(needed("block_size"), queries, keys),
    }
    layout = made[kind]()
    return layout if window is None else layout.with_window(window)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
