"""The sdpa backend: which path a layout takes, and what stands between the raw fused op and its faults."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn import AttentionRequest, MaskLayout, UnsupportedAttentionError
from polyattn_conformance.reference import reference_attention
from polyattn_sdpa import _kernels
from polyattn_sdpa._tiles import ALIGNMENT, STRIP, Band, mask_of, strips

SDPA = polyattn.backends.get("sdpa")


def tensors(q_len=6, kv_len=6, heads=4, kv_heads=2, width=8, v_width=8, batch=1, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len, width), (kv_heads, kv_len, width), (kv_heads, kv_len, v_width))
    made = [torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def prepare(layout, *qkv, **fields):
    return SDPA.prepare(layout, AttentionRequest.of(*qkv, **fields))


@pytest.mark.parametrize(
    "layout, path",
    [
        (MaskLayout.full(6), "plain"),
        (MaskLayout.causal(6), "plain"),
        (MaskLayout.causal(6, window=2), "tiles"),
        (MaskLayout.packed([6]), "tiles"),
        (MaskLayout.packed([2, 4]), "tiles"),
        (MaskLayout.padded(torch.tensor([[True] * 4 + [False] * 2])), "tiles"),
        (MaskLayout.padded(torch.tensor([[True, False, True, True, True, True]])), "dense"),
        (MaskLayout.prefix_lm(torch.tensor([2]), 6), "tiles"),
        (MaskLayout.chunked(4, 6), "tiles"),
        (MaskLayout.dense(torch.ones(6, 6, dtype=torch.bool)), "dense"),
        (MaskLayout.from_mod(lambda b, h, q, k: k <= q, q_len=6, kv_len=6), "dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_structure_is_lowered_and_only_the_dense_is_dense(layout, path):
    prepared = prepare(layout, *tensors())
    assert prepared.state.path == path
    # With so few keys the plain call gets a mask, under which the kernel shows NaN.
    assert (prepared.state.mask is not None) is (path in ("dense", "plain"))


def test_a_plain_call_of_more_than_a_few_keys_has_no_mask():
    state = prepare(MaskLayout.causal(_kernels.FEW_KEYS), *tensors(_kernels.FEW_KEYS, _kernels.FEW_KEYS)).state
    assert (state.path, state.causal, state.mask) == ("plain", True, None)


def test_an_alignment_that_the_kernel_flag_does_not_have_is_never_given_to_it():
    assert prepare(MaskLayout.causal(2, 5), *tensors(2, 5)).state.path == "tiles"
    q, k, v = tensors(1, 5)
    (output,) = (polyattn.attention(q, k, v, MaskLayout.causal(1, 5), backend="sdpa").output,)
    assert not torch.allclose(output, v[:, :, :1].repeat_interleave(2, 1))
    torch.testing.assert_close(
        output, reference_attention(q, k, v, torch.ones(1, 1, 1, 5, dtype=torch.bool))[0].float()
    )


def test_inactive_queries_cost_a_selection_only_where_they_lie_between_active_ones():
    tail = torch.tensor([[True] * 4 + [False] * 2])
    for active, selects in ((tail, False), (tail.flip(1), False), (torch.tensor([[True, False] * 3]), True)):
        state = prepare(MaskLayout.causal(6, active_queries=active), *tensors()).state
        assert state.path == "tiles"
        assert (state.rows is not None) is selects


def test_a_bias_or_dropout_under_gradients_takes_the_math_path_and_says_so():
    qkv = tensors(grad=True)
    bias = torch.zeros(6, 6)
    assert "math" in SDPA.describe(prepare(MaskLayout.causal(6), *qkv, bias=bias))
    assert "math" in SDPA.describe(prepare(MaskLayout.causal(6), *qkv, dropout_p=0.1, training=True))
    with pytest.raises(UnsupportedAttentionError, match=r"lse together with a bias under gradients.*'eager' does both"):
        prepare(MaskLayout.causal(6), *qkv, bias=bias, needs_lse=True)
    with pytest.raises(UnsupportedAttentionError, match="sinks together with dropout"):
        prepare(MaskLayout.causal(6), *qkv, dropout_p=0.1, training=True, has_sinks=True)


bands = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 20), st.integers(-60, 60), st.integers(-60, 60)
)


@settings(max_examples=300, deadline=None)
@given(bands)
def test_tiles_paint_exactly_the_mask_of_their_band(band):
    rows, keys, first_key, low, high = band
    painted = torch.zeros(rows, first_key + keys, dtype=torch.int64)
    tiles = strips(Band(0, 0, rows, first_key, first_key + keys, low, high), rows=4)
    for tile in tiles:
        part = painted[tile.q_start : tile.q_stop, slice(*tile.keys[0])]
        if tile.pattern:
            part += mask_of(tile, torch.float32, torch.device("cpu")) == 0
        elif tile.causal:
            part += torch.ones_like(part).tril()
        else:
            part += 1
    apart = torch.arange(rows)[:, None] - torch.arange(keys)[None]
    visible = (apart >= low) & (apart <= high)
    assert torch.equal(painted[:, first_key:], visible.long())
    assert not painted[:, :first_key].any()
    for first, second in itertools.pairwise(tiles):
        assert first.q_stop <= second.q_start


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_long_documents_equal_eager_in_values_and_gradients(seed):
    # Long enough for several bands, at lengths and offsets that are multiples of nothing.
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length = draw.randrange(2, 600)
    ends = sorted({*draw.choices(range(1, length), k=draw.choice((0, 2))), length})
    documents = [stop - start for start, stop in itertools.pairwise([0, *ends])]
    layout = MaskLayout.packed(
        documents, causal=draw.random() < 0.6, window=draw.choice((None, draw.randrange(1, 400)))
    )
    start = draw.randrange(length)
    layout = layout.select_queries(slice(start, draw.randrange(start, length) + 1))
    start = draw.randrange(length)
    layout = layout.select_keys(slice(start, draw.randrange(start, length) + 1))
    shapes = ((2, layout.q_len, 3), (1, layout.kv_len, 3), (1, layout.kv_len, 2), (2, layout.q_len, 2))
    q, k, v, grad = (torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    results = []
    for backend in ("eager", "sdpa"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        result = polyattn.attention(*leaves, layout, backend=backend, return_lse=True)
        loss = (result.output * grad).sum() + result.lse[result.lse.isfinite()].square().sum()
        results.append([result.output, result.lse, *torch.autograd.grad(loss, leaves)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want.isneginf(), got.isneginf())
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_wide_grouped_heads_have_the_numbers_of_repeated_ones_without_quadratic_memory():
    for width, v_width in ((512, 512), (512, 16), (16, 320)):
        q, k, v = tensors(9, 9, width=width, v_width=v_width, dtype=torch.float64)
        prepared = prepare(MaskLayout.causal(9), q, k, v)
        repeated = polyattn.attention(
            q, *(x.repeat_interleave(2, 1) for x in (k, v)), MaskLayout.causal(9), backend=SDPA
        )
        torch.testing.assert_close(prepared(q, k, v).output, repeated.output)
        assert "quadratic" not in SDPA.describe(prepared)


def test_a_mask_that_the_kernel_gets_adds_nothing_or_minus_infinity():
    dense = MaskLayout.dense(torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.5)
    mask = prepare(dense, *tensors()).state.mask
    assert mask.dtype is torch.float32
    assert ((mask == 0) | mask.isneginf()).all()


def test_a_windows_tiles_never_grow_with_the_length():
    for length in (1000, 4000):
        tiles = strips(Band(0, 0, length, 0, length, 0, 49))
        assert max((t.q_stop - t.q_start) * t.width for t in tiles) <= STRIP * (STRIP + 50 + ALIGNMENT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_portable_kernel_equals_the_cpu_kernel(causal, masked):
    q, k, v = tensors(5, 5, v_width=6, dtype=torch.float64)
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.eye(5).roll(1, 0) > 0, -torch.inf)
    mask = mask if masked and not causal else None
    output, lse = _kernels.forward(q, k, v, mask, causal, 0.3)
    portable = _kernels._portable_forward(q, k, v, mask, causal, 0.3)
    torch.testing.assert_close((output, lse), portable)
    grad, grad_lse = torch.randn_like(output), torch.randn_like(lse)
    arguments = (grad, grad_lse, q, k, v, output, lse, mask, causal, 0.3)
    torch.testing.assert_close(_kernels.backward(*arguments), _kernels._portable_backward(*arguments))


def test_the_gradient_through_the_lse_is_exact():
    q, k, v = tensors(dtype=torch.float64, grad=True, v_width=5)
    layout = MaskLayout.packed([2, 4])
    result = polyattn.attention(q, k, v, layout, backend="sdpa", return_lse=True)
    output, lse = reference_attention(q, k, v, layout.to_dense())
    got = torch.autograd.grad(result.output.sin().sum() + result.lse.cos().sum(), (q, k, v))
    want = torch.autograd.grad(output.sin().sum() + lse.cos().sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


class TestAnLseWhoseGradientWasNotAskedFor:
    def result(self):
        q, k, v = tensors(grad=True)
        return (q, k, v), prepare(MaskLayout.packed([2, 4]), q, k, v, needs_lse=True)(q, k, v)

    def test_a_loss_on_it_raises(self):
        _, result = self.result()
        with pytest.raises(RuntimeError, match=r"backend 'sdpa'.*needs_lse_grad=True"):
            result.lse.sum().backward()

    def test_a_mixed_loss_raises(self):
        _, result = self.result()
        with pytest.raises(RuntimeError, match=r"backend 'sdpa'.*needs_lse_grad=True"):
            (result.output.sum() + result.lse.sum()).backward()

    def test_a_loss_on_the_output_alone_is_unaffected(self):
        qkv, result = self.result()
        plain = prepare(MaskLayout.packed([2, 4]), *qkv)(*qkv)
        torch.testing.assert_close(
            torch.autograd.grad(result.output.sin().sum(), qkv), torch.autograd.grad(plain.output.sin().sum(), qkv)
        )


def test_grouped_heads_accumulate_key_gradients_in_float32():
    q, k, v = tensors(64, 64, heads=32, kv_heads=1, width=16, v_width=16, dtype=torch.bfloat16, grad=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    layout = MaskLayout.causal(64)
    weights = torch.randn(1, 32, 64, 16, generator=torch.Generator().manual_seed(5))
    want = torch.autograd.grad((reference_attention(*exact, layout.to_dense())[0] * weights).sum(), exact)
    errors = {}
    for name in ("eager", "sdpa"):
        output = polyattn.attention(q, k, v, layout, backend=name).output
        got = torch.autograd.grad((output * weights).sum(), (q, k, v))
        errors[name] = [(a.double() - b).abs().max() for a, b in zip(got, want, strict=True)]
    assert errors["sdpa"][1] <= 1.5 * errors["eager"][1]
    assert errors["sdpa"][2] <= 1.5 * errors["eager"][2]


@pytest.mark.parametrize("layout", [MaskLayout.causal(6), MaskLayout.packed([2, 4])], ids=["plain", "tiles"])
def test_any_strides_give_the_same_numbers(layout):
    qkv = tensors()
    want = prepare(layout, *qkv)(*qkv).output
    views = [torch.empty(*x.shape[:3], 2 * x.shape[3])[..., ::2].copy_(x) for x in qkv]
    torch.testing.assert_close(prepare(layout, *views)(*views).output, want)
    transposed = [x.mT.contiguous().mT for x in qkv]
    torch.testing.assert_close(prepare(layout, *transposed)(*transposed).output, want)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("layout", [MaskLayout.causal(6), MaskLayout.causal(6, window=2)], ids=["plain", "tiles"])
def test_a_scale_that_is_not_positive_hides_the_same_keys(layout, scale):
    q, k, v = tensors(grad=True)
    output = polyattn.attention(q, k, v, layout, backend="sdpa", scale=scale).output
    want, _ = reference_attention(q, k, v, layout.to_dense(), scale=scale)
    torch.testing.assert_close(output, want.float())
    torch.testing.assert_close(torch.autograd.grad(output.sum(), q), torch.autograd.grad(want.float().sum(), q))


def test_a_bias_over_no_keys_gets_an_empty_gradient():
    q, k, v = tensors(kv_len=0, grad=True)
    bias = torch.zeros(4, 6, 0, requires_grad=True)
    output = polyattn.attention(q, k, v, MaskLayout.full(6, 0), backend="sdpa", bias=bias).output
    assert (output == 0).all()
    assert [x.shape for x in torch.autograd.grad(output.sum(), (q, bias))] == [q.shape, bias.shape]


FATAL = {
    "no queries": "attention(rand(1, 2, 0, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), L.full(0, 4))",
    "no keys": "attention(rand(1, 2, 4, 8), rand(1, 2, 0, 8), rand(1, 2, 0, 8), L.full(4, 0))",
    "no keys, packed": "attention(rand(1, 2, 0, 8), rand(1, 2, 0, 8), rand(1, 2, 0, 8), L.packed([0]))",
    "no batch": "attention(rand(0, 2, 4, 8), rand(0, 2, 4, 8), rand(0, 2, 4, 8), L.causal(4))",
    "fewer query heads": "attention(rand(1, 1, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), L.full(4))",
    "heads that do not divide": "attention(rand(1, 3, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), L.full(4))",
    "unequal batches": "attention(rand(2, 2, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8), L.full(4))",
    "a hidden element": "attention(*rand(3, 2, 2, 4, 8), L.dense(torch.zeros(2, 1, 4, 4, dtype=torch.bool)))",
}


def test_what_kills_the_raw_op_is_answered_or_refused(run_python):
    code = f"""
import torch, polyattn
from polyattn import MaskLayout as L
rand = torch.rand
def attention(q, k, v, layout):
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    result = polyattn.attention(q, k, v, layout, backend="sdpa", return_lse=True)
    torch.autograd.grad(result.output.sum(), (q, k, v))
    assert result.output.shape == q.shape and (result.output == 0).all()
    assert result.lse.shape == q.shape[:3] and (result.lse == -torch.inf).all()
    return "zeros"
for name, call in {FATAL}.items():
    print(name, end=": ", flush=True)
    try:
        print(eval(call))
    except polyattn.AttentionInputError as error:
        print("refused", str(error).replace(chr(10), " "))
"""
    done = run_python(code)
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert answers.keys() == FATAL.keys()
    assert all(answer.startswith(("zeros", "refused")) for answer in answers.values()), answers


def test_eight_segmentations_compile_to_two_graphs(compiled_step):
    step, counter = compiled_step
    cuts = [[12], [5, 7], [1, 2, 9], [3, 3, 3, 3], [1] * 12, [6, 6], [4, 8], [2, 2, 2, 6]]
    for lengths in cuts:
        qkv = tensors(12, 12, grad=True)
        layout = MaskLayout.packed(lengths)
        got, want = step(*qkv, layout), prepare(layout, *qkv)(*qkv).output
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), qkv), torch.autograd.grad(want.sum(), qkv))
    assert counter.frame_count <= 2


def test_one_tensor_may_be_both_keys_and_values_in_a_compiled_function():
    q, k, _ = tensors(grad=True)
    prepared = prepare(MaskLayout.packed([2, 4]), q, k, k)
    compiled = torch.compile(lambda q, k: prepared(q, k, k).output, fullgraph=True, backend="aot_eager")
    got, want = compiled(q, k), prepared(q, k, k).output
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), k), torch.autograd.grad(want.sum(), k))


class Watch(TorchDispatchMode):
    def __init__(self):
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_attend_is_one_operator_and_reads_nothing_on_the_host():
    qkv = tensors()
    prepared = prepare(MaskLayout.packed([2, 4]), *qkv)
    with Watch() as seen:
        prepared(*qkv)
    assert seen.names == ["polyattn_sdpa::forward"]


def test_a_backend_and_its_prepared_state_survive_pickle_and_deepcopy():
    qkv = tensors()
    prepared = prepare(MaskLayout.packed([2, 4]), *qkv)
    for again in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
        assert torch.equal(again(*qkv).output, prepared(*qkv).output)
    assert pickle.loads(pickle.dumps(SDPA)) is SDPA


@pytest.mark.parametrize("layout", [MaskLayout.causal(6), MaskLayout.packed([2, 4])], ids=["plain", "tiles"])
def test_transforms_and_second_derivatives_name_eager(layout):
    q, k, v = tensors(grad=True)
    prepared = prepare(layout, q, k, v)

    def output(q):
        return prepared(q, k, v).output

    with pytest.raises(NotImplementedError, match=r"'sdpa' has no second derivatives.*'eager'"):
        torch.autograd.grad(output(q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"'sdpa' takes no batched gradients .*'eager'"):
        torch.autograd.functional.jacobian(output, q, vectorize=True)
    with pytest.raises(NotImplementedError, match=r"torch.func transforms .*'eager'"):
        torch.func.grad(lambda q: output(q).sum())(q)
    with pytest.raises(NotImplementedError, match=r"'eager'"):
        torch.func.jvp(output, (q,), (q,))
