"""Tensor parallelism against one process: gloo processes, started once for each number of ranks."""

import pytest
import torch.distributed

from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]
PLACED = {"plain": "plain", "whole": "(Replicate(),)", "tokens": "(Shard(dim=1),)"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks found, which share the heads of layers."""
    return run_ranks("tensor_ranks.py", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """What each of four ranks found: two by two, FSDP2 over rows and shared heads over columns."""
    return run_ranks("tensor_ranks.py", 4, tmp_path_factory.mktemp("four"))


def test_output_and_every_gradient_are_those_of_one_process_for_every_norm_and_placement(found):
    for rank in found:
        assert len(rank["layers"]) == 11
        for case, errors in rank["layers"].items():
            assert max(errors["output"], errors["hidden"], errors["gradients"]) <= 1e-12, case
            assert errors["gradients are placed as parameters"], case


def test_the_output_is_placed_as_the_hidden_states_were(found):
    for case, errors in found[0]["layers"].items():
        how = case.rpartition(", ")[2] if ", " in case else "plain"
        assert errors["placements"] == PLACED[how], case


def test_a_filled_scope_serves_the_forward(found):
    assert {errors["builds"] for errors in found[0]["layers"].values()} == {1}


def test_contexts_caches_given_keys_bias_and_lse_are_of_the_ranks_own_heads(found):
    for rank in found:
        assert set(rank["keys"]) == {"context", "lse", "keys", "past", "cache"}
        assert max(rank["keys"].values()) <= 1e-12, rank["keys"]


def test_state_dicts_of_either_form_and_checkpoints_go_in_and_out(found):
    for rank in found:
        assert len(rank["states"]) == 8
        assert max(rank["states"].values()) <= 1e-12, rank["states"]


def test_a_copy_with_another_backend_and_a_compiled_layer_give_the_same(found):
    for rank in found:
        assert rank["copied"] <= 1e-12
        assert rank["compiled"] <= 1e-12


def test_a_decoder_under_fsdp2_too_trains_as_in_one_process(square):
    for rank in square:
        for tokens in (False, True):
            assert max(rank[f"tokens {tokens}"].values()) <= 1e-12, rank


@pytest.mark.parametrize(
    "what, parts",
    [
        (
            "heads",
            [
                "ConfigError: num_heads must be a multiple of the ranks of the mesh, 2, got 3; choose a smaller mesh",
                "num_kv_heads must be a multiple of the ranks of the mesh, 2, got 1",
                "dropout must be 0 under tensor parallelism, got 0.5",
            ],
        ),
        ("mesh", ["ConfigError: mesh must be a DeviceMesh of one dimension, got str"]),
        ("twice", ["ConfigError: a layer is parallelised once, got one that is already; build another layer"]),
        ("changed", ["ConfigError: k_proj must be Linear itself, got Sequential; parallelise before it is replaced"]),
        ("sharded", ["parameters must not be sharded yet, got DTensors; parallelise before fully_shard"]),
        (
            "rows",
            [
                "AttentionInputError: hidden must be a plain tensor of all tokens, or a DTensor with placements",
                "placements [Replicate()] or [Shard(1)] (its tokens) on the layer's mesh",
                "got a DTensor with placements [Shard(dim=0)]",
            ],
        ),
        (
            "not parallelised",
            ["hidden must be a plain tensor for a layer that is not parallelised", "call layer.parallelize(mesh)"],
        ),
        ("keys of one", ["hidden must be a plain tensor for a layer that is not parallelised"]),
        ("positions", ["positions must be a plain tensor, got a DTensor", "pass its to_local()"]),
        ("bias", ["attention_bias must have rows for each of this rank's heads", "got shape [1, 1, 15, 15]"]),
        ("all keys", ["the keys of keys_values must be [2, 1, K, 8]", "got [2, 2, 15, 8]"]),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name_and_nothing_was_changed(found, what, parts):
    for rank in found:
        assert all(part in rank["refusals"][what] for part in parts), rank["refusals"][what]


def test_a_mesh_of_two_dimensions_is_refused(square):
    assert "mesh must be a DeviceMesh of one dimension, got one of 2 dimensions" in square[0]["mesh"]["two"]
