"""Write docs/masks.md: the masks of other libraries, said as layouts.

    python tools/masks.py

The rows are the cases that tests/core/test_mask_kinds.py compares with a plain rule for each pair.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "masks.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from mask_kinds import OTHERS, PEERS, Kind, runs  # noqa: E402 (the path comes first)


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION.format(runs=inspect.getsource(runs).strip())]
    for peer, kinds in PEERS.items():
        rows = "\n".join(f"| `{kind.name}` | `{_cell(kind.said)}` | {_blocks(kind)} |" for kind in kinds)
        others = "\n".join(f"* {names}: {reason}." for names, reason in OTHERS[peer].items())
        parts.append(
            f"## {peer}\n\n{_NAMES[peer]}\n\n| mask | as a layout | blocks |\n|---|---|---|\n{rows}\n\n{others}\n"
        )
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _blocks(kind: Kind) -> str:
    return {None: "none", 1: "one run"}.get(kind.blocks, "several runs")


_INTRODUCTION = """\
# Masks of other libraries as layouts

Written by `python tools/masks.py`; do not edit. The tests make each layout of this page by the expression that stands
here, and compare it with a plain rule for each pair of a query and a key. [Mask layouts](layouts.md) explains the
parts.

"one run" and "several runs" mean that the layout has [blocks](layouts.md#questions), and that a query of the tests'
examples sees one unbroken run of keys, or several. "none" means that backends go through a dense mask or a function.
`runs` lists the indices of some runs of tokens:

```python
{runs}
```
"""
_NAMES = {
    "xformers": """\
The queries of all documents stand one after the other; `q_lengths` and `kv_lengths` are the numbers of queries and
keys of each document. Where a mask aligns queries and keys at the first of them, `spans` is the larger of the two
numbers, and `starts` are the offsets of the spans. Where it aligns them at the last, `q_places` lists for each
query the key at its place. `used` is `Bool[1, K]`, True for keys in use. With padded keys `room` is the space of
each document; with gaps `spans` are the spaces, of which one may come before the first document. `slots` is the
token in each slot of the pages.""",
    "attention-gym": """\
The names are those of the peer's arguments, where it has such. `parents` names the node above each node of [a
tree](layouts.md#trees-and-shared-prefixes). `document` and `place` say where each token is, `[1, length]`, and
`prefix_lengths` how long the prefix of each document is, `[1, documents]`. Block diffusion has the clean blocks and
then the noised ones as nodes, and `noised_first` lists the noised tokens and then the clean ones. `first` and `end`
are those of the text that sees an image, `[1, images]`. `kv_axes` are the row and the column (and the frame) of
each token, `[1, length]` each, and `q_axes` the same, moved inwards so that a window around them stays on the
canvas; of tiles they are those of the token's tile. In a tiled or Morton order only these numbers change.""",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
