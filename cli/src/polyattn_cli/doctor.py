"""``polyattn doctor``: load every plugin, and say what is wrong and what to do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NoReturn

import click

from polyattn import PolyattnError, Registry, __version__, backends, rope_variants
from polyattn.registry import brief, discovery, hooks
from polyattn_cli import plugins_print_to_stderr
from polyattn_cli.leftovers import leftovers
from polyattn_cli.listing import SECTIONS
from polyattn_cli.ranges import outside

#: Statuses that make the exit status 1.
_FAULTS = frozenset({"broken", "incompatible", "conflict"})


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Load every plugin, and say what is wrong and what to do.

    The exit status is 0 when all is well and 1 when a plugin, or torch, is broken, incompatible or in conflict, or when
    a package is installed in a version outside the declared range.
    """
    start = time.perf_counter()
    discovery.rescan()
    seconds = time.perf_counter() - start
    with plugins_print_to_stderr():
        machine, problems = _machine()
        if not problems:  # importing torch once more after it failed may kill the interpreter
            with _exits_refused():
                for registry in (backends, rope_variants):
                    _load_all(registry)
                hooks.installed(hooks.NAMES[0])
        plugins = {
            section: [_finding(section, info.to_dict()) for info in infos()] for section, infos in SECTIONS.items()
        }
    strange, unreadable = outside()
    found = [*problems, *strange, *unreadable, *leftovers()]
    report = {
        **machine,
        **plugins,
        "problems": list(dict.fromkeys(found)),
        "scan_seconds": round(seconds, 4),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    ill = (
        problems or strange or any(finding["status"] in _FAULTS for section in SECTIONS for finding in plugins[section])
    )
    ctx.exit(1 if ill else 0)


def _machine() -> tuple[dict[str, Any], list[str]]:
    machine: dict[str, Any] = {
        "polyattn": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken torch is what a doctor is for
        problems = [f"torch cannot be imported, so no plugin was loaded: {brief(error)}", *_unreadable_for_torch()]
        return {**machine, "torch": None, "cuda": None, "devices": []}, problems
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return {**machine, "torch": str(torch.__version__), "cuda": torch.version.cuda, "devices": devices}, []


def _unreadable_for_torch() -> list[str]:
    """Metadata that fails the search for device extensions which is a part of ``import torch``, one text each."""
    problems = []
    for dist in importlib.metadata.distributions():
        try:
            dist.entry_points  # noqa: B018 - reading it is the question
        except Exception as error:  # noqa: BLE001 - any metadata may be broken in any way
            problems.append(
                f"{getattr(dist, '_path', dist)}: its entry_points.txt cannot be read, which `import torch` does "
                f"({brief(error)}); reinstall or remove that distribution, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
    return problems


@contextlib.contextmanager
def _exits_refused() -> Iterator[None]:
    """Make ``os._exit`` an error of the plugin that calls it, which would end this process without a word."""
    process, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child process, such as those of multiprocessing, ends that way
            leave(status)
        raise SystemExit(f"it calls os._exit({status}), which ends every program that loads it")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def _load_all(registry: Registry) -> None:
    for info in registry.infos():
        if info.status == "available":
            try:
                registry.get(f"{info.dist}:{info.name}")
            except PolyattnError:
                continue  # the registry remembers it, and infos() tells
            except KeyboardInterrupt:
                click.echo(f"interrupted while {info.name} of {info.dist} {info.version} was loaded", err=True)
                raise


def _finding(section: str, finding: dict[str, Any]) -> dict[str, Any]:
    finding["code"] = _code(finding["value"].partition(":")[0].strip())
    if section == "backends" and finding["status"] == "loaded":
        try:
            finding["cannot_run_on"] = _cannot_run_on(backends.get(f"{finding['dist']}:{finding['name']}"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin's own question may fail in any way
            finding["status"], finding["error"] = "broken", f"device_reasons: {brief(error)}"
    return finding


def _cannot_run_on(backend: Any) -> dict[str, list[str]]:
    # An optional method: a backend without it tells only when it is asked about a layout and a request.
    device_reasons = getattr(backend, "device_reasons", None)
    if device_reasons is None:
        return {}
    import torch

    reasons = {kind: [str(reason) for reason in device_reasons(torch.device(kind))] for kind in ("cpu", "cuda")}
    return {kind: texts for kind, texts in reasons.items() if texts}


def _code(module: str) -> str:
    """The file of ``module``, found without importing it or its parents; empty when there is none."""
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return ""
    names = module.split(".")
    for depth in range(2, len(names) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return ""
        spec = PathFinder.find_spec(".".join(names[:depth]), spec.submodule_search_locations)
    return (spec.origin or "") if spec else ""


def _print(report: dict[str, Any]) -> None:
    from polyattn_cli.table import draw

    for key in ("polyattn", "python", "platform", "torch", "cuda"):
        click.echo(f"{key:9} {report[key] or 'none'}")
    click.echo(f"{'devices':9} {', '.join(report['devices']) or 'none'}")
    click.echo(f"{'scan':9} {report['scan_seconds'] * 1000:.0f} ms")
    findings = [(section, finding) for section in SECTIONS for finding in report[section]]
    draw(
        ("kind", "name", "status", "distribution", "version", "cannot run on"),
        [
            (section, *(finding[key] for key in ("name", "status", "dist", "version")), _devices(finding))
            for section, finding in findings
        ],
    )
    for section, finding in findings:
        click.echo(f"{section}: {finding['name']}")
        click.echo(f"  code         {finding['code'] or 'not found: ' + finding['value']}")
        click.echo(f"  entry point  {finding['source'] or 'none: registered in code'}")
        for kind, reasons in finding.get("cannot_run_on", {}).items():
            for reason in reasons:
                click.echo(f"  not on {kind}: {reason}")
        if finding["error"]:
            click.echo(textwrap.indent(f"{finding['status']}: {finding['error']}", "  "))
    for problem in report["problems"]:
        click.echo(f"problem: {problem}")


def _devices(finding: dict[str, Any]) -> str:
    return ", ".join(finding.get("cannot_run_on", {}))
