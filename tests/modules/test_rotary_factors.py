"""A layer checks rotary tables once for each forward's scope, and rotates as the public function does."""

from __future__ import annotations

import pytest
import torch

from polyattn import AttentionInputError, AttentionScope, GroupedQueryAttention, MaskLayout, RopeSpec, RotaryTables
from polyattn.rope import RotaryEmbedding
from polyattn_modules import gqa

ROPE = RopeSpec(
    variant="default", theta=10000.0, head_dim=8, rotary_dim=8, interleaved=False, max_position=64,
    original_max_position=None, parameters={},
)  # fmt: skip
POSITIONS = torch.arange(6)[None]


def layer():
    torch.manual_seed(0)
    return GroupedQueryAttention(32, 4, 2, 8, rope=ROPE, backend="eager")


def forward(attention, scope):
    hidden = torch.linspace(-1, 1, 2 * 6 * 32).reshape(2, 6, 32)
    return attention(hidden, scope, POSITIONS)


def scope_of_six():
    return AttentionScope(MaskLayout.causal(6))


class Own(RotaryEmbedding):
    """The same tables by a class that the layer does not know."""


class TooShort(RotaryEmbedding):
    def forward(self, positions, **rest):
        tables = super().forward(positions, **rest)
        return RotaryTables(tables.cos[:, :3], tables.sin[:, :3])


@pytest.fixture
def checked(monkeypatch):
    """The calls of the public function that checks its tables."""
    calls, apply = [], gqa.apply_rotary
    monkeypatch.setattr(gqa, "apply_rotary", lambda *args, **rest: calls.append(args) or apply(*args, **rest))
    return calls


def test_built_in_tables_are_rotated_by_without_another_check_and_give_the_same_bits(checked):
    attention, scope = layer(), scope_of_six()
    first, again = forward(attention, scope), forward(attention, scope)
    assert checked == []
    attention.rotary.__class__ = Own
    own = forward(attention, scope_of_six())
    assert len(checked) == 1
    assert torch.equal(first, own)
    assert torch.equal(again, own)


def test_tables_of_another_class_that_do_not_fit_are_refused_in_every_forward(checked):
    attention, scope = layer(), scope_of_six()
    attention.rotary.__class__ = TooShort
    for _ in range(2):
        with pytest.raises(AttentionInputError, match=r"tables \[B\|1, S, rotary_dim/2\]"):
            forward(attention, scope)
    assert len(checked) == 2
