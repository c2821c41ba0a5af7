"""What a training run leaves beside its checkpoint, and how two runs are compared."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tiny_lm.checkpoint import write_atomically

LIMIT = 1e-3
FILE = "report.json"


@dataclass(frozen=True)
class Report:
    """The result of one run.

    Attributes:
        backend: name of the attention backend; several where groups of layers differ.
        distribution: the package that brought it, and its version.
        losses: mean loss in nats of every step.
        tokens_per_second: speed of this process, saving left out; ``None`` when it took no step.
        peak_memory: the most memory the process held, in bytes; ``None`` where the system does not say.
        processes: how many shared the tokens of a step.
    """

    backend: str
    distribution: str
    losses: list[float]
    tokens_per_second: float | None
    peak_memory: int | None
    processes: int = 1

    @property
    def label(self) -> str:
        """The backend, and the number of processes where there were several."""
        return self.backend if self.processes == 1 else f"{self.backend}, {self.processes} processes"

    def write(self, folder: Path) -> None:
        """Store the report in ``folder``."""
        write_atomically(folder / FILE, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> Report:
        """The report that a run left in ``folder``."""
        return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))


def is_of(folder: Path, losses: list[float]) -> bool:
    """Whether the folder has the report of a run with these losses; a run that was killed may have left none."""
    try:
        return Report.read(folder).losses == losses
    except (OSError, ValueError, TypeError):  # missing, or not a report
        return False


def largest_difference(reports: Sequence[Report]) -> float:
    """The largest difference between two loss curves at the same step; NaN when either curve holds one."""
    return max(_differences(reports), key=lambda difference: math.inf if math.isnan(difference) else difference)


def table(reports: Sequence[Report]) -> Table:
    """One line for each backend."""
    result = Table("backend", "distribution", "final loss", "tokens/s", "peak memory")
    for report in reports:
        result.add_row(
            report.label,
            report.distribution,
            f"{report.losses[-1]:.4f}",
            "unknown" if report.tokens_per_second is None else f"{report.tokens_per_second:,.0f}",
            "unknown" if report.peak_memory is None else f"{report.peak_memory / 2**20:,.0f} MiB",
        )
    return result


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw the loss curves, and their difference below, into a PNG file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (curves, difference) = plt.subplots(2, sharex=True, height_ratios=(3, 1), layout="constrained")
    for report, style in zip(reports, ("-", "--"), strict=True):
        curves.plot(report.losses, style, label=f"{report.label} ({report.distribution})")
    curves.set_ylabel("loss (nats per byte)")
    curves.legend()
    difference.plot(_differences(reports), color="black")
    difference.axhline(LIMIT, color="red", linestyle=":")
    difference.set_yscale("log")
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _differences(reports: Sequence[Report]) -> list[float]:
    first, second = (report.losses for report in reports)
    return [abs(a - b) for a, b in zip(first, second, strict=True)]
