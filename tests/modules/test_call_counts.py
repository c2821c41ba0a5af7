"""How many Python functions of ours a layer runs around its projections, norms, rotation and kernel."""

import torch

import polyattn
from polyattn import AttentionScope, GroupedQueryAttention, MaskLayout, QKNorm, RopeSpec
from python_calls import python_calls

ROPE = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=None,
    parameters={},
)
#: Files of the layer and the scope; norms are work that a bare layer does too.
OURS = ("gqa.py", "reading.py", "inputs.py", "kind.py", "_scope.py")


def test_a_layer_runs_few_functions_of_its_own_and_fewer_once_its_scope_is_filled():
    norm = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
    layers = [GroupedQueryAttention(32, 4, 2, 8, rope=ROPE, qk_norm=norm, backend="sdpa") for _ in range(2)]
    hidden, positions = torch.randn(1, 8, 32, requires_grad=True), torch.arange(8)[None]
    scope = AttentionScope(MaskLayout.causal(8))
    first, *later = (
        python_calls(lambda layer=layer: layer(hidden, scope, positions), "polyattn", OURS)
        for layer in (*layers, layers[0])
    )
    assert len(first) <= 20, first
    for steady in later:
        assert len(steady) <= 6, steady


def test_one_attention_and_the_first_forward_of_a_layer_run_few_functions():
    layout = MaskLayout.packed([64, 64, 128])
    q, k = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64)
    for backend, most in (("sdpa", 80), ("auto", 130)):
        polyattn.attention(q, k, k, layout, backend=backend)
        found = python_calls(lambda backend=backend: polyattn.attention(q, k, k, layout, backend=backend), "polyattn")
        assert len(found) <= most, found
    norm = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
    layer = GroupedQueryAttention(32, 4, 2, 8, rope=ROPE, qk_norm=norm, backend="sdpa")
    hidden, positions = torch.randn(1, 8, 32, requires_grad=True), torch.arange(8)[None]
    scope = AttentionScope(MaskLayout.causal(8))
    found = python_calls(lambda: layer(hidden, scope, positions), "polyattn")
    assert len(found) <= 150, found
