"""The README is read first, so what it shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import polyattn

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_usage_example_gives_the_shapes_it_states():
    names = {}
    exec(BLOCKS[0], names)
    assert names["result"].output.shape == (1, 8, 128, 64)
    assert names["result"].lse.shape == (1, 8, 128)
    assert names["result"].lse.dtype is torch.float32


def test_the_skeleton_of_a_backend_computes_and_refuses_the_rest():
    def my_kernel(q, k, v, *, scale):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    names = {"my_kernel": my_kernel}
    exec(BLOCKS[1], names)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    with polyattn.backends.override("mykernel", names["MyBackend"]()):
        mine = polyattn.attention(q, k, v, polyattn.MaskLayout.causal(5), backend="mykernel")
        torch.testing.assert_close(mine.output, my_kernel(q, k, v, scale=0.5))
        with pytest.raises(polyattn.UnsupportedAttentionError, match="window") as refusal:
            polyattn.attention(q, k, v, polyattn.MaskLayout.causal(5, window=2), backend="mykernel")
    assert [reason.feature for reason in refusal.value.reasons] == ["window"]
