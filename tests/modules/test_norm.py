"""The norm: one rounding, FP32 inside, and gradients that keep no copies."""

import pytest
import torch
from torch import nn

from polyattn_modules import RMSNorm

WIDTH = 16


def norm_of(dtype=torch.float32, **options):
    norm = RMSNorm(WIDTH, eps=1e-6, **options)
    if norm.weight is not None:
        nn.init.normal_(norm.weight, mean=1.0, std=0.3, generator=torch.Generator().manual_seed(1))
    return norm.to(dtype)


def input_of(dtype, seed=0):
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_definition(x, weight):
    x = x.double()
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return unit if weight is None else unit * weight.double()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_result_is_the_exact_one_rounded_once(dtype, weighted):
    norm, x = norm_of(dtype, weighted=weighted), input_of(dtype)
    assert torch.equal(norm(x), by_definition(x, norm.weight).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_results_are_torchs_own(dtype):
    norm, x = norm_of(dtype), input_of(dtype)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (WIDTH,), norm.weight, 1e-6))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_those_of_the_definition(dtype, weighted):
    norm, x = norm_of(dtype, weighted=weighted), input_of(dtype).requires_grad_()
    grad = input_of(dtype, seed=2)
    norm(x).backward(grad)
    exact_x, exact_weight = x.detach().double().requires_grad_(), None
    if weighted:
        exact_weight = norm.weight.detach().double().requires_grad_()
    by_definition(exact_x, exact_weight).backward(grad.double())
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=tolerance, atol=tolerance)
    if weighted:
        torch.testing.assert_close(norm.weight.grad.double(), exact_weight.grad, rtol=tolerance, atol=8 * tolerance)


def test_fp32_weights_beside_bf16_inputs_need_no_warning_and_get_fp32_gradients():
    norm, x = norm_of(), input_of(torch.bfloat16).requires_grad_()
    output = norm(x)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert norm.weight.grad.dtype is torch.float32
    assert x.grad.dtype is torch.bfloat16


def test_a_narrow_norm_keeps_its_input_and_nothing_else_for_the_backward():
    norm, x = norm_of(torch.bfloat16), input_of(torch.bfloat16).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), norm.weight.data_ptr()]


def test_a_frozen_weight_gets_no_gradient():
    norm, x = norm_of(torch.bfloat16).requires_grad_(False), input_of(torch.bfloat16).requires_grad_()
    norm(x).float().sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None


def test_second_derivatives_and_transforms_work_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float32):
        norm, x = norm_of(dtype), input_of(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(norm(x).float().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.float().square().sum(), x)
        wide = norm_of(dtype).double()
        exact = x.detach().double().requires_grad_()
        (exact_grad,) = torch.autograd.grad(wide(exact).square().sum(), exact, create_graph=True)
        (exact_second,) = torch.autograd.grad(exact_grad.square().sum(), exact)
        scale = exact_second.abs().max()
        assert (second.double() - exact_second).abs().max() < 20 * torch.finfo(dtype).eps * scale
        tangent = torch.func.jvp(norm, (x.detach(),), (torch.ones_like(x),))[1]
        assert tangent.dtype is dtype
        assert torch.func.vmap(norm)(x.detach()).shape == x.shape


def test_it_compiles_whole():
    norm, x = norm_of(torch.bfloat16), input_of(torch.bfloat16).requires_grad_()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), norm(x))
    compiled(x).float().sum().backward()


def test_empty_inputs_have_empty_outputs():
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(0, 5, WIDTH, dtype=dtype, requires_grad=True)
        norm_of(dtype)(x).sum().backward()
        assert x.grad.shape == x.shape
