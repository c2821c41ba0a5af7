"""Random mixtures: what no check about one thing alone would find."""

from __future__ import annotations

from random import Random

from polyattn import FEATURES
from polyattn_conformance.checks.registry import check
from polyattn_conformance.random_calls import Draw, Sizes
from polyattn_conformance.trial import Trial

#: Around the sizes of the tiles of kernels.
_EDGES = (63, 64, 65, 127, 128, 129, 200, 256, 257)
_MIXTURES = {
    "small": (150, Sizes()),
    "one_query": (60, Sizes(q=(1, 2), kv=(1, 33, *_EDGES, 512, 1023, 1024, 1100), groups=(1, 2, 4))),
    "many_queries": (30, Sizes(q=(*_EDGES, 1100), kv=(3, 7, 64), groups=(1, 2), batch=(1, 2))),
    "square": (40, Sizes(q=_EDGES, kv=(), groups=(1, 2), batch=(1, 2))),
    "many_heads": (60, Sizes((1, 5, 17), (4, 17), batch=(1, 4, 5, 9), kv_heads=(1, 3, 5, 9), groups=(1, 2, 8))),
    "wide": (50, Sizes((1, 6), (9,), widths=(10, 12, 20, 33, 36, 64, 72, 80, 100, 128, 192, 256))),
}


@check(_MIXTURES)
def mixture(trial: Trial, chosen: tuple[int, Sizes]) -> None:
    """Random mixtures of mask, sizes, features, dtypes, strides and leaves, always the same ones, are right."""
    count, sizes = chosen
    draw = Draw(Random(count), trial.abilities or FEATURES, sizes, trial.device)  # noqa: S311 - nothing to hide
    for _ in range(count):
        trial.compare_one(*draw.call())
