"""``polyattn bench``: backends side by side on one layout and request.

Every round goes through all backends in turn and the median of each is taken, so that a busy machine slows all alike.
What to quote is the ratio to one backend of the same run; milliseconds are those of one machine at one time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from polyattn import PolyattnError, backends
from polyattn.registry import brief
from polyattn_cli import plugins_print_to_stderr
from polyattn_cli.question import ask, question_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyattn import AttentionBackend, AttentionRequest, MaskLayout, Reason


@click.command()
@question_options
@click.option("--backend", "names", multiple=True, help="Time this one; repeatable. All that can unless given.")
@click.option("--relative-to", metavar="NAME", help="The backend whose ratio is 1; the first one unless given.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds after the warm-up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def bench(
    ctx: click.Context, /, names: tuple[str, ...], relative_to: str | None, rounds: int, as_json: bool, **given: Any
) -> None:
    """Time backends on random tensors under a layout.

    KIND is the mask. A call is the forward and, with --grad, its backward; what is prepared once for all layers is
    timed apart. A backend that cannot do it is listed with its reasons. The exit status is 1 when one that --backend
    names cannot, when one fails while it runs, and when none is left.
    """
    with plugins_print_to_stderr():
        layout, request = ask(given)
        reasons = _reasons(names, relative_to, layout, request)
        able = [name for name in reasons if not reasons[name]]
        runs = _time(able, layout, request, rounds)
    timed = [name for name in able if not runs[name].error]
    base = relative_to or next(iter(timed), None)
    report = {
        **_setting(layout, request, rounds),
        "relative_to": base,
        "backends": {name: runs[name].to_dict(runs.get(base or "")) for name in able},
        "refused": {name: [reason.to_dict() for reason in why] for name, why in reasons.items() if why},
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report, reasons)
    ctx.exit(0 if timed == able and timed and not any(reasons[name] for name in names) else 1)


def _reasons(
    names: Sequence[str], relative_to: str | None, layout: MaskLayout, request: AttentionRequest
) -> dict[str, tuple[Reason, ...]]:
    """Whom to time, in order, and what speaks against each."""
    from polyattn import explain
    from polyattn.select import reasons_of

    named = dict.fromkeys([*names, *([relative_to] if relative_to else [])])
    for name in named:
        backends.get(name)  # what cannot be loaded is an error, not a refusal
    found = {name: reasons_of(name, layout, request) for name in named}
    if relative_to and found[relative_to]:
        why = "; ".join(map(str, found[relative_to]))
        raise PolyattnError(f"--relative-to must name a backend that can do this, got '{relative_to}': {why}")
    return found if names else {**explain(layout, request).candidates, **found}


@dataclasses.dataclass
class _Run:
    """The seconds of one backend, its warm-up first, or what it raised."""

    prepare: list[float] = dataclasses.field(default_factory=list)
    call: list[float] = dataclasses.field(default_factory=list)
    what: str = ""
    error: str = ""

    def to_dict(self, base: _Run | None) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        times = {f"{name}_ms": round(_median(getattr(self, name)) * 1000, 4) for name in ("call", "prepare")}
        ratio = None if base is None or base.error else round(_median(self.call) / _median(base.call), 3)
        return {**times, "ratio": ratio, "runs": self.what}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds[1:])


def _time(able: list[str], layout: MaskLayout, request: AttentionRequest, rounds: int) -> dict[str, _Run]:
    runs = {name: _Run() for name in able}
    if able:
        tensors = _tensors(layout, request)
        layout = layout.to(request.device)
    for _ in range(rounds + 1):
        for name, run in runs.items():
            if run.error:
                continue
            try:
                _round(run, backends.get(name), layout, request, tensors)
            except Exception as error:  # noqa: BLE001 - a backend that fails is reported, and the others go on
                run.error = brief(error)
    return runs


def _round(
    run: _Run, backend: AttentionBackend, layout: MaskLayout, request: AttentionRequest, tensors: dict[str, Tensor]
) -> None:
    import torch

    start = _now(request)
    prepared = backend.prepare(layout, request)
    ready = _now(request)
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    with torch.set_grad_enabled(bool(wanted)):
        result = prepared(**tensors)
        if wanted:
            outputs = [result.output, *([result.lse] if request.needs_lse_grad and result.lse is not None else [])]
            torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs], allow_unused=True)
    done = _now(request)
    describe = getattr(backend, "describe", None)
    run.what = describe(prepared) if describe else ""
    run.prepare.append(ready - start)
    run.call.append(done - ready)


def _now(request: AttentionRequest) -> float:
    import torch

    if request.device.type != "cpu":
        torch.accelerator.synchronize(request.device)
    return time.perf_counter()


def _tensors(layout: MaskLayout, request: AttentionRequest) -> dict[str, Tensor]:
    import torch

    if request.device.type == "meta":
        raise click.BadParameter("nothing is computed on meta; name a real device", param_hint="--device")
    _refuse_device(request.device)
    shapes: dict[str, tuple[tuple[int, ...], bool]] = {
        "q": ((request.batch, request.heads, layout.q_len, request.head_dim), request.needs_grad),
        "k": ((request.batch, request.kv_heads, layout.kv_len, request.head_dim), request.needs_grad),
        "v": ((request.batch, request.kv_heads, layout.kv_len, request.v_head_dim), request.needs_grad),
    }
    if request.has_bias:
        shapes["bias"] = ((1, 1, layout.q_len, layout.kv_len), request.needs_bias_grad)
    if request.has_sinks:
        shapes["sinks"] = ((request.heads,), request.needs_grad)
    random = torch.Generator().manual_seed(0)
    try:
        return {
            name: torch.randn(shape, generator=random).to(request.device, request.dtype).requires_grad_(grad)
            for name, (shape, grad) in shapes.items()
        }
    except RuntimeError as error:
        raise click.UsageError(f"{_too_large(layout, request)} ({brief(error)})") from error


def _refuse_device(device: torch.device) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise click.BadParameter(f"{device}: {brief(error)}", param_hint="--device") from error


def _too_large(layout: MaskLayout, request: AttentionRequest) -> str:
    sizes = {
        "--batch": request.batch,
        "--heads": request.heads,
        "--head-dim": request.head_dim,
        "--v-head-dim": request.v_head_dim,
        "the number of queries": layout.q_len,
        "the number of keys": layout.kv_len,
    }
    largest = max(sizes, key=lambda name: sizes[name])
    too_large = f"{largest} is {sizes[largest]}; give a smaller one"
    return f"the tensors must fit into the memory of {request.device}, and {too_large}"


def _setting(layout: MaskLayout, request: AttentionRequest, rounds: int) -> dict[str, Any]:
    import torch

    asked = {name: str(value) if name in {"dtype", "device"} else value for name, value in vars(request).items()}
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "layout": layout.describe(),
        "request": asked,
    }


def _print(report: dict[str, Any], reasons: Mapping[str, tuple[Reason, ...]]) -> None:
    from polyattn_cli.table import draw

    where = f"{report['request']['device']}, {report['request']['dtype'].removeprefix('torch.')}"
    click.echo(f"{report['layout']}; {where}, torch {report['torch']}, {report['threads']} threads")
    rows = [
        (name, *(f"{run[key]:.3f}" for key in ("call_ms", "prepare_ms")), _ratio(run["ratio"]), run["runs"])
        for name, run in report["backends"].items()
        if "error" not in run
    ]
    if rows:
        title = f"medians of {report['rounds']} interleaved rounds; ratio to {report['relative_to']}"
        draw(("backend", "call (ms)", "prepare (ms)", "ratio", "what runs"), rows, title=title)
    for name, run in report["backends"].items():
        if "error" in run:
            click.echo(f"{name}: failed\n  - {run['error']}")
    for name, why in reasons.items():
        if why:
            click.echo("\n".join([f"{name}: cannot", *(f"  - {reason}" for reason in why)]))


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
