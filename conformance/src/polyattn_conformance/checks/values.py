"""Numbers: outputs and gradients of every layout, dtype, size and stride against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn import MaskLayout, StructuredMask
from polyattn_conformance.case import INFER_LSE, TRAIN, TRAIN_LSE
from polyattn_conformance.checks.registry import check
from polyattn_conformance.layouts import LAYOUTS, LONG, WITH_DEAD
from polyattn_conformance.trial import DTYPES_BY_NAME, Trial
from polyattn_conformance.variants import ARRANGEMENTS, rearranged


@check(LAYOUTS)
def values(trial: Trial, build: Callable[[], MaskLayout]) -> None:
    """Output, LSE and every gradient equal the FP64 reference, with and without grouped heads."""
    layout = build()
    trial.compare(trial.case(layout, heads=4, kv_heads=4), trial.case(layout, heads=4, kv_heads=2, seed=1))


@check(LONG)
def long_values(trial: Trial, build: Callable[[], MaskLayout]) -> None:
    """The same over lengths that a kernel cuts into blocks."""
    trial.compare(trial.case(build(), batch=1, head_dim=16), modes=(TRAIN, TRAIN_LSE))


@check(DTYPES_BY_NAME)
def dtype(trial: Trial, dtype: torch.dtype) -> None:
    """Every dtype is right within its own rounding; the output keeps it, the LSE is FP32 (FP64 for FP64)."""
    names = ("full", "causal_window", "packed", "dense", "right_padding")
    trial.compare(*(trial.case(LAYOUTS[name](), dtype=dtype, heads=4, kv_heads=2) for name in names))


class Window(NamedTuple):
    """Parameters of :func:`window`."""

    causal: bool
    q_len: int


_LENGTH = 9


@check(
    {
        f"{'causal' if causal else 'both_ways'}-{q_len}_queries": Window(causal, q_len)
        for causal in (True, False)
        for q_len in (1, _LENGTH - 1, _LENGTH)
    }
)
def window(trial: Trial, parameters: Window) -> None:
    """A window of W keys: causal sees 0 <= q - k < W, both ways abs(q - k) < W; a huge one sees everything."""
    for width in (1, 2, 3, _LENGTH - 1, _LENGTH, _LENGTH + 1, 2**31 - 2, 2**31 - 1, 2**31, 2**40):
        mask = StructuredMask(causal=parameters.causal, window=width)
        layout = MaskLayout(q_len=parameters.q_len, kv_len=_LENGTH, batch=1, heads=1, visibility=mask)
        trial.compare(trial.case(layout, batch=1), modes=(INFER_LSE, TRAIN))


@check({"causal": True, "both_ways": False})
def two_sided_window(trial: Trial, causal: bool) -> None:
    """A window (left, right) sees so many keys before and after the query's own; None and -1 mean without a bound."""
    for window in ((0, 0), (0, 2), (2, 0), (3, 1), (None, 1), (1, None), (-1, 0), (2**31, 1), (_LENGTH, 2**40)):
        for q_len in (_LENGTH - 3, _LENGTH):
            mask = StructuredMask(causal=causal, window=window)
            trial.compare(trial.case(MaskLayout(q_len, _LENGTH, visibility=mask), batch=1), modes=(INFER_LSE, TRAIN))


@check({"window_int32": torch.int32, "window_int64": torch.int64})
def positions_limit(trial: Trial, dtype: torch.dtype) -> None:
    """Windows around the limit of the dtype of explicit positions overflow nowhere."""
    limit = torch.iinfo(dtype).max
    at = torch.tensor([[0, 1, 5, limit - 1]], dtype=dtype)
    for width in (2, limit - 1, limit, min(limit + 1, 2**63 - 1), 2**40):
        mask = StructuredMask(causal=True, window=width, q_positions=at, kv_positions=at)
        layout = MaskLayout(q_len=4, kv_len=4, batch=1, heads=1, visibility=mask)
        trial.compare(trial.case(layout, batch=1), modes=(INFER_LSE, TRAIN))


@check((1, 2, 3, 5, 6))
def gqa(trial: Trial, group: int) -> None:
    """Query head h reads KV head h // group, for every group size."""
    heads = 2 * group
    layout = MaskLayout.causal(6)
    trial.compare(trial.case(layout, heads=heads, kv_heads=2), trial.case(layout, heads=group, kv_heads=1, seed=1))
    case = trial.case(layout, heads=heads, kv_heads=2)
    owner = torch.arange(2.0, device=trial.device, dtype=trial.dtype).view(1, 2, 1, 1)
    trial.compare(case.change(v=owner.expand_as(case.v)))


@check(
    {
        "narrow_values": (16, 8),
        "wide_values": (8, 24),
        "odd": (7, 5),
        "one": (1, 1),
        "wide": (96, 96),
        "not_of_eight": (20, 20),
        "widest": (256, 256),
    }
)
def width(trial: Trial, widths: tuple[int, int]) -> None:
    """The width of values may differ from that of queries and keys, and the scale follows the latter."""
    for name in ("causal", "packed", "dense", "right_padding"):
        trial.compare(trial.case(LAYOUTS[name](), heads=4, kv_heads=2, head_dim=widths[0], v_head_dim=widths[1]))


@check({"no_queries": (2, 0, 5), "no_keys": (2, 4, 0), "neither": (2, 0, 0), "no_batch": (0, 3, 4)})
def empty(trial: Trial, sizes: tuple[int, int, int]) -> None:
    """Empty batches, queries and keys give empty or zero results, LSE -inf, and zero gradients."""
    batch, q_len, kv_len = sizes
    layouts = [MaskLayout.full(q_len, kv_len), MaskLayout.causal(q_len, kv_len)]
    layouts += [MaskLayout.dense(torch.ones(q_len, kv_len, dtype=torch.bool))]
    trial.compare(*(trial.case(layout, batch=batch, heads=4, kv_heads=2) for layout in layouts))


@check()
def one_key(trial: Trial) -> None:
    """A row that sees one key gives its value, in memory of its own."""
    for layout in (MaskLayout.full(1), MaskLayout.causal(1), MaskLayout.packed([1, 1])):
        trial.compare(trial.case(layout), trial.case(layout, heads=4, kv_heads=2))


@check()
def empty_document(trial: Trial) -> None:
    """A batch row without any valid key is fully masked, the rows beside it are not."""
    trial.compare(trial.case(WITH_DEAD["padding_both_ways"]()), trial.case(WITH_DEAD["element"]()))


@check(ARRANGEMENTS)
def strides(trial: Trial, arrange: Callable[[Tensor], Tensor]) -> None:
    """Inputs and incoming gradients may have any strides."""
    for name in ("full", "causal", "packed", "dense", "right_padding"):
        layout = LAYOUTS[name]()
        plain = trial.case(layout, heads=4, kv_heads=2)
        featured = trial.case(layout, heads=4, kv_heads=2, bias=(2, 4, layout.q_len, layout.kv_len), sinks=True)
        trial.compare(*(rearranged(case, lambda: arrange) for case in (plain, featured)))


@check()
def summed_output(trial: Trial) -> None:
    """The incoming gradient of ``output.sum()`` has strides of zero."""
    for name in ("full", "causal", "packed", "dense"):
        case = trial.case(LAYOUTS[name]())
        ones = case.grad_output.new_ones(())
        trial.compare(case.change(grad_output=ones.expand_as(case.grad_output)), modes=(TRAIN, TRAIN_LSE))


@check(("q", "k", "v"))
def one_leaf(trial: Trial, leaf: str) -> None:
    """A single one of q, k and v may ask for its gradient."""
    for name in ("full", "causal_window", "packed", "dense", "right_padding"):
        case = trial.case(LAYOUTS[name](), heads=4, kv_heads=2).change(leaves=(leaf,))
        trial.compare(case, modes=(TRAIN,) if leaf == "v" else (TRAIN, TRAIN_LSE))


@check({"one": 1.0, "small": 0.01, "negative": -0.5, "zero": 0.0})
def scale(trial: Trial, factor: float) -> None:
    """The scale of the request is used, whatever it is."""
    trial.compare(*(trial.case(LAYOUTS[name](), scale=factor) for name in ("full", "causal", "packed", "dense")))


@check(DTYPES_BY_NAME)
def large_scores(trial: Trial, dtype: torch.dtype) -> None:
    """Scores in the hundreds keep their order, as do products that overflow before the scale."""
    for name in ("causal", "packed", "dense"):
        case = trial.case(LAYOUTS[name](), dtype=dtype)
        negative = trial.case(LAYOUTS[name](), dtype=dtype, scale=-0.35)
        trial.compare(*(each.change(q=each.q * 40, k=each.k * 4) for each in (case, negative)))
        # Of a scale that is a power of two, so that no order of the sum rounds.
        wide = trial.case(LAYOUTS[name](), dtype=dtype, head_dim=256, v_head_dim=8)
        trial.compare(wide.change(q=torch.full_like(wide.q, 25), k=torch.full_like(wide.k, 25)))


@check(DTYPES_BY_NAME)
def magnitudes(trial: Trial, dtype: torch.dtype) -> None:
    """Large and small values and incoming gradients keep their size."""
    for factor in (2.0**12, 2.0**-12):
        for layout in (MaskLayout.full(3, 40), MaskLayout.causal(8)):
            case = trial.case(layout, dtype=dtype)
            trial.compare(case.change(v=case.v * factor), case.change(grad_output=case.grad_output / factor))


@check({"bfloat16": torch.bfloat16, "float16": torch.float16})
def accumulation(trial: Trial, dtype: torch.dtype) -> None:
    """Long sums are not accumulated in the low dtype: over keys, over queries, over a group of 512 heads.

    All terms have one sign, so that a low-precision sum stops growing long before its end.
    """
    many_keys = trial.case(MaskLayout.full(2, 2048), dtype=dtype, batch=1, heads=1)
    many_queries = trial.case(MaskLayout.full(2048, 2), dtype=dtype, batch=1, heads=1)
    group = trial.case(MaskLayout.causal(4), dtype=dtype, batch=1, heads=512, kv_heads=1)
    for case in (many_keys, many_queries, group):
        one_sign = {"v": 1 + case.v / 8, "grad_output": 1 + case.grad_output / 8}
        trial.compare(case.change(q=case.q / 8, **one_sign), modes=(INFER_LSE, TRAIN))
