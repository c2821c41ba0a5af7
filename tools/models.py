"""Write docs/models.md from a run of every causal language model class of the installed transformers.

    python tools/models.py

Each cell is what came of a tiny model on ``polyattn_auto`` beside transformers' own eager attention; the tests run the
same models and compare with the page. Nothing here says what a class can do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import polyattn_transformers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from causal_lms import BOUND, CLASSES, DESCRIPTIONS, Outcome, Unbuildable, sweep  # noqa: E402 (the path comes first)

Row = tuple[str, str, str]


def row(name: str, outcomes: dict[str, Outcome] | Unbuildable, note: Callable[[str], str]) -> Row:
    """The cells of a class: a padded batch, packed documents, tokens from a cache.

    Args:
        name: of the class.
        outcomes: of its sweep, or why there are none.
        note: what stands for a reason in a cell.
    """
    if isinstance(outcomes, Unbuildable):
        return (f"not tried {note(str(outcomes))}", "", "")
    configured = outcomes["configured"]
    if configured.verdict != "equal":
        return (f"{configured.verdict} when configured {note(_reason(name, configured))}", "", "")
    told = {title: _cell(name, outcomes[title], note) for title in DESCRIPTIONS}
    cells = {cell: ", ".join(title for title, other in told.items() if other == cell) for cell in told.values()}
    packed = next(iter(cells)) if len(cells) == 1 else "; ".join(f"{titles}: {cell}" for cell, titles in cells.items())
    return (_cell(name, outcomes["padded"], note), packed, _cell(name, outcomes["cache"], note))


def _cell(name: str, outcome: Outcome, note: Callable[[str], str]) -> str:
    return f"{outcome.verdict} {note(_reason(name, outcome))}" if outcome.text else outcome.verdict


def _reason(name: str, outcome: Outcome) -> str:
    return re.sub(rf"\b{name}\b|^\w+(?= cannot keep)", "the class", outcome.text)


def recorded(page: str) -> tuple[str, dict[str, Row]]:
    """The version of transformers that a page is of, and its rows, with reasons in the place of their numbers."""
    notes = dict(re.findall(r"^- \[(\d+)\] (.*)$", page, re.MULTILINE))
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|(.*)\|.*\|$", page, re.MULTILINE)
    rows = {
        name: tuple(re.sub(r"\[(\d+)\]", lambda found: notes[found[1]], cell).strip() for cell in cells)
        for name, *cells in lines
    }
    version = re.search(r"transformers (\S+);", page)
    return version[1] if version else "", rows  # type: ignore[return-value]  # three cells a line


def page() -> str:
    """The whole page."""
    notes: dict[str, int] = {}
    lines, counts = [], {"run": 0, "refused": 0, "not tried": 0}
    for name in CLASSES:
        outcomes: dict[str, Outcome] | Unbuildable
        try:
            outcomes = sweep(name)
        except Unbuildable as reason:
            outcomes = reason
        cells = row(name, outcomes, lambda text: f"[{notes.setdefault(text, len(notes) + 1)}]")
        ran = isinstance(outcomes, dict) and len(outcomes) > 1
        counts["run" if ran else "refused" if isinstance(outcomes, dict) else "not tried"] += 1
        error = f"{max(one.error for one in outcomes.values() if not one.failed):.0e}" if ran else ""
        lines.append(f"| `{name}` | " + " | ".join([*cells, error]) + " |")
    table = "\n".join(lines)
    listed = "\n".join(f"- [{number}] {text}" for text, number in notes.items())
    return f"""# Which models of transformers run

Written by `python tools/models.py` with transformers {transformers.__version__}; do not edit. Every class behind
`AutoModelForCausalLM` is made with a tiny configuration and large random weights, and asked on `polyattn_auto` what
transformers' own eager attention is asked:

* **padded batch**: the logits of its tokens, with padding on the left and on the right;
* **packed documents**: the logits of each document are those that it gets alone, whether `packed(...)`, restarting
  positions (with a mask of ones or without), `segment_ids` or `cu_seq_lens_*` beside them say where it lies;
* **from a cache**: the logits of a prompt and of single tokens after it are those of one forward.

"equal" means that no logit differs by more than {BOUND:.0e} of the largest one, in single precision; the last column is
the largest difference that was seen. "refused" means an error of polyattn before any number is made; classes that can
never run are refused when they are configured. Of {len(CLASSES)} classes {counts["run"]} run,
{counts["refused"]} are refused when they are configured, and {counts["not tried"]} could not be tried. The
[guide](transformers.md) says how to use them.

| class | padded batch | packed documents | from a cache | largest difference |
|---|---|---|---|---|
{table}

{listed}
"""


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    polyattn_transformers.register()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
