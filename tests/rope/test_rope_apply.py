"""apply_rotary: FP32 arithmetic, one rounding, the same bits on every path, a backward that saves only the tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyattn import (
    AttentionInputError,
    RopeSpec,
    RotaryEmbedding,
    RotaryTables,
    apply_rotary,
)
from polyattn.rope import rotate_heads

PATHS = {"short": 1 << 18, "pieces": 0}
PAIRINGS = [False, True]
PLAIN = RopeSpec(
    variant="default",
    theta=10000.0,
    head_dim=8,
    rotary_dim=8,
    interleaved=False,
    max_position=64,
    original_max_position=None,
    parameters={},
)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Both ways of rotating: at once, and in pieces of a single position."""
    from polyattn.rope import rotate

    monkeypatch.setattr(rotate, "_PIECE", {"cpu": PATHS[request.param]})
    return request.param


def tables(length=6, width=8, batch=1, scale=100.0):
    angles = torch.randn(batch, length, width // 2, generator=torch.Generator().manual_seed(1)) * scale
    return RotaryTables(angles.cos(), angles.sin())


def by_definition(x, made, interleaved):
    """``(x cos - y sin, y cos + x sin)`` for each pair, in FP32 (FP64 for FP64), rounded once."""
    width = 2 * made.cos.shape[-1]
    wide = x[..., :width].to(torch.promote_types(x.dtype, torch.float32))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    cos, sin = made.cos.unsqueeze(1).to(wide.dtype), made.sin.unsqueeze(1).to(wide.dtype)
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((both.to(x.dtype), x[..., width:]), -1)


@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("head_dim", "width"), [(8, 8), (128, 128), (16, 4), (80, 80), (7, 6), (2, 2)])
def test_it_rotates_to_the_bit_by_definition(path, interleaved, dtype, head_dim, width):
    q, k = torch.randn(2, 4, 6, head_dim).to(dtype), torch.randn(2, 1, 6, head_dim).to(dtype)
    made = tables(width=width, batch=2)
    for got, given in zip(apply_rotary(q, k, made, interleaved=interleaved), (q, k), strict=True):
        assert got.dtype is dtype
        assert torch.equal(got, by_definition(given, made, interleaved))


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_the_tail_of_a_partial_head_passes_through(path, interleaved):
    x = torch.randn(1, 2, 6, 16)
    rotated = rotate_heads(x, tables(width=4), interleaved=interleaved)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., 0, :], x[..., 0, :]) is False


def test_halves_and_adjacent_channels_are_different_pairs(path):
    x = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    quarter = RotaryTables(torch.tensor([[[0.0, 1, 1, 1]]]), torch.tensor([[[1.0, 0, 0, 0]]]))
    assert rotate_heads(x, quarter, interleaved=False).flatten().tolist() == [-5, 2, 3, 4, 1, 6, 7, 8]
    assert rotate_heads(x, quarter, interleaved=True).flatten().tolist() == [-2, 1, 3, 4, 5, 6, 7, 8]


LAYOUTS = {
    "projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every other": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "slice of a wider buffer": lambda x: torch.cat((x, x[..., :3]), -1)[..., :8],
    "expanded heads": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "expanded channels": lambda x: x[..., :1].expand(-1, -1, -1, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_any_strides_give_the_same_bits(path, interleaved, layout):
    x = LAYOUTS[layout](torch.randn(2, 3, 6, 8))
    assert torch.equal(
        rotate_heads(x, tables(), interleaved=interleaved), by_definition(x.contiguous(), tables(), interleaved)
    )


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_long_sequences_are_cut_into_pieces_without_a_trace(interleaved):
    x = torch.randn(1, 4, 1000, 128)
    made = tables(1000, 128)
    assert torch.equal(rotate_heads(x, made, interleaved=interleaved), by_definition(x, made, interleaved))


def test_the_layout_of_a_projection_is_kept(path):
    x = torch.randn(1, 6, 4, 8).transpose(1, 2)
    assert rotate_heads(x, tables(), interleaved=False).shape == x.shape
    if path == "pieces":
        assert rotate_heads(x, tables(), interleaved=False).stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (1, 4, 0, 8), (1, 0, 6, 8)])
def test_empty_tensors_stay_empty(path, shape):
    x = torch.empty(shape)
    assert rotate_heads(x, tables(shape[2]), interleaved=True).shape == shape


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_the_gradient_is_the_inverse_rotation(path, interleaved):
    x = torch.randn(1, 2, 6, 16, dtype=torch.float64, requires_grad=True)
    made, grad = tables(), torch.randn(1, 2, 6, 16, dtype=torch.float64)
    (got,) = torch.autograd.grad(rotate_heads(x, made, interleaved=interleaved), x, grad)
    assert torch.allclose(got, by_definition(grad, RotaryTables(made.cos, -made.sin), interleaved), atol=1e-12)


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_any_order_differentiates_in_both_modes(path, interleaved):
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    made = tables(3, 4)

    def rotate(x):
        return rotate_heads(x, made, interleaved=interleaved)

    assert torch.autograd.gradcheck(rotate, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x) ** 2, x)
    hessian = torch.func.hessian(lambda x: (rotate(x) ** 3).sum())(x.detach())
    assert hessian.shape == (*x.shape, *x.shape)


@pytest.mark.parametrize("asks", ["q", "k"])
def test_a_single_one_of_q_and_k_may_ask_for_its_gradient(path, asks):
    q, k = torch.randn(1, 2, 6, 8, requires_grad=asks == "q"), torch.randn(1, 2, 6, 8, requires_grad=asks == "k")
    rotated = apply_rotary(q, k, tables(), interleaved=False)
    assert [x.requires_grad for x in rotated] == [asks == "q", asks == "k"]
    sum(x.sum() for x in rotated).backward()


@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_tables_are_saved_for_the_backward(path, interleaved, dtype):
    made = tables(width=8)
    saved = []
    q, k = (torch.randn(1, heads, 6, 8, dtype=dtype, requires_grad=True) for heads in (4, 2))
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        apply_rotary(q, k, made, interleaved=interleaved)
    assert saved
    assert all(x.dtype is torch.float32 and x.numel() <= 6 * 8 for x in saved)  # a table has no heads
    if path == "pieces":
        assert len(saved) == 4  # q and k hold the same two
        assert len({x.data_ptr() for x in saved}) == 2


def test_all_layers_save_the_same_tables(path):
    embedding = RotaryEmbedding(PLAIN)
    shared, saved = embedding(torch.arange(6)[None]), set()
    x = torch.randn(1, 4, 6, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(x.data_ptr()) or x, lambda x: x):
        for _ in range(5):
            apply_rotary(x, x, shared, interleaved=False)
    assert len(saved) == 2


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_tables_with_other_angles_rotate_by_those(path, interleaved):
    """What an embedding prepares for its layers belongs to its own cosines and sines."""
    embedding = RotaryEmbedding(dataclasses.replace(PLAIN, interleaved=interleaved))
    first, second = embedding(torch.arange(6)[None]), embedding(torch.arange(100, 106)[None])
    assert first.channels is not None
    other = dataclasses.replace(first, cos=second.cos, sin=second.sin)
    x = torch.randn(1, 2, 6, 8)
    assert torch.equal(
        rotate_heads(x, other, interleaved=interleaved), rotate_heads(x, second, interleaved=interleaved)
    )


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_forward_mode_nests(path, interleaved):
    x, made = torch.randn(1, 1, 3, 6, dtype=torch.float64), tables(3, 4)

    def cubes(rotate):
        return torch.func.jacfwd(torch.func.jacfwd(lambda x: (rotate(x, made, interleaved) ** 3).sum()))(x)

    ours = cubes(lambda x, made, interleaved: rotate_heads(x, made, interleaved=interleaved))
    assert torch.allclose(ours, cubes(by_definition))


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_vmap_over_tensors_positions_or_both(path, interleaved):
    x, made = torch.randn(3, 2, 4, 6, 8), [tables(scale=scale) for scale in (1.0, 10.0, 100.0)]
    cos, sin = torch.stack([one.cos for one in made]), torch.stack([one.sin for one in made])

    def rotate(x, cos, sin):
        return rotate_heads(x, RotaryTables(cos, sin), interleaved=interleaved)

    both = torch.func.vmap(rotate)(x, cos, sin)
    assert torch.equal(both, torch.stack([by_definition(a, b, interleaved) for a, b in zip(x, made, strict=True)]))
    tensors = torch.func.vmap(rotate, in_dims=(1, None, None), out_dims=2)(x.transpose(0, 1), cos[1], sin[1])
    assert torch.equal(tensors.movedim(2, 0), torch.stack([by_definition(a, made[1], interleaved) for a in x]))
    positions = torch.func.vmap(rotate, in_dims=(None, 0, 0))(x[0], cos, sin)
    assert torch.equal(positions, torch.stack([by_definition(x[0], b, interleaved) for b in made]))


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_vmap_of_grad_is_the_gradient_of_each(path, interleaved):
    x, made = torch.randn(3, 1, 2, 6, 8), tables()
    gradient = torch.func.grad(lambda x: (rotate_heads(x, made, interleaved=interleaved) ** 3).sum())
    assert torch.allclose(torch.func.vmap(gradient)(x), torch.stack([gradient(one) for one in x]))


def test_it_runs_on_meta_under_autocast(path):
    made = RotaryTables(torch.empty(1, 6, 4, device="meta"), torch.empty(1, 6, 4, device="meta"))
    x = torch.empty(2, 3, 6, 8, device="meta", dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        q, k = apply_rotary(x, x[:, :1], made, interleaved=True)
    assert (q.device.type, q.dtype, q.shape, k.shape) == ("meta", torch.bfloat16, (2, 3, 6, 8), (2, 1, 6, 8))


def test_it_runs_in_a_fake_mode(path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 6, 8)
        q, _ = apply_rotary(x, x, RotaryTables(torch.empty(1, 6, 4), torch.empty(1, 6, 4)), interleaved=True)
    assert q.shape == (2, 3, 6, 8)


def test_autocast_changes_nothing(path):
    x, made = torch.randn(1, 2, 6, 8), tables()
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotate_heads(x, made, interleaved=False)
    assert inside.dtype is torch.float32
    assert torch.equal(inside, rotate_heads(x, made, interleaved=False))


X = torch.zeros(2, 3, 6, 8)
GOOD = tables()


@pytest.mark.parametrize(
    ("x", "made", "interleaved", "text"),
    [
        (X, RotaryTables(GOOD.cos.bfloat16(), GOOD.sin), False, "tables must be float32, got cos torch.bfloat16"),
        (
            X,
            RotaryTables(GOOD.cos, GOOD.sin.double()),
            False,
            "tables must be float32, got cos torch.float32 and sin torch",
        ),
        (X, tables(5), False, "got x torch.float32 [2, 3, 6, 8], cos [1, 5, 4] and sin [1, 5, 4]"),
        (X, tables(batch=3), False, "cos [3, 6, 4]"),
        (X, tables(width=10), False, "rotary_dim <= D, got x torch.float32 [2, 3, 6, 8], cos [1, 6, 5]"),
        (X, RotaryTables(GOOD.cos, GOOD.sin[:, :1]), False, "cos [1, 6, 4] and sin [1, 1, 4]"),
        (X, RotaryTables(GOOD.cos[0], GOOD.sin[0]), False, "cos [6, 4]"),
        (X, RotaryTables(GOOD.cos[..., :0], GOOD.sin[..., :0]), False, "cos [1, 6, 0]"),
        (X[0], GOOD, False, "x must be a floating tensor [B, H, S, D]"),
        (X.long(), GOOD, False, "x must be a floating tensor [B, H, S, D]"),
        (X.to("meta"), GOOD, False, "x and the tables must be on one device, got meta and cpu"),
        (X, RotaryTables(GOOD.cos.clone().requires_grad_(), GOOD.sin), False, "tables must not require grad"),
        (X, GOOD, None, "interleaved must be True or False, got None"),
        (X, GOOD, 1, "interleaved must be True or False, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(x, made, interleaved, text):
    with pytest.raises(AttentionInputError) as caught:
        rotate_heads(x, made, interleaved=interleaved)
    assert text in str(caught.value)


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_tables_for_the_other_pairing_are_refused(path, interleaved):
    made = RotaryEmbedding(dataclasses.replace(PLAIN, interleaved=interleaved))(torch.arange(6)[None])
    text = f"interleaved must be {interleaved}, the pairing that the tables were made for, got {not interleaved}; pass"
    for same in (made, dataclasses.replace(made, cos=made.cos + 0)):
        with pytest.raises(AttentionInputError, match=text):
            apply_rotary(X, X, same, interleaved=not interleaved)
        assert rotate_heads(X, same, interleaved=interleaved).shape == X.shape


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_tables_made_by_hand_serve_either_pairing(path, interleaved):
    x, made = torch.randn(1, 2, 6, 8), tables()
    assert made.interleaved is None
    assert torch.equal(rotate_heads(x, made, interleaved=interleaved), by_definition(x, made, interleaved))


def test_a_refusal_names_the_tensor():
    with pytest.raises(
        AttentionInputError, match=r"^k must be a floating tensor .* got k torch.float32 \[2, 3, 5, 8\]"
    ):
        apply_rotary(X, X[:, :, :5], GOOD, interleaved=False)


def test_tables_that_are_none_are_refused():
    for tables, got in ((None, "NoneType"), ((GOOD.cos, GOOD.sin), "tuple")):
        with pytest.raises(AttentionInputError, match=f"^tables must be RotaryTables, got {got}; RotaryEmbedding"):
            apply_rotary(X, X, tables, interleaved=False)


def test_the_pairing_has_no_default():
    with pytest.raises(TypeError, match="interleaved"):
        apply_rotary(X, X, GOOD)


def test_forward_mode_through_the_tables_of_long_sequences_is_refused(monkeypatch):
    from polyattn.rope import rotate

    monkeypatch.setattr(rotate, "_PIECE", {"cpu": 0})
    with pytest.raises(NotImplementedError, match="no derivative with respect to its tables"):
        torch.func.jvp(
            lambda cos: rotate_heads(X, RotaryTables(cos, GOOD.sin), interleaved=False), (GOOD.cos,), (GOOD.cos,)
        )
