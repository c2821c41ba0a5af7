"""What was made in inference mode serves training afterwards: autograd saves none of it as it was."""

from __future__ import annotations

import pytest
import torch

import polyattn
from fa_stand_in import stand_in
from polyattn import (
    AttentionRequest,
    AttentionResult,
    AttentionScope,
    MaskLayout,
    PreparedAttention,
    RopeSpec,
    RotaryEmbedding,
    StructuredMask,
    apply_rotary,
    merge,
)

VALID = torch.arange(12)[None].expand(2, 12)
LAYOUTS = {
    "causal": lambda: MaskLayout.causal(12),
    "window": lambda: MaskLayout.causal(12, window=3),
    "packed": lambda: MaskLayout.packed(document_ids=torch.tensor([[0] * 4 + [1] * 8])),
    "padded": lambda: MaskLayout.padded(torch.tensor([[7], [12]]) > VALID),
    "padding with holes": lambda: MaskLayout.padded(VALID % 3 > 0),
    "dense": lambda: MaskLayout.dense(torch.ones(12, 12, dtype=torch.bool).tril(-1)),
    "mask_mod": lambda: MaskLayout.from_mod(lambda b, h, q, k: k <= q, q_len=12, kv_len=12),
    "inactive queries": lambda: MaskLayout.causal(12, active_queries=torch.arange(12)[None] % 2 > 0),
    "positions": lambda: MaskLayout(
        12,
        12,
        visibility=StructuredMask(
            causal=True, q_positions=torch.arange(12)[None] * 7 % 12, kv_positions=torch.arange(12)[None]
        ),
    ),
}
BACKENDS = [
    ("eager", None),
    ("sdpa", None),
    ("flex_attention", {"compiled": False}),
    ("fa", {"provider": "flash_attn"}),
]


@pytest.fixture(autouse=True)
def fa_runs():
    with stand_in("flash_attn"):
        yield


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 12, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def step(prepared, qkv):
    result = prepared(*qkv)
    loss = result.output.sum() + torch.where(result.lse.isfinite(), result.lse, 0.0).sum()
    return torch.autograd.grad(loss, qkv)


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("name, options", BACKENDS, ids=[name for name, _ in BACKENDS])
@pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_and_a_prepared_attention_made_in_it_train(build, name, options):
    backend = polyattn.backends.resolve(name, options)
    qkv = tensors(torch.bfloat16 if name == "fa" else torch.float32)
    request = AttentionRequest.of(*qkv, needs_lse=True, needs_lse_grad=True)
    if backend.unsupported(build(), request):
        pytest.skip("refused")
    with torch.inference_mode():
        layout = build()
        prepared = backend.prepare(layout, request)
    want = step(backend.prepare(build(), request), qkv)
    for made in (prepared, backend.prepare(layout, request)):
        assert all(torch.equal(a, b) for a, b in zip(step(made, qkv), want, strict=True))


def test_a_backend_without_the_base_class_trains_on_what_the_scope_prepared_in_it():
    class Bare:
        """The protocol and nothing else."""

        name, api_version = "bare", 1

        def unsupported(self, layout, request):
            return ()

        def prepare(self, layout, request):
            return PreparedAttention(self, layout, request, {"hidden": ~layout.to_dense()})

        def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
            weights = (q @ k.mT * prepared.request.scale).masked_fill(prepared.state["hidden"], -torch.inf).softmax(-1)
            return AttentionResult(weights @ v)

    qkv, backend = tensors(), Bare()
    request = AttentionRequest.of(*qkv)
    for build in (LAYOUTS["causal"], LAYOUTS["padded"]):
        with torch.inference_mode():
            scope = AttentionScope(build())
            prepared = scope.prepare(backend, request)
        got = torch.autograd.grad(prepared(*qkv).output.sum(), qkv)
        want = torch.autograd.grad(polyattn.attention(*qkv, build(), backend="eager").output.sum(), qkv)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_a_scope_filled_in_it_trains():
    with torch.inference_mode():
        scope = AttentionScope(LAYOUTS["padded"]())
        q, k, v = tensors()
        scope.prepare("sdpa", AttentionRequest.of(q, k, v))(q, k, v)
    qkv = tensors()
    output = scope.prepare("sdpa", AttentionRequest.of(*qkv))(*qkv).output
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), qkv))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_tables_made_in_it_train(interleaved):
    rope = RopeSpec(
        variant="default",
        theta=1e4,
        head_dim=16,
        rotary_dim=16,
        interleaved=interleaved,
        max_position=64,
        original_max_position=None,
        parameters={},
    )
    embedding, positions = RotaryEmbedding(rope), torch.arange(12)[None]
    q, k, _ = tensors()
    want = torch.autograd.grad(apply_rotary(q, k, embedding(positions), interleaved=interleaved)[0].sin().sum(), q)
    with torch.inference_mode():
        tables = RotaryEmbedding(rope)(positions.clone())
    got = torch.autograd.grad(apply_rotary(q, k, tables, interleaved=interleaved)[0].sin().sum(), q)
    assert torch.equal(got[0], want[0])


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("name, options", BACKENDS, ids=[name for name, _ in BACKENDS])
def test_merged_parts_train_when_only_the_values_do(name, options):
    q, k, v = tensors(torch.bfloat16 if name == "fa" else torch.float32)
    q, k = q.detach(), k.detach()
    backend = polyattn.backends.resolve(name, options)

    def part(start, stop):
        layout = MaskLayout.full(12, stop - start)
        keys = slice(start, stop)
        return polyattn.attention(q, k[:, :, keys], v[:, :, keys], layout, backend=backend, return_lse=True)

    merged = merge([part(0, 5), part(5, 12)])
    whole = polyattn.attention(q, k, v, MaskLayout.full(12), backend=backend)
    got, want = (torch.autograd.grad(x.output.float().sin().sum(), v)[0] for x in (merged, whole))
    torch.testing.assert_close(got, want, **({"rtol": 0.05, "atol": 0.02} if name == "fa" else {}))
