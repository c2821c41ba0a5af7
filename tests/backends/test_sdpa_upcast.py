"""The option ``upcast_backward`` of the sdpa backend: gradients of half precision computed in FP32 on the CPU."""

import pytest
import torch

import polyattn
from polyattn import AttentionRequest, ConfigError, MaskLayout
from polyattn_conformance.reference import reference_attention
from polyattn_sdpa import _options

ON, OFF, AUTO = (polyattn.backends.resolve("sdpa", {"upcast_backward": value}) for value in (True, False, None))
LAYOUTS = [
    MaskLayout.full(40),
    MaskLayout.causal(40),
    MaskLayout.causal(40, window=7),
    MaskLayout.packed([10, 25, 5]),
    MaskLayout.padded(torch.arange(40)[None] % 3 > 0),
    MaskLayout.causal(40, active_queries=torch.arange(40)[None] % 2 > 0),
]


def tensors(dtype, heads=4, kv_heads=4, v_width=16):
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, 16), (kv_heads, 16), (kv_heads, v_width), (heads, v_width))
    made = [torch.randn(1, h, 40, d, generator=generator).to(dtype) for h, d in shapes]
    return [x.requires_grad_() for x in made[:3]], made[3]


def gradients(backend, layout, qkv, grad, **fields):
    result = backend.prepare(layout, AttentionRequest.of(*qkv, **fields))(*qkv)
    loss = (result.output * grad).sum()
    if result.lse is not None:
        loss = loss + torch.where(result.lse.isfinite(), result.lse, 0.0).sin().sum()
    return result, torch.autograd.grad(loss, qkv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 24)], ids=["plain heads", "grouped and wide"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_its_gradients_are_nearer_the_exact_ones_and_its_output_keeps_its_bits(layout, heads, dtype):
    qkv, grad = tensors(dtype, *heads)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    output, lse = reference_attention(*exact, layout.to_dense())
    loss = (output * grad).sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
    want = torch.autograd.grad(loss, exact)
    wanted = {"needs_lse": True, "needs_lse_grad": True}
    on, off = (gradients(backend, layout, qkv, grad, **wanted) for backend in (ON, OFF))
    assert torch.equal(on[0].output, off[0].output)
    assert torch.equal(on[0].lse, off[0].lse)
    for got, plain, right in zip(on[1], off[1], want, strict=True):
        assert got.dtype is dtype
        error, before = ((x.double() - right).norm() for x in (got, plain))
        assert error <= 1.02 * before
        # What the saved output and the result round, and no more.
        assert error <= torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=lambda layout: layout.describe())
def test_what_is_saved_for_the_backward_stays_in_the_dtype_of_the_tensors(layout):
    qkv, _ = tensors(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ON.prepare(layout, AttentionRequest.of(*qkv))(*qkv)
    wide = [x.shape for x in saved if x.is_floating_point() and x.dtype is not torch.bfloat16]
    assert wide in ([], [(1, 4, 40)])  # the LSE


def test_the_default_upcasts_what_the_cpu_cannot_multiply_in_tiles(monkeypatch):
    for fast, upcasts in (({torch.bfloat16}, [False, True]), (set(), [True, True]), ({torch.float16}, [True, False])):
        monkeypatch.setattr(_options, "_FAST", fast)
        made = [
            AUTO.prepare(MaskLayout.causal(40), AttentionRequest.of(*tensors(dtype)[0]))
            for dtype in (torch.bfloat16, torch.float16)
        ]
        assert [x.state.upcast for x in made] == upcasts
        assert [x.state.path == "tiles" for x in made] == upcasts
        assert ["backward in FP32" in AUTO.describe(x) for x in made] == upcasts


def test_only_half_precision_under_gradients_on_the_cpu_is_upcast():
    def upcasts(qkv, **fields):
        return ON.prepare(MaskLayout.causal(40), AttentionRequest.of(*qkv, **fields)).state.upcast

    qkv, _ = tensors(torch.bfloat16)
    assert upcasts(qkv)
    assert not upcasts([x.detach() for x in qkv])
    assert not upcasts(tensors(torch.float32)[0])
    assert not upcasts([x.to("meta") for x in qkv])
    with torch.no_grad():
        assert not upcasts(qkv)


def test_it_holds_under_a_compiler():
    qkv, grad = tensors(torch.bfloat16)
    layout = MaskLayout.packed([10, 30])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, layout):
        return ON.prepare(layout, AttentionRequest.of(q, k, v))(q, k, v).output

    got = torch.autograd.grad(step(*qkv, layout), qkv, grad)
    want = gradients(ON, layout, qkv, grad)[1]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_value_of_another_type_is_refused():
    with pytest.raises(ConfigError, match=r"option 'upcast_backward' must be bool \| None, got 'yes'"):
        polyattn.backends.resolve("sdpa", {"upcast_backward": "yes"})
