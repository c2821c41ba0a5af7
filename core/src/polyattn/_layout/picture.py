"""Layouts as text and as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn._errors import LayoutError, PolyattnError
from polyattn._layout.checks import check_int
from polyattn._layout.structured import StructuredMask
from polyattn.messages import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyattn._layout.base import LayoutBase


def describe(layout: LayoutBase) -> str:
    """One line: the rules, the sizes and what is inactive."""
    mask = layout.visibility
    if isinstance(mask, StructuredMask):
        words = _rules(mask)
    elif isinstance(mask, Tensor):
        words = ["dense mask"]
    else:
        words = [f"mask_mod {getattr(mask, '__name__', type(mask).__name__)}"]
    words.append(f"{layout.q_len} queries x {layout.kv_len} keys")
    if layout.batch != 1:
        words.append(f"batch {layout.batch}")
    if layout.heads != 1:
        words.append(f"{layout.heads} heads")
    if layout.active_queries is not None:
        words.append("some queries inactive")
    return ", ".join(words)


def _rules(mask: StructuredMask) -> list[str]:
    prefix = mask.prefix_lengths
    rules = {
        "causal": "causal",
        "prefix_lengths": "after a prefix" + (" of each segment" if prefix is not None and prefix.dim() == 2 else ""),
        "window": f"window {mask.window}",
        "chunk_size": f"chunks of {mask.chunk_size}",
        "q_segments": "packed documents",
        "kv_valid": "padded keys",
        "q_positions": "explicit positions",
    }
    given = mask.given() - {"kv_segments", "kv_positions"}  # which do not come alone
    words = [text for name, text in rules.items() if name in given]
    return [*(() if mask.causal else ("both directions",)), *words, *sorted(given - rules.keys())]


def cells(layout: LayoutBase, batch: int, head: int, size: int) -> Tensor:
    """The share of visible pairs in each cell of a picture of at most ``size`` by ``size``, FP32 on the CPU.

    Raises:
        LayoutError: there is no such batch row or head, a number is not an int, or the layout has no values.
    """
    check_int("size", size, 1)
    for name, index, count in (("batch", batch, layout.batch), ("head", head, layout.heads)):
        check_int(name, index, most=None)
        if index >= count:
            raise LayoutError(f"{name} must lie in 0 .. {count - 1}, got {shown(index)}")
    if layout.device is not None and layout.device.type == "meta":
        raise LayoutError("a layout must hold values to be drawn, got tensors on the device meta; draw it elsewhere")
    bounds = _bounds(layout.q_len, size)
    parts = [torch.zeros(0, len(_bounds(layout.kv_len, size)), device="cpu")]
    for start, stop in bounds:
        rows = layout.dense_rows(start, stop)
        row = rows[batch % rows.shape[0], head % rows.shape[1]].float().mean(0).cpu()
        parts.append(torch.tensor([[float(row[a:b].mean()) for a, b in _bounds(layout.kv_len, size)]], device="cpu"))
    return torch.cat(parts)


def _bounds(length: int, size: int) -> list[tuple[int, int]]:
    count = min(length, size)
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]


def draw(layout: LayoutBase, batch: int, head: int, size: int) -> str:
    """A picture in characters, one line for each row of cells: ``#`` seen, ``-`` not seen, ``+`` in part."""
    shares = cells(layout, batch, head, size).tolist()
    return "\n".join("".join("#" if share == 1 else "-" if share == 0 else "+" for share in row) for row in shares)


def plot(layout: LayoutBase, batch: int, head: int, size: int) -> Figure:
    """A picture as a matplotlib figure.

    Raises:
        PolyattnError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolyattnError("plot() needs matplotlib, got none; install it with pip install 'polyattn[viz]'") from error
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(title=layout.describe(), xlabel="key", ylabel="query")
    extent = (-0.5, max(layout.kv_len, 1) - 0.5, max(layout.q_len, 1) - 0.5, -0.5)
    axes.imshow(cells(layout, batch, head, size).numpy(), vmin=0, vmax=1, cmap="Blues", extent=extent)
    return figure
