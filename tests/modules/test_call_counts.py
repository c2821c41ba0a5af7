"""How many Python functions of ours a layer runs around its projections, norms, rotation and kernel."""

import sys

import torch

from polyattn import AttentionScope, GroupedQueryAttention, MaskLayout, QKNorm, RopeSpec

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


def calls(run):
    found = []

    def watch(frame, event, arg):
        code = frame.f_code
        if event == "call" and "polyattn" in code.co_filename and code.co_filename.endswith(OURS):
            found.append(code.co_name)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_layer_runs_few_functions_of_its_own_and_fewer_once_its_scope_is_filled():
    norm = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
    layers = [GroupedQueryAttention(32, 4, 2, 8, rope=ROPE, qk_norm=norm, backend="sdpa") for _ in range(2)]
    hidden, positions = torch.randn(1, 8, 32, requires_grad=True), torch.arange(8)[None]
    scope = AttentionScope(MaskLayout.causal(8))
    first, *later = (calls(lambda layer=layer: layer(hidden, scope, positions)) for layer in (*layers, layers[0]))
    assert len(first) <= 20, first
    for steady in later:
        assert len(steady) <= 6, steady
