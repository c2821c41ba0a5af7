"""``polyattn rope``: what a configuration says about rotary embeddings, resolved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from polyattn import PolyattnError, RopeConfigError
from polyattn.messages import shown
from polyattn_cli.picture import save

if TYPE_CHECKING:
    from polyattn import RopeSpec

_LANES = 8


def _positions(_: click.Context, __: click.Parameter, given: str) -> list[int]:
    try:
        found = [int(position) for position in given.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"must be integers between commas, got {shown(given)}") from error
    if any(abs(position) >= 2**63 for position in found):
        raise click.BadParameter(f"must be less than 2**63, as positions are, got {shown(given)}")
    return found


@click.command()
@click.argument(
    "configs", metavar="CONFIG.json...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False)
)
@click.option("--layer-type", help="Which rope to read where layer types have their own, such as full_attention.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Width of a head, where the config does not say it.")
@click.option("--max-position", type=click.IntRange(min=1), help="Longest sequence, where the config does not say it.")
@click.option("--interleaved/--halves", default=None, help="Pairing of channels, where the config does not say it.")
@click.option(
    "--convention", default="serving", show_default=True, help="How to read old draft models: dflash or eagle."
)
@click.option("--at", "positions", default="0,1,1024,32768", show_default=True, callback=_positions, help="Positions.")
@click.option("--length", type=int, help="Length of the sequence, for a spec whose frequencies depend on it.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True), help="Draw wavelength per lane here (PNG, SVG)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the canonical specs as JSON and nothing else.")
@click.pass_context
def rope(
    ctx: click.Context,
    /,
    configs: tuple[str, ...],
    positions: list[int],
    length: int | None,
    plot: str | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Print the rotary spec of each CONFIG.json and a few of its angles.

    A file is the config.json of a transformers model, or a spec in canonical form.
    """
    if as_json and ctx.get_parameter_source("positions") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--json prints no angles, so --at means nothing beside it; leave one of them out")
    if as_json and length is not None and plot is None:
        raise click.UsageError("--json prints no angles, so --length means nothing beside it; leave one of them out")
    specs = [(path, _read(path, reading)) for path in configs]
    tables = [] if as_json else [_angles(spec, positions, length) for _, spec in specs]
    if plot is not None:
        _draw_wavelengths(specs, plot, length)
    if as_json:
        found = [spec.to_dict() for _, spec in specs]
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    else:
        for (path, spec), (angles, scaling) in zip(specs, tables, strict=True):
            click.echo(f"{path}\n{json.dumps(spec.to_dict(), indent=2)}")
            _draw_angles(positions, angles, scaling)
    if plot is not None:
        click.echo(f"written to {plot}", err=as_json)


def _read(path: str, reading: dict[str, Any]) -> RopeSpec:
    from polyattn import RopeSpec

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RopeConfigError(f"{path} is not a JSON file: {error}") from error
    except RecursionError as error:
        raise RopeConfigError(f"{path} cannot be read: it is nested too deeply") from error
    try:
        if isinstance(data, dict) and "schema_version" in data:
            _refuse_options(reading)
            return RopeSpec.from_dict(data)
        return RopeSpec.from_hf(data, **reading)
    except RopeConfigError as error:
        raise RopeConfigError(f"{path}: {error}") from error


def _refuse_options(reading: dict[str, Any]) -> None:
    asked = [name for name, value in reading.items() if value not in (None, "serving")]
    if asked:
        options = ", ".join("--halves" if reading[name] is False else f"--{name.replace('_', '-')}" for name in asked)
        raise RopeConfigError(f"it is in canonical form, which says everything; leave out {options}")


def _draw_angles(positions: list[int], angles: list[list[float]], scaling: float) -> None:
    """Angles in radians, lanes spread from the fastest to the slowest, and the factor of cos and sin."""
    from polyattn_cli.table import draw

    count = len(angles[0])
    lanes = sorted({round(i * (count - 1) / max(1, min(_LANES, count) - 1)) for i in range(min(_LANES, count))})
    draw(
        ("angle at", *(f"lane {lane}" for lane in lanes)),
        [
            (str(position), *(f"{row[lane]:.6g}" for lane in lanes))
            for position, row in zip(positions, angles, strict=True)
        ],
        title=f"radians; cos and sin are multiplied by {scaling:.6g}",
    )


def _angles(spec: RopeSpec, positions: list[int], length: int | None) -> tuple[list[list[float]], float]:
    import torch

    from polyattn import RotaryEmbedding

    angles, scaling = RotaryEmbedding(spec).angles(torch.tensor([positions]), length=length)
    return angles[0].tolist(), scaling


def _draw_wavelengths(specs: list[tuple[str, RopeSpec]], plot: str, length: int | None) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolyattnError("--plot needs matplotlib, got none; install it with pip install 'polyattn[viz]'") from error
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="lane", ylabel="wavelength in positions", yscale="log")
    for path, spec in specs:
        (turns,), _ = _angles(spec, [1], length)
        lanes = [lane for lane, turn in enumerate(turns) if turn]
        axes.plot(lanes, [2 * math.pi / turns[lane] for lane in lanes], label=f"{Path(path).stem}: {spec.variant}")
        axes.axhline(spec.max_position, linestyle=":", linewidth=0.8, color=axes.lines[-1].get_color())
    axes.legend()
    save(figure, plot, "--plot")
