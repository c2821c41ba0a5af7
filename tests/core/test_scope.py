"""One forward builds each distinct mask and table once."""

import pytest
import torch

import polyattn
from polyattn import (
    AttentionInputError,
    AttentionRequest,
    AttentionScope,
    LayoutError,
    MaskLayout,
    RopeSpec,
    RotaryEmbedding,
)


def request_of(**fields):
    q = torch.zeros(1, 2, 4, 8)
    return AttentionRequest.of(q, q, q, **fields)


def spec_of(theta=10000.0):
    return RopeSpec(
        variant="default",
        theta=theta,
        head_dim=8,
        rotary_dim=8,
        interleaved=False,
        max_position=64,
        original_max_position=64,
        parameters={},
    )


def test_equal_layers_share_and_distinct_ones_do_not():
    scope = AttentionScope(MaskLayout.causal(4))
    first = scope.prepare("sdpa", request_of())
    assert scope.prepare(polyattn.backends.get("sdpa"), request_of()) is first
    assert scope.builds == {"attention": 1, "rotary": 0}
    assert scope.prepare("sdpa", request_of(), window=2) is not first
    assert scope.prepare("eager", request_of()) is not first
    assert scope.prepare("sdpa", request_of(softcap=None, needs_lse=True)) is not first
    assert scope.builds["attention"] == 4


def test_another_layout_is_found_by_identity():
    scope = AttentionScope(MaskLayout.causal(4))
    other = MaskLayout.full(4)
    first = scope.prepare("sdpa", request_of(), layout=other)
    assert scope.prepare("sdpa", request_of(), layout=other) is first
    assert scope.prepare("sdpa", request_of(), layout=MaskLayout.full(4)) is not first
    assert scope.prepare("sdpa", request_of(), layout=scope.layout).layout is scope.layout


def test_a_window_narrows_the_layouts_own():
    scope = AttentionScope(MaskLayout.causal(4, window=2))
    assert scope.prepare("sdpa", request_of(), window=3).layout.visibility.window == 2
    assert scope.prepare("sdpa", request_of(), window=1).layout.visibility.window == 1


def test_a_window_of_two_sides_is_taken_and_found_again_in_every_form():
    scope = AttentionScope(MaskLayout.full(4))
    first = scope.prepare("sdpa", request_of(), window=(2, 0))
    assert first.layout.visibility.window == (2, 0)
    assert scope.prepare("sdpa", request_of(), window=[2, 0]) is first
    assert scope.prepare("sdpa", request_of(), window=(2, 2)) is scope.prepare("sdpa", request_of(), window=3)
    assert scope.prepare("sdpa", request_of(), window=(-1, None)).layout is scope.layout


@pytest.mark.parametrize("window", [(1, 2, 3), (-2, 0), (1, 0.5), 0, "wide"])
def test_a_wrong_window_is_an_error_that_names_it(window):
    with pytest.raises(LayoutError, match=r"window .*must be an int.*, got "):
        AttentionScope(MaskLayout.full(4)).prepare("sdpa", request_of(), window=window)


def test_state_prepared_for_gradients_serves_the_pass_without():
    scope = AttentionScope(MaskLayout.causal(4))
    trained = scope.prepare("sdpa", request_of(needs_grad=True))
    assert scope.prepare("sdpa", request_of(needs_grad=False)) is trained


def test_tables_are_shared_by_spec_and_by_position_tensor():
    scope = AttentionScope(MaskLayout.causal(4))
    positions = torch.arange(4)[None]
    first = scope.rotary(RotaryEmbedding(spec_of()), positions)
    assert scope.rotary(RotaryEmbedding(spec_of()), positions) is first
    assert scope.rotary(RotaryEmbedding(spec_of(500.0)), positions) is not first
    assert scope.rotary(RotaryEmbedding(spec_of()), positions.clone()) is not first
    assert scope.builds["rotary"] == 3


def test_what_layers_keep_is_found_by_value_and_by_the_very_tensors():
    scope, one, other = AttentionScope(MaskLayout.causal(4)), torch.arange(4), torch.arange(4)
    scope.keep("mine", (1, "x"), "first", one, None)
    assert scope.find("mine", (1, "x"), one, None) == "first"
    assert scope.find("mine", (1, "x"), one.detach(), None) == "first"
    assert scope.find("mine", (1, "x"), other, None) is None
    assert scope.find("mine", (1, "x"), one, other) is None
    assert scope.find("mine", (2, "x"), one, None) is None
    assert scope.find("yours", (1, "x"), one, None) is None
    assert scope.find("mine", (1, "x"), one) is None
    assert scope.find("mine", (1, "x"), one, None, None) is None
    scope.keep("mine", (2, "x"), "second", one, None)
    assert scope.kept("mine") == ["first", "second"]
    assert scope.builds == {"attention": 0, "rotary": 0}


def test_a_subclass_of_the_rotary_module_shares_with_itself_only():
    class Mine(RotaryEmbedding):
        pass

    scope = AttentionScope(MaskLayout.causal(4))
    positions = torch.arange(4)[None]
    mine = Mine(spec_of())
    assert scope.rotary(mine, positions) is scope.rotary(mine, positions)
    assert scope.rotary(Mine(spec_of()), positions) is not scope.rotary(mine, positions)
    assert scope.builds["rotary"] == 2


LONGROPE = RopeSpec(
    variant="longrope",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=16,
    parameters={"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "switch": "length"},
)


def test_the_length_of_the_sequence_is_said_once_to_the_scope():
    embedding, positions = RotaryEmbedding(LONGROPE), torch.arange(4)[None]
    long = AttentionScope(MaskLayout.causal(4), length=32).rotary(embedding, positions)
    assert torch.equal(long.cos, embedding(positions, length=32).cos)
    scope = AttentionScope(MaskLayout.causal(4), length=32)
    short = scope.rotary(embedding, positions, length=8)
    assert torch.equal(short.cos, embedding(positions, length=8).cos)
    assert scope.rotary(embedding, positions) is not short
    plain = RotaryEmbedding(spec_of())
    assert torch.equal(scope.rotary(plain, positions).cos, plain(positions).cos)


def test_a_length_that_nobody_said_is_asked_for():
    with pytest.raises(AttentionInputError, match="length must be"):
        AttentionScope(MaskLayout.causal(4)).rotary(RotaryEmbedding(LONGROPE), torch.arange(4)[None])


def test_two_position_tensors_are_two_tables_and_a_detached_alias_is_the_same():
    scope = AttentionScope(MaskLayout.causal(4))
    positions = torch.arange(4)[None]
    embedding = RotaryEmbedding(spec_of())
    first = scope.rotary(embedding, positions)
    assert scope.rotary(embedding, positions.detach()) is first  # what reentrant checkpointing hands on
    assert scope.rotary(embedding, positions.clone()) is not first
    assert scope.rotary(embedding, torch.arange(8)[None, 4:]) is not first
    assert scope.builds["rotary"] == 3
