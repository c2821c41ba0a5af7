"""RotaryEmbedding through the life of a module: casts, moves, copies, modes, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from polyattn import AttentionInputError, RopeConfigError, RopeSpec, RotaryEmbedding, apply_rotary, rope_variants
from polyattn_conformance.checks.host_reads import forbid_host_reads

PLAIN = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=4096,
    original_max_position=None,
    parameters={},
)
THREE_AXES = dataclasses.replace(PLAIN, axes={"sections": [2, 1, 1], "layout": "interleaved"})


@pytest.fixture
def embedding():
    return RotaryEmbedding(PLAIN)


def angles_of(spec, *position):
    """Positions of one token on each axis, as multiples of each lane's frequency."""
    angles, _ = RotaryEmbedding(spec).angles(torch.tensor(position).view(-1, 1, 1))
    plain, _ = RotaryEmbedding(PLAIN).angles(torch.tensor([[1]]))
    return (angles / plain).flatten().round().tolist()


def test_position_zero_is_the_identity(embedding):
    tables = embedding(torch.tensor([[0]]))
    assert torch.equal(tables.cos, torch.ones(1, 1, 4))
    assert torch.equal(tables.sin, torch.zeros(1, 1, 4))


@pytest.mark.parametrize(("layout", "lanes"), [("contiguous", [5, 5, 7, 9]), ("interleaved", [5, 7, 9, 5])])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_order_of_axes_and_the_pairing_of_channels_are_two_switches(layout, lanes, interleaved):
    spec = dataclasses.replace(THREE_AXES, axes={"sections": [2, 1, 1], "layout": layout}, interleaved=interleaved)
    assert angles_of(spec, 5, 7, 9) == lanes


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "glm", "ernie"])
def test_equal_positions_on_all_axes_are_plain_rope(layout, embedding):
    rope = RotaryEmbedding(dataclasses.replace(PLAIN, axes={"sections": [2, 1, 1], "layout": layout}))
    positions = torch.tensor([[0, 3, 1000], [1, 2, 65535]])
    want = embedding(positions)
    for given in (positions, positions.expand(3, 2, 3)):
        assert torch.equal(rope(given).cos, want.cos)
        assert torch.equal(rope(given).sin, want.sin)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_any_integer_positions_do(embedding, dtype):
    positions = torch.tensor([[0, 1, 100]])
    assert torch.equal(embedding(positions.to(dtype)).cos, embedding(positions).cos)


def test_positions_may_be_negative(embedding):
    assert torch.equal(embedding(torch.tensor([[-7]])).sin, -embedding(torch.tensor([[7]])).sin)


@pytest.mark.parametrize("positions", [range(65536, 65546), range(250, 261)])
def test_neighbouring_positions_stay_apart_under_autocast(embedding, positions):
    positions = torch.tensor([list(positions)])
    plain = embedding(positions)
    with torch.autocast("cpu", torch.bfloat16):
        cast = embedding(positions)
    assert cast.cos.dtype is torch.float32
    assert torch.equal(cast.cos, plain.cos)
    assert len(torch.cat((cast.cos, cast.sin), -1)[0].unique(dim=0)) == positions.numel()


def test_no_value_is_read_on_the_host(embedding):
    x, positions = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    with forbid_host_reads("the rotation"):
        apply_rotary(x, x, embedding(positions), interleaved=False)
        RotaryEmbedding(LONG)(positions, length=17)


@pytest.mark.parametrize("harm", ["bfloat16", "half", "float", "double"])
def test_a_cast_of_the_model_leaves_the_tables_alone(embedding, harm):
    want = embedding(torch.tensor([[4095]])).cos
    model = getattr(torch.nn.Sequential(embedding, torch.nn.Linear(2, 2)), harm)()
    assert torch.equal(model[0](torch.tensor([[4095]])).cos, want)


def test_every_move_and_cast_empties_the_cache(embedding):
    for harm in (
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to("cpu"),
        lambda module: module.to("meta"),
        lambda module: module.to_empty(device="cpu"),
        lambda module: module.half(),
        lambda module: module.share_memory(),
    ):
        embedding(torch.tensor([[1]]))
        assert embedding._copies
        harm(embedding)
        assert not embedding._copies


def test_a_second_device_does_not_evict_the_first(embedding):
    embedding(torch.tensor([[1]]))
    (first,) = embedding._copies.values()
    embedding(torch.tensor([[1]], device="meta"))
    embedding(torch.tensor([[1]]))
    assert {device.type for _, device in embedding._copies} == {"cpu", "meta"}
    assert embedding._copies[0, torch.device("cpu")] is first


def test_nothing_is_left_on_another_device_after_a_move(embedding):
    embedding(torch.tensor([[1]], device="meta"))
    embedding.to("cpu")
    assert not [value for value in vars(embedding).values() if isinstance(value, torch.Tensor)]
    assert not embedding._copies


def test_the_variant_is_asked_once_for_each_interval_of_lengths():
    calls = []

    class Counting:
        name, api_version = "counting", 1
        validate = staticmethod(lambda spec: None)
        breakpoints = staticmethod(lambda spec: (8, 16))

        def frequencies(self, spec, *, device, length=None):
            calls.append((device.type, length))
            return rope_variants.get("default").frequencies(spec, device=device)

    with rope_variants.override("counting", Counting()):
        rope = RotaryEmbedding(dataclasses.replace(PLAIN, variant="counting"))
    for length in (1, 8, 9, 16, 17, 5000):
        rope(torch.tensor([[0]]), length=length)
        rope.to(torch.bfloat16)(torch.tensor([[0]], device="meta"), length=length)
    assert calls == [("cpu", 8), ("cpu", 16), ("cpu", 17)]


def test_meta_construction_and_to_empty_give_the_whole_table():
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"rope": RotaryEmbedding(PLAIN), "linear": torch.nn.Linear(2, 2)})
    model.to_empty(device="cpu")
    model.load_state_dict({"linear.weight": torch.zeros(2, 2), "linear.bias": torch.zeros(2)}, strict=True)
    positions = torch.arange(64)[None]
    assert torch.equal(model["rope"](positions).cos, RotaryEmbedding(PLAIN)(positions).cos)


def test_it_runs_on_meta_inside_and_outside_autocast(embedding):
    positions = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            tables = embedding(positions)
        assert (tables.cos.device.type, tables.cos.dtype, tables.cos.shape) == ("meta", torch.float32, (2, 5, 4))


def test_old_checkpoints_with_inv_freq_load_strictly(embedding):
    model = torch.nn.ModuleDict({"rotary_emb": embedding})
    model.load_state_dict({"rotary_emb.inv_freq": torch.zeros(4)}, strict=True)
    assert embedding(torch.tensor([[1]])).cos[0, 0, 0] == torch.tensor(1.0).cos()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rotary_emb.cos_cached"):
        model.load_state_dict({"rotary_emb.cos_cached": torch.zeros(4)}, strict=True)


def test_copies_and_pickles_carry_no_device_tensor(embedding):
    embedding(torch.tensor([[1]]))
    for twin in (copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
        assert not twin._copies
        assert twin.spec == embedding.spec
        assert torch.equal(twin(torch.tensor([[9]])).cos, embedding(torch.tensor([[9]])).cos)


def test_a_forward_in_inference_mode_does_not_spoil_training(embedding):
    with torch.inference_mode():
        embedding(torch.tensor([[1]]))
    x = torch.ones(1, 1, 4, requires_grad=True)
    (x * embedding(torch.tensor([[1]])).cos).sum().backward()
    assert torch.equal(x.grad, embedding(torch.tensor([[1]])).cos)


def test_the_cache_never_holds_a_fake_or_wrapped_tensor(embedding):
    with FakeTensorMode():
        assert isinstance(embedding(torch.tensor([[1]])).cos, FakeTensor)
    assert not embedding._copies
    torch.func.grad(lambda x: (x * embedding(torch.tensor([[1]])).cos).sum())(torch.ones(1, 1, 4))
    torch.func.vmap(lambda positions: embedding(positions).cos)(torch.ones(2, 1, 1, dtype=torch.int64))
    for found in embedding._copies.values():
        assert type(found) is torch.Tensor
        assert not torch._C._functorch.is_functorch_wrapped_tensor(found)


def test_it_can_be_built_in_a_fake_mode():
    with FakeTensorMode():
        built = RotaryEmbedding(PLAIN)
    assert torch.equal(built(torch.tensor([[5]])).cos, RotaryEmbedding(PLAIN)(torch.tensor([[5]])).cos)


def test_selective_checkpointing_does_not_fill_the_cache(embedding):
    """It counts operations: a copy found ready by the recomputation would be one less."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def layer(x):
        return (x * embedding(torch.tensor([[3]])).cos).sin()

    def save_everything(*_, **__):
        return CheckpointPolicy.MUST_SAVE

    x = torch.ones(1, 1, 4, requires_grad=True)
    contexts = lambda: create_selective_checkpoint_contexts(save_everything)  # noqa: E731
    checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert not embedding._copies
    again = x.detach().clone().requires_grad_()
    layer(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(embedding, reentrant):
    from torch.utils.checkpoint import checkpoint

    def layer(x):
        return (x * embedding(torch.tensor([[3]])).cos).sin()

    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        x = torch.ones(1, 1, 4, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_only_the_built_in_class_shares_by_its_spec(embedding):
    class Own(RotaryEmbedding):
        pass

    assert embedding.sharing_key() == RotaryEmbedding(PLAIN).sharing_key() == PLAIN
    own = Own(PLAIN)
    assert own.sharing_key() is own


@pytest.mark.parametrize(
    ("spec", "positions", "text"),
    [
        (PLAIN, [[1]], "positions must be an integer tensor [B|1, S], got list"),
        (PLAIN, torch.tensor([[1.0]]), "positions must be an integer tensor [B|1, S], got torch.float32"),
        (PLAIN, torch.tensor([[True]]), "positions must be an integer tensor [B|1, S], got torch.bool"),
        (PLAIN, torch.tensor([1]), "positions must be an integer tensor [B|1, S], got [1]"),
        (PLAIN, torch.zeros(3, 1, 4, dtype=torch.int64), "positions must be an integer tensor [B|1, S], got [3, 1, 4]"),
        (THREE_AXES, torch.zeros(2, 1, 4, dtype=torch.int64), "[B|1, S] or [3, B|1, S], got [2, 1, 4]"),
        (THREE_AXES, torch.tensor(1), "[B|1, S] or [3, B|1, S], got []"),
    ],
)
def test_positions_of_another_shape_or_type_are_refused(spec, positions, text):
    with pytest.raises(AttentionInputError) as caught:
        RotaryEmbedding(spec)(positions)
    assert text in str(caught.value)


LONG = dataclasses.replace(
    PLAIN,
    variant="longrope",
    original_max_position=16,
    parameters={"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "switch": "length"},
)


@pytest.mark.parametrize(
    ("spec", "length", "text"),
    [
        (PLAIN, 5, "length must be None, got 5: these frequencies do not depend on it"),
        (
            LONG,
            None,
            "length must be an int, the length of the sequence, for a 'longrope' rope whose angles change after 16",
        ),
        (LONG, torch.tensor(5), "got Tensor; it is never read from positions"),
        (LONG, True, "got bool"),
        (LONG, 5.0, "got float"),
        (LONG, -1, "length must be an int >= 0, got -1"),
    ],
)
def test_a_length_is_given_exactly_where_the_spec_needs_one(spec, length, text):
    with pytest.raises(AttentionInputError) as caught:
        RotaryEmbedding(spec)(torch.tensor([[1]]), length=length)
    assert text in str(caught.value)


def test_an_embedding_needs_a_spec():
    with pytest.raises(RopeConfigError, match="spec must be a RopeSpec, got dict"):
        RotaryEmbedding(PLAIN.to_dict())


def test_it_says_what_it_is(embedding):
    assert repr(embedding) == "RotaryEmbedding('default', theta=10000, rotary_dim=8, interleaved=False)"
