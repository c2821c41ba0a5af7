"""What was prepared is what may be attended to: everything else is refused before any kernel runs."""

import pytest
import torch

import polyattn
from polyattn import AttentionInputError, AttentionRequest, LayoutError, MaskLayout


def tensors(batch=2, heads=4, kv_heads=2, q_len=5, kv_len=7, **options):
    return [
        torch.randn(batch, count, length, 8, **options)
        for count, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


@pytest.fixture(params=["eager", "sdpa"])
def backend(request):
    return polyattn.backends.get(request.param)


def prepared_for(backend, layout=None, batch=2, **fields):
    return backend.prepare(layout or MaskLayout.causal(5, 7), AttentionRequest.of(*tensors(batch), **fields))


def test_another_batch_names_both(backend):
    with pytest.raises(
        AttentionInputError, match=r"batch: prepared for 2, got 3; q: prepared for shape \(2, 4, 5, 8\)"
    ):
        prepared_for(backend)(*tensors(3))


def test_another_length_names_both_shapes(backend):
    with pytest.raises(AttentionInputError, match=r"k: prepared for shape \(2, 2, 7, 8\), got \(2, 2, 9, 8\)"):
        prepared_for(backend)(*tensors(kv_len=9))


def test_contradicting_tensors_are_explained_as_such(backend):
    q, k, v = tensors()
    with pytest.raises(AttentionInputError, match="Hq=4 and Hkv=3"):
        prepared_for(backend)(q, *tensors(kv_heads=3)[1:])
    with pytest.raises(AttentionInputError, match=r"k and v must have the same length, got 7 and 6"):
        prepared_for(backend)(q, k, v[:, :, :6])


def test_another_device_or_dtype_is_refused(backend):
    prepared = prepared_for(backend)
    with pytest.raises(AttentionInputError, match="device: prepared for cpu, got meta"):
        prepared(*tensors(device="meta"))
    with pytest.raises(AttentionInputError, match=r"prepared dtype torch.float32 .*, got q torch.float64"):
        prepared(*tensors(dtype=torch.float64))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(AttentionInputError, match="under the same autocast state"),
    ):
        prepared(*tensors())


def test_features_cannot_be_slipped_in_or_left_out(backend):
    bias, sinks = torch.zeros(5, 7), torch.zeros(4)
    with pytest.raises(AttentionInputError, match="bias must not be given: the request was made with has_bias=False"):
        prepared_for(backend)(*tensors(), bias=bias)
    with pytest.raises(AttentionInputError, match="sinks must not be given: the request was made with has_sinks=False"):
        prepared_for(backend)(*tensors(), sinks=sinks)
    with pytest.raises(AttentionInputError, match="bias must be given: the request was made with has_bias=True"):
        prepared_for(backend, has_bias=True)(*tensors())
    with pytest.raises(AttentionInputError, match="sinks must be given"):
        prepared_for(backend, has_sinks=True)(*tensors())


def test_what_prepare_decides_is_not_an_argument_of_the_call(backend):
    for name in ("softcap", "scale", "dropout_p", "window"):
        with pytest.raises(TypeError, match=name):
            prepared_for(backend)(*tensors(), **{name: 0.5})


def test_gradients_that_were_not_prepared_for_are_refused(backend):
    prepared = prepared_for(backend)
    with pytest.raises(AttentionInputError, match="requires grad but the request was made with needs_grad=False"):
        prepared(*tensors(requires_grad=True))
    with torch.no_grad():
        assert not prepared(*tensors(requires_grad=True)).output.requires_grad


def test_deterministic_algorithms_switched_on_later_are_refused(backend):
    prepared = prepared_for(backend)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AttentionInputError, match="was set after prepare"):
            prepared(*tensors())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "bias, text",
    [
        (torch.ones(5, 7, dtype=torch.bool), r"got torch.bool; a boolean mask belongs in the layout: MaskLayout.dense"),
        (torch.ones(5, 7, dtype=torch.int64), "bias must be a floating tensor"),
        ([0.0], "got list"),
        (torch.zeros(5, 6), r"broadcast to \[B, Hq, Q, K\] = \(2, 4, 5, 7\), got shape \(5, 6\)"),
        (torch.zeros(1, 1, 1, 5, 7), "bias must broadcast"),
        (torch.zeros(5, 7, device="meta"), "bias must be on cpu like q, k and v, got meta"),
    ],
)
def test_a_wrong_bias_is_refused(backend, bias, text):
    with pytest.raises(AttentionInputError, match=text):
        prepared_for(backend, has_bias=True)(*tensors(), bias=bias)


def test_a_bias_that_wants_gradients_must_be_prepared_for(backend):
    prepared = prepared_for(backend, has_bias=True, needs_grad=True)
    with pytest.raises(AttentionInputError, match="needs_bias_grad=False"):
        prepared(*tensors(), bias=torch.zeros(5, 7, requires_grad=True))


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1), 0.0])
def test_wrong_sinks_are_refused(backend, sinks):
    with pytest.raises(AttentionInputError, match=r"sinks must be one floating logit per query head, shape \(4,\)"):
        prepared_for(backend, has_sinks=True)(*tensors(), sinks=sinks)


def test_a_layout_of_another_batch_heads_or_device_is_refused(backend):
    wide = torch.ones(3, 2, 5, 7, dtype=torch.bool)
    with pytest.raises(LayoutError) as caught:
        prepared_for(backend, MaskLayout.dense(wide))
    assert "layout.batch=3 and tensors of batch 2" in str(caught.value)
    assert "layout.heads=2 and 4 query heads" in str(caught.value)
    with pytest.raises(LayoutError, match=r"move it with layout.to\('cpu'\)"):
        prepared_for(backend, MaskLayout.dense(torch.ones(5, 7, dtype=torch.bool, device="meta")))


def test_a_layout_of_batch_three_serves_batch_three_only(backend):
    layout = MaskLayout.packed([[5], [2, 3], [1, 4]])
    for batch in (1, 2):
        with pytest.raises(LayoutError, match=f"layout.batch=3 and tensors of batch {batch}"):
            backend.prepare(layout, AttentionRequest.of(*tensors(batch, kv_len=5)))
    backend.prepare(layout, AttentionRequest.of(*tensors(3, kv_len=5)))


@pytest.mark.parametrize("make", [MaskLayout.full, MaskLayout.causal])
def test_a_length_beyond_any_tensor_is_refused(make):
    with pytest.raises(LayoutError, match=r"q_len must be at most 72057594037927936, got"):
        make(2**70)


@pytest.mark.parametrize("name", ["eager", "sdpa", "auto"])
def test_a_raw_mask_is_not_a_layout(name):
    with pytest.raises(LayoutError, match=r"must be a MaskLayout, got Tensor; .* MaskLayout.dense\(mask\)"):
        polyattn.attention(*tensors(), torch.ones(5, 7, dtype=torch.bool), backend=name)


@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_any_floating_dtype_is_added(backend, dtype, bias_dtype):
    q, k, v = tensors(dtype=dtype)
    bias = torch.linspace(-1, 1, 35).view(5, 7).to(bias_dtype)
    output = polyattn.attention(q, k, v, MaskLayout.causal(5, 7), backend=backend, bias=bias).output
    exact = polyattn.attention(
        q.double(), k.double(), v.double(), MaskLayout.causal(5, 7), backend="eager", bias=bias.double()
    ).output
    assert output.dtype is dtype
    torch.testing.assert_close(output.double(), exact, rtol=0.03, atol=0.03)


def test_a_float_mask_is_pointed_to_the_bias():
    with pytest.raises(LayoutError, match="bias="):
        MaskLayout.dense(torch.zeros(5, 7))


def test_what_is_not_a_tensor_is_named(backend):
    q, k, v = tensors()
    with pytest.raises(AttentionInputError, match=r"k must be a torch.Tensor, got list"):
        prepared_for(backend)(q, [1.0], v)
    with pytest.raises(AttentionInputError, match=r"q must be a torch.Tensor, got NoneType"):
        polyattn.attention(None, k, v, MaskLayout.causal(5, 7), backend=backend, return_lse=True)


def test_a_layout_of_other_lengths_is_blamed_itself(backend):
    with pytest.raises(LayoutError, match="layout must have q_len=5 and kv_len=7 for these q and k, got q_len=4 and"):
        polyattn.attention(*tensors(), MaskLayout.causal(4), backend=backend)


def test_heads_and_length_in_the_other_order_are_named(backend):
    x = torch.zeros(2, 5, 4, 8)
    with pytest.raises(LayoutError, match=r"q, k and v are \[B, heads, length, width\]: call .transpose\(1, 2\) on"):
        polyattn.attention(x, x, x, MaskLayout.causal(5), backend=backend)


def test_return_lse_is_a_bool(backend):
    with pytest.raises(AttentionInputError, match="return_lse must be True or False, got 'yes'"):
        polyattn.attention(*tensors(), MaskLayout.causal(5, 7), backend=backend, return_lse="yes")


def test_a_finite_bias_beyond_float32_blocks_nothing(backend):
    q, k, v = tensors()
    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[1], bias[2, :3] = torch.finfo(torch.float64).min, -torch.inf
    layout = MaskLayout.full(5, 7)
    narrow = torch.where(bias.isinf(), bias, bias.clamp(torch.finfo(torch.float32).min)).float()
    output, want = (polyattn.attention(q, k, v, layout, backend=backend, bias=x).output for x in (bias, narrow))
    assert torch.equal(output, want)
    torch.testing.assert_close(output[:, :, 1], v.mean(2).repeat_interleave(2, 1))


@pytest.mark.parametrize("scale", [1e-60, -1e-60, 7e-46, 1e-45, 1e-38])
def test_a_scale_that_is_none_in_float32_averages(backend, scale):
    q, k, v = tensors()
    for layout in (MaskLayout.causal(5, 7), MaskLayout.packed([2, 3]) & MaskLayout.full(5)):
        length = layout.kv_len
        output = polyattn.attention(q, k[:, :, :length], v[:, :, :length], layout, backend=backend, scale=scale).output
        seen = layout.to_dense().float()
        want = (seen / seen.sum(-1, keepdim=True)) @ v[:, :, :length].repeat_interleave(2, 1)
        torch.testing.assert_close(output, want)
