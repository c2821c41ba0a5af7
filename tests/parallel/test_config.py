"""Context parallelism as a training config names it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polyattn import AttentionConfig, AttentionScope, ConfigError, MaskLayout
from polyattn.registry import scopes
from polyattn_context_parallel import ContextParallelConfig, ContextParallelError

SEVERAL = {"full": MaskLayout.causal(4), "sliding": MaskLayout.causal(4, window=2)}


def test_a_config_names_it_beside_any_backend():
    config = AttentionConfig.from_dict({"attn_backend": "sdpa", "context_parallel": {"mesh": "seq", "method": "ring"}})
    assert config.context_parallel == ContextParallelConfig(mesh="seq", method="ring")
    assert AttentionConfig(context_parallel={}).context_parallel == ContextParallelConfig()
    own = ContextParallelConfig(balance="zigzag")
    assert AttentionConfig(context_parallel=own).context_parallel is own


def test_the_registry_finds_it_by_name():
    assert isinstance(scopes.get("context_parallel"), ContextParallelConfig)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"method": "usp"}, "context_parallel: method must be auto, gather, ulysses or ring, got 'usp'"),
        ({"balance": 3}, "context_parallel: balance must be auto, contiguous, zigzag or documents, got 3"),
        ({"check": "sometimes"}, "context_parallel: check must be once, always or never, got 'sometimes'"),
        ({"mesh": 2}, "context_parallel: mesh must be the name of a dimension of the mesh, got 2"),
        ({"ranks": 2}, "context_parallel: unknown key 'ranks'; the keys are mesh, method, balance, check"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_config(given, says):
    with pytest.raises(ContextParallelError) as error:
        AttentionConfig(context_parallel=given)
    assert str(error.value) == says


def test_another_kind_of_value_is_refused():
    with pytest.raises(ConfigError, match=r"context_parallel: must be a mapping such as .*, got 'auto'"):
        AttentionConfig(context_parallel="auto")


@pytest.mark.parametrize(
    "mesh, says", [(None, "got None"), (SimpleNamespace(mesh_dim_names=("dp", "tp")), "got dimensions 'dp', 'tp'")]
)
def test_a_mesh_without_its_dimension_is_refused(mesh, says):
    with pytest.raises(ContextParallelError, match="must be a DeviceMesh with a dimension 'cp'") as error:
        AttentionConfig(context_parallel={}).scope(MaskLayout.causal(4), mesh)
    assert says in str(error.value)


def test_without_it_a_scope_is_a_plain_one_of_one_layout():
    layout = MaskLayout.causal(4)
    scope = AttentionConfig().scope(layout)
    assert type(scope) is AttentionScope
    assert scope.layout is layout
    with pytest.raises(ConfigError, match="layout must be a MaskLayout without context_parallel, got dict"):
        AttentionConfig().scope(SEVERAL)
