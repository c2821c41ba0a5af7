"""The user guide of the transformers bridge runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from polyattn_transformers._versions import NEWEST, OLDEST
from tiny_models import ids, model_of

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
def test_the_examples_run(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    names = {
        "folder": tmp_path,
        "input_ids": ids(rows=1, length=9),
        "positions": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]),
        "ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]]),
    }
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4
    assert names["model"].config._attn_implementation == "polyattn_flex_attention[compiled=False]"


def test_the_guide_states_the_range_that_is_checked_and_the_newest_is_pinned():
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    assert f"transformers {oldest} to {newest}" in GUIDE
    pinned = re.search(
        r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert pinned[1].startswith(f"{newest}.")
