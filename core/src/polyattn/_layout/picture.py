"""Layouts as text and as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn._errors import LayoutError, PolyattnError
from polyattn._layout.base import LayoutBase
from polyattn._layout.checks import check_int
from polyattn._layout.structure import Structure
from polyattn.messages import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Drawable(LayoutBase):
    """A layout that can be described and drawn."""

    def describe(self) -> str:
        """One line: the rules, the sizes and what is inactive."""
        mask = self.visibility
        if isinstance(mask, Structure):
            words = mask.rules()
        elif isinstance(mask, Tensor):
            words = ["dense mask"]
        else:
            words = [f"mask_mod {getattr(mask, '__name__', type(mask).__name__)}"]
        words.append(f"{self.q_len} queries x {self.kv_len} keys")
        if self.batch != 1:
            words.append(f"batch {self.batch}")
        if self.heads != 1:
            words.append(f"{self.heads} heads")
        if self.active_queries is not None:
            words.append("some queries inactive")
        return ", ".join(words)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe()}>"

    def draw(self, *, batch: int = 0, head: int = 0, size: int = 64) -> str:
        """A picture in characters, one line for each query: ``#`` seen, ``-`` not seen, ``+`` seen in part.

        Args:
            batch: which batch row.
            head: which head.
            size: the largest number of lines and columns; larger masks are drawn in cells of several.
        """
        shares = self._cells(batch, head, size).tolist()
        return "\n".join("".join("#" if share == 1 else "-" if share == 0 else "+" for share in row) for row in shares)

    def plot(self, *, batch: int = 0, head: int = 0, size: int = 512) -> Figure:
        """A picture as a matplotlib figure, queries down and keys across; needs ``polyattn[viz]``.

        Args:
            batch: which batch row.
            head: which head.
            size: the largest number of cells in each direction.

        Raises:
            PolyattnError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PolyattnError(
                "plot() needs matplotlib, got none; install it with pip install 'polyattn[viz]'"
            ) from error
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(title=self.describe(), xlabel="key", ylabel="query")
        extent = (-0.5, max(self.kv_len, 1) - 0.5, max(self.q_len, 1) - 0.5, -0.5)
        axes.imshow(self._cells(batch, head, size).numpy(), vmin=0, vmax=1, cmap="Blues", extent=extent)
        return figure

    def _cells(self, batch: int, head: int, size: int) -> Tensor:
        """The share of visible pairs in each cell of a picture of at most ``size`` by ``size``, FP32 on the CPU.

        Raises:
            LayoutError: there is no such batch row or head, a number is not an int, or the layout has no values.
        """
        check_int("size", size, 1)
        for name, index, count in (("batch", batch, self.batch), ("head", head, self.heads)):
            check_int(name, index, most=None)
            if index >= count:
                raise LayoutError(f"{name} must lie in 0 .. {count - 1}, got {shown(index)}")
        if self.device is not None and self.device.type == "meta":
            raise LayoutError(
                "a layout must hold values to be drawn, got tensors on the device meta; draw it elsewhere"
            )
        columns = _bounds(self.kv_len, size)
        parts = [torch.zeros(0, len(columns), device="cpu")]
        for start, stop in _bounds(self.q_len, size):
            rows = self.dense_rows(start, stop)
            row = rows[batch % rows.shape[0], head % rows.shape[1]].float().mean(0).cpu()
            parts.append(torch.tensor([[float(row[a:b].mean()) for a, b in columns]], device="cpu"))
        return torch.cat(parts)


def _bounds(length: int, size: int) -> list[tuple[int, int]]:
    count = min(length, size)
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]
