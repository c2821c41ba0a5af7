"""``polyattn new``: a package with a working plugin, its tests, CI file, README and licence.

What is written is the folder ``template`` beside this module, rendered by copier, which the extra ``polyattn[new]``
brings.
"""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import click

from polyattn import PolyattnError, __version__
from polyattn.messages import shown
from polyattn.registry import BACKENDS, FIRST_PARTY, ROPE, brief, illegal_name

_TEMPLATE = Path(__file__).with_name("template")
_LONGEST = 100  # the package, its module and its folder are called so
_TAKEN = {dist for dists in FIRST_PARTY.values() for dist in dists.values()} | {
    f"polyattn-{name}" for name in ("cli", "conformance", "modules", "readers", "transformers")
}


@click.command()
@click.argument("name")
@click.option("--rope", is_flag=True, help="A RoPE variant instead of a backend.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="here",
    help="Where to make the folder.",
)
@click.option("--author", help="Who holds the copyright.")
def new(name: str, rope: bool, into: Path, author: str | None) -> None:
    """Write a package with a working plugin called NAME, ready to be installed, tested and changed.

    The folder is called as the distribution: polyattn-NAME, or polyattn-rope-NAME.
    """
    answers = _answers(name, rope)
    folder = into / answers["dist"]
    if os.path.lexists(folder):
        raise click.BadParameter(
            f"{folder} exists and is left as it is; choose another name or --into", param_hint="NAME"
        )
    if author is not None and not author.isprintable():  # it stands in a TOML file and in a licence
        raise click.BadParameter(f"must be one line of text, got {shown(author)}", param_hint="--author")
    try:
        import copier
    except ImportError as error:
        raise PolyattnError("polyattn new needs copier, which is not installed: pip install 'polyattn[new]'") from error
    if not _TEMPLATE.is_dir():
        raise PolyattnError(
            f"polyattn new needs the folder {_TEMPLATE}; run it from an installed polyattn, not from a zip"
        )
    more = {
        "rope": rope,
        "author": author or f"The {answers['dist']} developers",
        "year": dt.datetime.now(dt.timezone.utc).year,
        "core_version": __version__,
    }
    try:
        copier.run_copy(str(_TEMPLATE), folder, data={**answers, **more}, defaults=True, quiet=True)
    except (OSError, RuntimeError) as error:  # pathlib raises the latter for a loop of links
        why = getattr(error, "strerror", None) or brief(error)
        raise PolyattnError(
            f"--into must be a folder that one may write to, got {shown(str(into))}: {why}; name another one"
        ) from error
    steps = [f"cd {folder}", 'pip install --editable ".[test]"', "polyattn list", "pytest"]
    if not rope:
        steps.insert(3, f"polyattn check {answers['name']}")
    click.echo("\n  ".join([f"{folder} is ready. Next:", *steps]))


def _answers(given: str, rope: bool) -> dict[str, str]:
    """What the plugin, its class and its package are called."""
    group, noun, prefix = (ROPE, "RoPE variant", "polyattn-rope-") if rope else (BACKENDS, "backend", "polyattn-")
    name = given.replace("-", "_").removeprefix("polyattn_")
    if rope:
        name = name.removeprefix("rope_")
    fault = illegal_name(group, name)
    if len(name) > _LONGEST:
        fault = f"a plugin's name must have at most {_LONGEST} letters, got {len(name)}"
    dist = prefix + "-".join(filter(None, name.split("_")))
    if name in FIRST_PARTY[group] or dist in _TAKEN:
        fault = f"{FIRST_PARTY[group].get(name, dist)} has that name; choose another one"
    if fault:
        raise click.BadParameter(fault, param_hint="NAME")
    words = "".join(word.capitalize() for word in name.split("_"))
    kind = "Rope" if rope else "Backend"
    return {
        "name": name,
        "noun": noun,
        "group": group,
        "dist": dist,
        "package": dist.replace("-", "_"),
        "class_name": words if words.endswith(kind) else words + kind,
    }
