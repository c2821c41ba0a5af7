"""Compiled and exported: one graph for all lengths, and the rounding of the compiled legacy rotation."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyattn import RopeSpec, RotaryEmbedding, RotaryTables, apply_rotary

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler on the CPU"
)


def spec(interleaved=False, **fields):
    standard = {
        "variant": "default",
        "theta": 10000.0,
        "head_dim": 16,
        "rotary_dim": 16,
        "max_position": 4096,
        "original_max_position": None,
        "parameters": {},
    }
    return RopeSpec(interleaved=interleaved, **{**standard, **fields})


class Rope(torch.nn.Module):
    """What a model does: tables from positions, then the rotation."""

    def __init__(self, spec):
        super().__init__()
        self.embedding = RotaryEmbedding(spec)

    def forward(self, q, k, positions, length=None):
        tables = self.embedding(positions, length=length)
        return apply_rotary(q, k, tables, interleaved=self.embedding.spec.interleaved)


def inputs(size, grad=False):
    q, k = (torch.randn(2, heads, size, 16, requires_grad=grad) for heads in (4, 2))
    return q, k, torch.arange(size)[None]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_pairing_of_the_tables_is_checked_in_a_graph():
    embedding = RotaryEmbedding(spec(interleaved=True))

    @torch.compile(fullgraph=True, backend="eager")
    def rotated(q, k, positions, interleaved):
        return apply_rotary(q, k, embedding(positions), interleaved=interleaved)

    rotated(*inputs(5), interleaved=True)
    with pytest.raises(Exception, match="interleaved must be True, the pairing that the tables were made for"):
        rotated(*inputs(5), interleaved=False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_changing_lengths_need_two_graphs_and_give_the_eager_bits(interleaved):
    model, counter = Rope(spec(interleaved)), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for size in (5, 17, 33, 64, 100):
        for got, want in zip(compiled(*inputs(size)), model(*inputs(size)), strict=True):
            assert got.shape == want.shape
        given = inputs(size)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*given), model(*given), strict=True))
    assert counter.frame_count <= 2


def test_eager_calls_in_between_cause_no_new_graph():
    model, counter = Rope(spec()), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        compiled(*inputs(8))
        model(*inputs(8))
        model.to(torch.bfloat16)
    assert counter.frame_count == 1


def test_frequencies_are_constants_of_the_graph_and_no_cache_entry():
    model = Rope(spec())
    torch.compile(model, fullgraph=True, backend="eager")(*inputs(8))
    assert not model.embedding._copies


def test_the_side_of_longrope_is_one_graph_each():
    lists = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "switch": "length"}
    model = Rope(spec(variant="longrope", original_max_position=16, parameters=lists))
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (8, 9, 10, 16, 17, 18, 4000):
        given = inputs(8)
        assert torch.equal(compiled(*given, length=length)[0], model(*given, length=length)[0])
    assert counter.frame_count <= 3  # a first length, other short ones, long ones


@pytest.mark.parametrize("layout", ["interleaved", "ernie"])
def test_multi_axis_positions_compile(layout):
    model = Rope(spec(True, axes={"sections": [4, 2, 2], "layout": layout}))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    q, k, _ = inputs(8)
    positions = torch.randint(0, 1000, (3, 2, 8))
    assert torch.equal(compiled(q, k, positions)[0], model(q, k, positions)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports_with_a_dynamic_length(strict):
    model, size = Rope(spec()), torch.export.Dim("size", min=2, max=4096)
    program = torch.export.export(model, inputs(8), dynamic_shapes=({2: size}, {2: size}, {1: size}), strict=strict)
    given = inputs(13)
    assert torch.equal(program.module()(*given)[0], model(*given)[0])
    assert not model.embedding._copies or all(type(x) is torch.Tensor for x in model.embedding._copies.values())


def test_tables_may_leave_a_compiled_function():
    embedding = RotaryEmbedding(spec())
    tables = torch.compile(embedding, fullgraph=True, backend="eager")(torch.tensor([[3]]))
    assert isinstance(tables, RotaryTables)
    assert torch.equal(tables.cos, embedding(torch.tensor([[3]])).cos)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_inductor_rotates_and_differentiates_with_the_eager_bits(interleaved):
    angles = torch.randn(1, 40, 8) * 100
    tables = angles.cos(), angles.sin()

    def rotate(q, k, cos, sin):
        return apply_rotary(q, k, RotaryTables(cos, sin), interleaved=interleaved)

    compiled = torch.compile(rotate, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for function in (rotate, compiled):
            torch.manual_seed(0)
            q, k = (torch.randn(2, heads, 40, 16).to(dtype).requires_grad_() for heads in (4, 2))
            rotated = function(q, k, *tables)
            gradients = torch.autograd.grad(rotated, (q, k), [torch.randn_like(x) for x in rotated])
            results.append((*rotated, *gradients))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
@pytest.mark.slow
def test_compiled_tables_are_within_two_ulp_of_eager_ones():
    """inductor has cosines and sines of its own."""
    embedding = RotaryEmbedding(spec())
    positions = torch.arange(4096)[None]
    got, want = torch.compile(embedding, fullgraph=True)(positions), embedding(positions)
    for a, b in ((got.cos, want.cos), (got.sin, want.sin)):
        assert (a - b).abs().max() <= 2.4e-7


@needs_compiler
@pytest.mark.slow
def test_the_compiled_legacy_rotation_in_bfloat16_rounds_as_ours_does():
    """``q * cos + rotate_half(q) * sin`` under inductor, tables rounded to bfloat16: every element equal.

    The eager legacy rotation rounds three times and differs in about a third of the elements.
    """

    def legacy(q, cos, sin):
        a, b = q.chunk(2, -1)
        return q * cos + torch.cat((-b, a), -1) * sin

    angles = torch.randn(1, 1, 64, 32) * 1000
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    q = torch.randn(4, 4, 64, 64).bfloat16()
    wide = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    ours, _ = apply_rotary(q, q, RotaryTables(cos[0].float(), sin[0].float()), interleaved=False)
    assert torch.equal(torch.compile(legacy, fullgraph=True)(q, *wide), ours)
    assert 0.25 < (legacy(q, *wide) != ours).float().mean() < 0.4
