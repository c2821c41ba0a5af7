"""The backend fa on stand-ins for its kernels: what it calls them with, and what it makes of what they return."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fa_stand_in import stand_in
from polyattn import AttentionRequest, AttentionScope, MaskLayout, StructuredMask, attention, backends, merge
from polyattn_conformance.checks.host_reads import forbid_host_reads
from polyattn_conformance.reference import reference_attention
from polyattn_fa2 import FlashBackend, FlashOptions, _ops, providers
from polyattn_fa2.providers.base import ABILITIES

LOW = torch.bfloat16
PROVIDERS = ("flash_attn", "torch_varlen")


@pytest.fixture
def calls():
    with stand_in() as calls:
        yield calls


@pytest.fixture(params=PROVIDERS)
def provider(request):
    with stand_in(request.param):
        yield request.param


def qkv(q_len=8, kv_len=None, *, batch=1, heads=2, kv_heads=2, width=8, v_width=None, grad=False, dtype=LOW):
    kv_len, v_width = kv_len or q_len, v_width or width
    generator = torch.Generator().manual_seed(q_len * 100 + width)
    shapes = ((batch, heads, q_len, width), (batch, kv_heads, kv_len, width), (batch, kv_heads, kv_len, v_width))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def both_ways(length, window):
    return MaskLayout(length, length, 1, 1, visibility=StructuredMask(window=window))


def close(got, want, factor=4):
    assert torch.allclose(got.double(), want, rtol=factor * 2**-8, atol=factor * 2**-8), (
        (got.double() - want).abs().max()
    )


# What the kernels are called with


@pytest.mark.parametrize(
    "layout, window, causal",
    [
        (MaskLayout.full(8), (-1, -1), False),
        (MaskLayout.causal(8), (-1, 0), True),
        (MaskLayout.causal(8, window=3), (2, 0), True),
        (both_ways(8, 3), (2, 2), False),
        (MaskLayout.packed([3, 5]), (-1, 0), True),
        (MaskLayout.packed([3, 5], window=2), (1, 0), True),
        (MaskLayout.packed([3, 5], causal=False), (-1, -1), False),
        (MaskLayout.causal(8, window=8), (-1, 0), True),
        (MaskLayout.causal(8, window=2**40), (-1, 0), True),
        (MaskLayout.packed([3, 5], window=6), (-1, 0), True),
    ],
)
def test_a_window_of_w_keys_is_passed_as_the_distance_w_minus_1(calls, layout, window, causal):
    attention(*qkv(), layout, backend="fa")
    (call,) = calls.forward
    assert (call["window_size_left"], call["window_size_right"]) == window
    assert call["causal"] is causal


@pytest.mark.parametrize(
    "layout, window",
    [
        (MaskLayout.causal(8), (-1, 0)),
        (MaskLayout.causal(8, window=3), (2, 0)),
        (both_ways(8, 3), (2, 2)),
        (MaskLayout.full(8), (8, 8)),
    ],
)
def test_torch_gets_its_own_signs_for_causality_and_never_the_one_that_lets_it_pick_cudnn(layout, window):
    with stand_in("torch_varlen") as calls:
        attention(*qkv(), layout, backend=FlashBackend(FlashOptions("torch_varlen")))
    assert calls.forward[0]["window_size"] == window


def test_offsets_are_the_documents_that_were_given_as_int32_and_lengths_are_host_numbers(calls):
    attention(*qkv(9), MaskLayout.packed([3, 2, 4]), backend="fa")
    (call,) = calls.forward
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert call[name].dtype is torch.int32
        assert call[name].tolist() == [0, 3, 5, 9]
    assert [type(call[name]) for name in ("max_seqlen_q", "max_seqlen_k")] == [int, int]
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (4, 4)


def test_batch_rows_of_one_kind_go_to_the_kernel_as_they_are(calls):
    q, k, v = qkv(batch=3)
    for layout in (MaskLayout.full(8), MaskLayout.causal(8), MaskLayout.causal(8, window=3)):
        attention(q, k, v, layout, backend="fa")
    assert [call["cu_seqlens_q"] for call in calls.forward] == [None] * 3
    assert calls.forward[0]["q"].shape == (3, 8, 2, 8)
    assert calls.forward[0]["q"].data_ptr() == q.data_ptr(), "q was copied"


def test_padding_never_reaches_the_kernel(calls):
    valid = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False] * 6 + [True] * 2])
    attention(*qkv(batch=3), MaskLayout.padded(valid, active_queries=valid), backend="fa")
    (call,) = calls.forward
    assert call["q"].shape == (15, 2, 8)
    assert call["k"].shape == (15, 2, 8)
    assert call["cu_seqlens_q"].tolist() == [0, 8, 13, 15]


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.packed([1, 3, 1, 1, 2]),
        MaskLayout.packed([1, 5, 2], window=2),
        MaskLayout.chunked(3, 8),
        MaskLayout.prefix_lm([8], 8),
        MaskLayout.padded(lengths=[8, 5], kv_len=8, causal=False),
        MaskLayout.causal(8, window=3).select_queries(slice(2, 6)),
    ],
    ids=lambda layout: layout.describe(),
)
def test_a_layout_is_one_kernel_call_forward_and_one_backward(calls, layout):
    q, k, v = qkv(layout.q_len, layout.kv_len, batch=layout.batch, grad=True)
    attention(q, k, v, layout, backend="fa").output.sum().backward()
    assert (len(calls.forward), len(calls.backward)) == (1, 1)


@pytest.mark.parametrize(
    "layout, count",
    [
        (MaskLayout.prefix_lm([4], 8), 2),
        (MaskLayout.padded(lengths=[8, 5], kv_len=8), 2),
        (MaskLayout.padded(lengths=[8, 5, 4], kv_len=8, window=4), 2),
        (MaskLayout.prefix_lm([4], 8).with_window(3), 2),
    ],
    ids=lambda x: x.describe() if isinstance(x, MaskLayout) else None,
)
def test_queries_that_reach_differently_take_one_more_call(calls, layout, count):
    q, k, v = qkv(layout.q_len, batch=layout.batch)
    got = attention(q, k, v, layout, backend="fa")
    assert len(calls.forward) == count
    close(got.output, reference_attention(q, k, v, layout.to_dense())[0])


def test_nothing_is_called_for_nothing(calls):
    for layout in (
        MaskLayout.full(0, 4),
        MaskLayout.full(4, 0),
        MaskLayout.padded(torch.zeros(1, 4, dtype=torch.bool)),
    ):
        q, k, v = torch.ones(1, 2, layout.q_len, 8, dtype=LOW), *torch.ones(2, 1, 2, layout.kv_len, 8, dtype=LOW)
        result = attention(q, k, v, layout, backend="fa", return_lse=True)
        assert not result.output.any()
        assert result.lse.isneginf().all()
    assert calls.forward == []


def test_kv_heads_are_not_repeated(calls):
    attention(*qkv(heads=6, kv_heads=2), MaskLayout.causal(8), backend="fa")
    assert calls.forward[0]["k"].shape[2] == 2


@pytest.mark.parametrize(
    "widths, padded", [((8, 8), 8), ((7, 5), 8), ((16, 24), 24), ((64, 32), 64), ((250, 256), 256)]
)
def test_widths_are_padded_to_one_multiple_of_eight_and_cropped(calls, widths, padded):
    q, k, v = qkv(width=widths[0], v_width=widths[1])
    result = attention(q, k, v, MaskLayout.packed([5, 3]), backend="fa")
    assert calls.forward[0]["q"].shape[-1] == calls.forward[0]["v"].shape[-1] == padded
    assert result.output.shape[-1] == widths[1]
    close(result.output, reference_attention(q, k, v, MaskLayout.packed([5, 3]).to_dense())[0])


@pytest.mark.parametrize(
    "widths, lse, padded", [((8, 8), False, 8), ((8, 8), True, 16), ((8, 5), True, 8), ((64, 64), True, 72)]
)
def test_the_lse_gradient_takes_a_spare_column_or_eight_more(calls, widths, lse, padded):
    q, k, v = qkv(width=widths[0], v_width=widths[1], grad=True)
    result = attention(q, k, v, MaskLayout.causal(8), backend="fa", return_lse=lse)
    (result.output.sum() + (result.lse.sum() if lse else 0)).backward()
    assert calls.forward[0]["q"].shape[-1] == -(-max(widths) // 8) * 8, "the forward pays nothing"
    assert calls.backward[0]["q"].shape[-1] == padded


def test_dropout_acts_in_training_only(calls):
    for training in (False, True):
        attention(*qkv(), MaskLayout.causal(8), backend="fa", dropout_p=0.25, training=training)
    assert [call["dropout_p"] for call in calls.forward] == [0.0, 0.25]


def test_softcap_and_scale_are_passed_on(calls):
    attention(*qkv(), MaskLayout.causal(8), backend="fa", softcap=30.0, scale=0.5)
    attention(*qkv(), MaskLayout.causal(8), backend="fa")
    assert [(call["softcap"], call["softmax_scale"]) for call in calls.forward] == [(30.0, 0.5), (0.0, 8**-0.5)]


def test_a_deterministic_backward_is_asked_for_by_the_option_or_by_torch(calls):
    q, k, v = qkv(grad=True)
    for backend in ("fa", FlashBackend(FlashOptions(deterministic=True))):
        attention(q, k, v, MaskLayout.causal(8), backend=backend).output.sum().backward()
    request = AttentionRequest.of(q, k, v, deterministic=True)
    backends.get("fa").prepare(MaskLayout.causal(8), request)(q, k, v).output.sum().backward()
    assert [call["deterministic"] for call in calls.backward] == [False, True, True]


# What is made of what they return


@pytest.mark.parametrize("uncovered", [MaskLayout.causal(8, active_queries=torch.tensor([[True] * 5 + [False] * 3])),
                                       MaskLayout.padded(lengths=[3], kv_len=8, causal=False)],
                         ids=["queries", "keys"])  # fmt: skip
def test_garbage_outside_every_sequence_becomes_zero(provider, uncovered):
    q, k, v = qkv(grad=True)
    result = attention(q, k, v, uncovered, backend=FlashBackend(FlashOptions(provider)), return_lse=True)
    live = ~uncovered.rows_without_keys()[0, 0]
    result.output.sum().backward()
    assert not result.output[:, :, ~live].any()
    assert result.lse[:, :, ~live].isneginf().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, :, ~live].any()
    unseen = uncovered.unseen_keys()[0, 0]
    assert not k.grad[:, :, unseen].any()
    assert not v.grad[:, :, unseen].any()


def test_inactive_queries_inside_a_sequence_give_and_take_nothing(provider):
    layout = MaskLayout.causal(8, active_queries=torch.tensor([[True, False, True, False, True, True, False, True]]))
    masked = layout.rows_without_keys()[0, 0]
    tensors = qkv(grad=True)
    poisoned = [x.detach().clone().requires_grad_() for x in tensors]
    with torch.no_grad():
        poisoned[0][:, :, masked] = torch.nan
    outputs = []
    for q, k, v in (tensors, poisoned):
        result = attention(q, k, v, layout, backend=FlashBackend(FlashOptions(provider)), return_lse=True)
        weight = torch.where(masked[:, None], torch.nan, 1.0).to(LOW)
        torch.autograd.backward(
            [result.output, result.lse], [weight.expand_as(result.output), weight.mT.float().expand(1, 2, 8)]
        )
        outputs.append((result.output, q.grad, k.grad, v.grad))
    for plain, other in zip(*outputs, strict=True):
        assert torch.equal(plain, other)
        assert other.isfinite().all()


def test_a_part_whose_last_query_sees_later_keys_gives_what_the_whole_gives(provider):
    # Every query takes part, with fillers behind them: the kernels put the last query on the last key.
    backend, whole = FlashBackend(FlashOptions(provider)), both_ways(8, 3)
    q, k, v = qkv(grad=True)
    of_whole = attention(q, k, v, whole, backend=backend, return_lse=True)
    part = attention(q[:, :, :4], k, v, whole.select_queries(slice(0, 4)), backend=backend, return_lse=True)
    close(part.output, of_whole.output[:, :, :4].double(), factor=1)
    close(part.lse, of_whole.lse[:, :, :4].double(), factor=1)
    grads = [
        torch.autograd.grad([x.output[:, :, :4].sum(), x.lse[:, :, :4].sum()], [q, k, v]) for x in (part, of_whole)
    ]
    for got, want in zip(*grads, strict=True):
        close(got, want.double(), factor=1)


@pytest.mark.parametrize("layout", [MaskLayout.causal(8), MaskLayout.packed([3, 5]), MaskLayout.causal(8, 3)],
                         ids=["fixed", "sequences", "fully_masked_rows"])  # fmt: skip
def test_the_lse_is_a_natural_logarithm_per_head_and_query_and_minus_infinity_where_nothing_is_seen(provider, layout):
    q, k, v = qkv(layout.q_len, layout.kv_len, batch=2, heads=4)
    lse = attention(q, k, v, layout, backend=FlashBackend(FlashOptions(provider)), return_lse=True).lse
    assert (lse.shape, lse.dtype) == ((2, 4, 8), torch.float32)
    want = reference_attention(q, k, v, layout.to_dense())[1]
    assert torch.equal(lse.isneginf(), want.isneginf())
    close(lse.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0), factor=0.1)


def test_a_part_that_sees_nothing_is_inert_in_a_merge(provider):
    q, k, v = qkv()
    backend = FlashBackend(FlashOptions(provider))
    whole = attention(q, k, v, MaskLayout.full(8), backend=backend, return_lse=True)
    nothing = attention(
        q, k, v, MaskLayout.padded(torch.zeros(1, 8, dtype=torch.bool)), backend=backend, return_lse=True
    )
    assert torch.equal(merge([whole, nothing]).output, whole.output)


def test_an_lse_whose_gradient_was_not_asked_for_raises_by_name_and_does_not_disturb_the_output(provider):
    backend = FlashBackend(FlashOptions(provider))
    q, k, v = qkv(grad=True)
    prepared = backend.prepare(MaskLayout.causal(8), AttentionRequest.of(q, k, v, needs_lse=True))
    for loss in (lambda r: r.lse.sum(), lambda r: r.lse.sum() + r.output.sum()):
        with pytest.raises(RuntimeError, match=r"'fa'.*needs_lse_grad=True"):
            loss(prepared(q, k, v)).backward()
    prepared(q, k, v).output.sum().backward()
    with_lse = q.grad.clone()
    q.grad = None
    attention(q, k, v, MaskLayout.causal(8), backend=backend).output.sum().backward()
    assert torch.equal(q.grad, with_lse)


def test_holes_between_keys_close_where_no_distance_is_compared(provider):
    valid = torch.tensor([[True, False, True, True, False, False, True, False], [False] * 8, [False] * 7 + [True]])
    active = torch.tensor([[True] * 8, [True] * 8, [False, True] * 4])
    layout = MaskLayout.padded(valid, causal=False, active_queries=active)
    q, k, v = qkv(batch=3, grad=True)
    result = attention(q, k, v, layout, backend=FlashBackend(FlashOptions(provider)))
    want, _ = reference_attention(q, k, v, layout.to_dense())
    close(result.output, want)
    for got, exact in zip(torch.autograd.grad(result.output.sum(), (q, k, v)),
                          torch.autograd.grad(want.sum(), (q, k, v)), strict=True):  # fmt: skip
        close(got, exact.double())


# How it runs


def test_fp32_under_autocast_reaches_the_kernel_in_the_autocast_dtype(calls):
    q, k, v = qkv(dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=LOW):
        result = attention(q, k.double().float(), v.to(LOW), MaskLayout.causal(8), backend="fa")
    assert [calls.forward[0][name].dtype for name in "qkv"] == [LOW] * 3
    assert result.output.dtype is LOW
    result.output.sum().backward()
    assert q.grad.dtype is torch.float32


def test_twelve_layers_of_one_forward_prepare_once_and_call_the_kernel_once_each(calls):
    q, k, v = qkv(grad=True)
    scope = AttentionScope(MaskLayout.packed([3, 5]))
    for _ in range(12):
        q = scope.prepare(backends.get("fa"), AttentionRequest.of(q, k, v))(q, k, v).output
    assert scope.builds["attention"] == 1
    assert len(calls.forward) == 12
    q.sum().backward()
    assert len(calls.backward) == 12


@pytest.mark.parametrize("layout", [MaskLayout.causal(8), MaskLayout.packed([3, 5]), MaskLayout.prefix_lm([3], 8),
                                    MaskLayout.padded(lengths=[6], kv_len=8, window=3)],
                         ids=["fixed", "sequences", "two_calls", "fillers"])  # fmt: skip
def test_attend_reads_no_tensor_between_its_kernel_calls(monkeypatch, calls, layout):
    class Blind:
        """A kernel that computes nothing, so that whatever is read is read by the backend."""

        fixed, devices = True, ("cpu",)

        def forward(self, q, k, v, call):
            return (
                torch.zeros_like(q),
                q.new_zeros(q.shape[:-1], dtype=torch.float32).mT,
                torch.zeros(2, dtype=torch.int64),
            )

        def backward(self, grad, q, k, v, output, lse, rng_state, call):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    q, k, v = qkv(grad=True)
    prepared = backends.get("fa").prepare(layout, AttentionRequest.of(q, k, v, needs_lse=True, needs_lse_grad=True))
    monkeypatch.setattr(_ops.providers, "get", lambda name: Blind())
    monkeypatch.setattr(_ops, "op_or_function", lambda op, function, x: function)
    with forbid_host_reads("attend"):
        result = prepared(q, k, v)
        torch.autograd.grad([result.output, result.lse], (q, k, v), [result.output.detach(), result.lse.detach()])


@pytest.mark.parametrize("layout", [MaskLayout.causal(8), MaskLayout.packed([3, 5]), MaskLayout.prefix_lm([3], 8)],
                         ids=["fixed", "sequences", "two_calls"])  # fmt: skip
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_compiled_layer_is_one_graph_with_the_same_numbers(calls, layout, dropout_p):
    q, k, v = qkv(heads=4, grad=True)
    request = AttentionRequest.of(
        q, k, v, needs_lse=True, needs_lse_grad=True, dropout_p=dropout_p, training=True, softcap=None
    )
    prepared = backends.get("fa").prepare(layout, request)

    def layer(q, k, v):
        result = prepared(q * 1.0, k, v)
        return result.output * 2, result.lse

    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        output, lse = call(q, k, v)
        results.append([output, lse, *torch.autograd.grad(output.float().sum() + lse.sum(), (q, k, v))])
    torch.compiler.reset()
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_compiled_inference_is_one_graph_with_the_same_numbers(provider, grad_mode):
    q, k, v = qkv(heads=4)
    prepared = backends.get("fa").prepare(MaskLayout.packed([3, 5]), AttentionRequest.of(q, k, v, needs_lse=True))
    with torch.set_grad_enabled(grad_mode):
        got = torch.compile(prepared, fullgraph=True, backend="aot_eager")(q, k, v)
        want = prepared(q, k, v)
    torch.compiler.reset()
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.packed([3, 5]),
        MaskLayout.padded(lengths=[6], kv_len=8, window=3),
        MaskLayout.padded(torch.tensor([[True, False, True] * 2 + [True, False]]), causal=False),
        MaskLayout.causal(8, active_queries=torch.tensor([[True, False] * 4])),
    ],
    ids=["packed", "fillers", "holes", "inactive"],
)
def test_a_whole_model_is_one_graph_that_prepares_inside(calls, layout):
    fa = backends.get("fa")

    def model(q, k, v):
        scope = AttentionScope(layout)
        prepared = scope.prepare(fa, AttentionRequest.of(q, k, v))
        return prepared(q * 1.0, k, v).output

    q, k, v = qkv(grad=True)
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        output = call(q, k, v)
        results.append([output, *torch.autograd.grad(output.float().sum(), (q, k, v))])
    torch.compiler.reset()
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_torch_has_the_functions_that_are_called():
    provider = providers.TorchVarlen()
    if problem := provider.version_problem(provider.load()):
        pytest.skip(f"refused: {problem}")
    call = providers.KernelCall(
        0.5, (-1, 0), 0.0, 0.0, False, *torch.zeros(2, 3, dtype=torch.int32, device="meta"), 4, 4
    )
    q, k, v = torch.zeros(3, 8, 2, 16, dtype=LOW, device="meta")
    output, lse, rng_state = provider.forward(q, k, v, call)
    assert (output.shape, lse.shape) == ((8, 2, 16), (2, 8))
    grads = provider.backward(output, q, k, v, output, lse, rng_state, call)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_a_configured_backend_is_a_value():
    backend = backends.resolve("fa", {"provider": "torch_varlen", "deterministic": True})
    assert backend == FlashBackend(FlashOptions("torch_varlen", deterministic=True)) != backends.get("fa")
    for twin in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert twin == backend
        assert hash(twin) == hash(backend)


def test_prepared_state_says_what_will_run(calls):
    request = AttentionRequest.of(*qkv())
    backend = backends.get("fa")
    texts = {
        backend.describe(backend.prepare(layout, request))
        for layout in (MaskLayout.causal(8), MaskLayout.packed([3, 5]), MaskLayout.prefix_lm([3], 8))
    }
    assert texts == {
        "flash_attn 2.8.3, one call on the batch as it is",
        "flash_attn 2.8.3, 2 sequences in 1 call",
        "flash_attn 2.8.3, 2 sequences in 2 calls",
    }


def test_the_provider_without_dropout_softcap_and_key_lengths_does_not_declare_them():
    with stand_in("torch_varlen"):
        assert backends.resolve("fa", {"provider": "torch_varlen"}).abilities == ABILITIES - {
            "dropout",
            "softcap",
            "kv_lengths",
        }
    with stand_in("flash_attn"):
        assert backends.get("fa").abilities == ABILITIES
