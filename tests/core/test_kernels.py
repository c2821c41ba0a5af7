"""What kernels share: hidden rows and keys, sinks, the LSE's gradient, widths, and ops only where something watches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn import AttentionInputError, AttentionRequest, BackendBase, MaskLayout, attention
from polyattn.kernels import (
    finished,
    fully_masked_rows,
    hidden_in_blocks,
    missing_abilities,
    of_kv_heads,
    op_or_function,
    put_back,
    refuse_lse_gradient,
    shut_out,
    unseen_keys,
    with_lse_column,
    with_width,
    without,
)

NAN = float("nan")


def qkv(*, heads=4, kv_heads=2, length=6, width=8, v_width=8, grad=False):
    torch.manual_seed(0)
    shapes = ((1, heads, length, width), (1, kv_heads, length, width), (1, kv_heads, length, v_width))
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def test_rows_and_keys_are_none_where_the_host_knows_that_there_are_none():
    layout, request = MaskLayout.causal(6), AttentionRequest.of(*qkv())
    assert fully_masked_rows(layout, request) is None
    assert unseen_keys(layout, request) is None


def test_rows_and_keys_broadcast_to_q_and_to_k():
    seen = torch.ones(1, 4, 6, 6, dtype=torch.bool)
    seen[:, 1, 2] = False  # a row of one head
    seen[:, :2, :, 3] = False  # a key that the whole first group does not see
    seen[:, 2, :, 5] = False  # a key that the other head of its group sees
    layout, request = MaskLayout.dense(seen), AttentionRequest.of(*qkv())
    rows, keys = fully_masked_rows(layout, request), unseen_keys(layout, request)
    assert rows.shape == (1, 4, 6, 1)
    assert rows.nonzero().tolist() == [[0, 1, 2, 0]]
    assert keys.shape == (1, 2, 6, 1)
    assert keys.nonzero().tolist() == [[0, 0, 3, 0]]


def test_a_key_is_hidden_from_a_group_when_it_is_hidden_from_every_head_of_it():
    hidden = torch.tensor([[[True, True], [True, False]]])
    assert of_kv_heads(hidden, 1).tolist() == [[[True, False]]]
    assert of_kv_heads(hidden[:, :1], 2) is not None
    assert of_kv_heads(hidden[:, :1], 2).shape == (1, 1, 2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "active, hides",
    [([True] * 4 + [False] * 2, False), ([False] * 2 + [True] * 4, False), ([True, False] * 3, True), (None, False)],
)
def test_blocks_hide_what_takes_no_part_but_for_inactive_queries_between_active_ones(batch, active, hides):
    active = None if active is None else torch.tensor([active] * batch)
    layout = MaskLayout.causal(6, active_queries=active)
    rows, keys = hidden_in_blocks(layout, AttentionRequest.of(*(x.expand(batch, -1, -1, -1) for x in qkv())))
    assert (rows is not None) is hides
    assert (keys is not None) is hides
    if hides:
        assert torch.equal(rows.squeeze(-1), layout.rows_without_keys())
        assert torch.equal(keys.squeeze(-1), layout.unseen_keys())


def test_blocks_of_several_runs_hide_inactive_queries_between_active_ones():
    active = torch.tensor([[True] * 4 + [False, True]])
    for layout, hides in (
        (MaskLayout.tree([-1, 0, 0], [2, 2, 2]), False),
        (MaskLayout.tree([-1, 0, 0], [2, 2, 2], active_queries=active), True),
        (MaskLayout.tree([-1, 0, 0], [2, 2, 2], active_queries=active.flip(1).cummin(1).values), False),
    ):
        assert layout.max_runs == (1 if not hides and layout.active_queries is not None else 2)
        rows, keys = hidden_in_blocks(layout, AttentionRequest.of(*qkv()))
        assert (rows is not None) is hides
        if hides:
            assert torch.equal(rows.squeeze(-1), layout.rows_without_keys())
            assert torch.equal(keys.squeeze(-1), layout.unseen_keys())


def test_what_is_shut_out_may_hold_nan_and_has_a_gradient_of_exactly_zero():
    q, k, v = (x.detach() for x in qkv())
    q[:, :, 1], k[:, :, 2], v[:, :, 2] = NAN, NAN, NAN
    inputs = [x.requires_grad_() for x in (q, k, v)]
    rows, keys = torch.zeros(1, 1, 6, 1, dtype=torch.bool), torch.zeros(1, 1, 6, 1, dtype=torch.bool)
    rows[:, :, 1], keys[:, :, 2] = True, True
    sum(x.sum() * 2 for x in shut_out(*inputs, rows, keys)).backward()
    for x, hidden in zip(inputs, (rows, keys, keys), strict=True):
        assert torch.equal(x.grad, torch.where(hidden, 0.0, 2.0).expand_as(x))
    assert shut_out(*inputs, None, None) == (q, k, v)
    assert without(q, None) is q


def test_rows_are_put_back_as_zero_and_minus_infinity():
    rows = torch.tensor([True, False]).view(1, 1, 2, 1)
    output, lse = put_back(torch.full((1, 3, 2, 4), NAN), torch.zeros(1, 3, 2), rows)
    assert output[:, :, 0].eq(0).all()
    assert output[:, :, 1].isnan().all()
    assert lse[:, :, 0].isneginf().all()
    assert lse[:, :, 1].eq(0).all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_result_is_finished_as_the_backends_finish_it(backend):
    q, k, v = qkv(grad=True)
    sinks = torch.randn(4, requires_grad=True)
    layout = MaskLayout.causal(6, active_queries=torch.tensor([[True, False] * 3]))
    request = AttentionRequest.of(q, k, v, sinks=sinks, needs_lse=True, needs_lse_grad=True)
    part = attention(q, k, v, MaskLayout.causal(6), backend=backend, return_lse=True)
    mine = finished(part.output, part.lse, request, rows=fully_masked_rows(layout, request), sinks=sinks)
    whole = attention(q, k, v, layout, backend=backend, sinks=sinks, return_lse=True)
    torch.testing.assert_close(mine.output, whole.output)
    torch.testing.assert_close(mine.lse, whole.lse)
    weights = torch.randn_like(mine.output)
    grads = [torch.autograd.grad(x.output, (q, k, v, sinks), weights) for x in (mine, whole)]
    torch.testing.assert_close(*grads)
    assert finished(part.output, part.lse, AttentionRequest.of(q, k, v)).lse is None
    for needed in (request, AttentionRequest.of(q, k, v, needs_lse=True)):
        with pytest.raises(AttentionInputError, match=r"lse must be \[B, Hq, Q\] where the request needs it"):
            finished(part.output, None, needed, sinks=sinks if needed is request else None)


def test_a_gradient_that_was_not_prepared_for_is_refused_by_name():
    refuse_lse_gradient("mine", None, prepared=False)
    refuse_lse_gradient("mine", torch.ones(1), prepared=True)
    with pytest.raises(RuntimeError) as refusal:
        refuse_lse_gradient("mine", torch.ones(1), prepared=False)
    assert str(refusal.value) == (
        "backend 'mine': a gradient reached the LSE, but the request was made with needs_lse_grad=False; "
        "make it with needs_lse_grad=True, or detach the LSE"
    )


def test_the_lse_column_takes_the_gradient_of_the_lse_off_the_row_sums():
    grad, output, grad_lse = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.randn(2, 3)
    wide_grad, wide_output = with_lse_column(grad, output, grad_lse)
    assert wide_grad.shape == wide_output.shape == (2, 3, 6)
    torch.testing.assert_close((wide_grad * wide_output).sum(-1), (grad * output).sum(-1) - grad_lse)


@pytest.mark.parametrize("width", [3, 8])
def test_a_width_is_filled_with_zeros_and_the_last_dimension_is_contiguous(width):
    ordered = torch.randn(2, 4, 5, 3)
    for x in (ordered, ordered.to(memory_format=torch.channels_last), ordered.transpose(2, 3).mT):
        wide = with_width(x, width)
        assert wide.shape == (2, 4, 5, width)
        assert wide.stride(-1) == 1
        assert torch.equal(wide[..., :3], ordered)
        assert wide[..., 3:].eq(0).all()
    assert with_width(ordered, 3) is ordered


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("width, v_width", [(8, 16), (16, 8)])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_channels_last_tensors_of_unequal_widths_give_the_numbers_of_ordered_ones(backend, width, v_width, name):
    layout, results = MaskLayout.packed([4, 2]), []
    for order in (torch.contiguous_format, torch.channels_last):
        inputs = dict(zip("qkv", qkv(width=width, v_width=v_width), strict=True))
        inputs[name] = inputs[name].to(memory_format=order).requires_grad_()
        result = attention(*inputs.values(), layout, backend=backend, return_lse=True)
        loss = result.output.square().sum() + (0.0 if name == "v" else result.lse.sum())
        (grad,) = torch.autograd.grad(loss, inputs[name])
        results.append((result.output, result.lse, grad))
    torch.testing.assert_close(results[0], results[1])


def test_the_operator_is_taken_where_something_watches_and_the_function_elsewhere():
    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def op(x):
        return x + 1

    def function(x):
        return x - 1

    assert op_or_function(op, function, torch.ones(1)) is function
    assert op_or_function(op, function, torch.nn.Parameter(torch.ones(1))) is op
    with Watcher():
        assert op_or_function(op, function, torch.ones(1)) is op
    compiled = torch.compile(lambda x: op_or_function(op, function, x)(x), fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 2


def test_sinks_are_the_same_function_under_both_names():
    assert polyattn.apply_sinks is polyattn.kernels.apply_sinks


def test_abilities_and_hints_may_depend_on_the_device():
    class Forked(BackendBase):
        name, abilities = "forked", frozenset({"float32", "full", "causal", "lse"})

        def abilities_on(self, device):
            return self.abilities - {"lse"} if device.type == "cpu" else self.abilities

        def hint(self, feature, device):
            return f"on {device} only without {feature}"

    request, layout = AttentionRequest.of(*qkv(kv_heads=4), needs_lse=True), MaskLayout.causal(6)
    (reason,) = Forked().unsupported(layout, request)
    assert str(reason) == (
        "lse: got needs_lse=True, need a backend with the ability 'lse', which 'forked' does not have; "
        "on cpu only without lse"
    )
    assert missing_abilities("forked", Forked.abilities, layout, request) == ()
