"""Keys that a layer does not project again: those of earlier steps, and those of another layer."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from cache_schedules import rope
from polyattn import (
    AttentionInputError,
    AttentionScope,
    GroupedQueryAttention,
    KVCache,
    LayoutError,
    MaskLayout,
    QKNorm,
)

PAGE = Path(__file__).parents[2] / "docs" / "caches.md"
NORMS = [
    None,
    QKNorm(position="before", scope="head", weighted=True, eps=1e-6),
    QKNorm(position="after", scope="projection", weighted=True, eps=1e-6),
]


def make(norm=None, window=None, *, fused=False, backend="sdpa", **rest):
    rest = {"rope": rope("default"), "qk_norm": norm, "window": window, "dtype": torch.float64, **rest}
    return GroupedQueryAttention(32, 4, 2, 8, fused_qkv=fused, backend=backend, **rest)


def positions(start, stop):
    return torch.arange(start, stop)[None]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=["bare", "early", "late"])
@pytest.mark.parametrize("window", [None, 3])
def test_past_keys_give_the_same_values_and_gradients_as_projecting_all_again(norm, window, fused):
    layer = make(norm, window, fused=fused)
    hidden = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    whole = layer(hidden, AttentionScope(MaskLayout.causal(7)), positions(0, 7))[:, 4:]
    past = layer.keys_values(hidden[:, :4], positions(0, 4))
    scope = AttentionScope(MaskLayout.causal(3, 7))
    late = layer(hidden[:, 4:], scope, positions(4, 7), past=past, kv_positions=positions(0, 4))
    torch.testing.assert_close(late, whole)
    leaves = (hidden, *layer.parameters())
    grad = torch.randn_like(whole)
    for got, want in zip(
        torch.autograd.grad(late, leaves, grad), torch.autograd.grad(whole, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=["bare", "early", "late"])
def test_given_keys_stand_instead_of_the_layers_own_which_are_not_computed(norm, fused):
    layer = make(norm, fused=fused)
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    scope = AttentionScope(MaskLayout.causal(5))
    pair = layer.keys_values(hidden, positions(0, 5))
    want = layer(hidden, scope, positions(0, 5))
    if not fused:
        layer.k_proj = None  # a layer with shared keys does without
    torch.testing.assert_close(layer(hidden, scope, positions(0, 5), keys_values=pair), want)


@pytest.mark.parametrize("given", ["past", "keys_values"])
def test_a_window_counts_the_positions_that_are_given_and_not_the_indices(given):
    layer = make(window=5)
    before, own = torch.randn(1, 4, 32, dtype=torch.float64), torch.randn(1, 1, 32, dtype=torch.float64)
    at, own_at = torch.tensor([[0, 2, 3, 5]]), torch.tensor([[6]])
    pair = layer.keys_values(before, at)
    visible = torch.tensor([[False, True, True, True, True]])
    every, kept = MaskLayout.dense(torch.ones(1, 5, dtype=torch.bool)), MaskLayout.dense(visible)
    if given == "keys_values":
        mine = layer.keys_values(own, own_at)
        pair, at = tuple(torch.cat(x, 2) for x in zip(pair, mine, strict=True)), torch.cat([at, own_at], 1)
    plain = make()
    plain.load_state_dict(layer.state_dict())
    got = layer(own, AttentionScope(every), own_at, **{given: pair}, kv_positions=at)
    torch.testing.assert_close(got, plain(own, AttentionScope(kept), own_at, **{given: pair}))


def test_a_window_over_keys_that_stand_nowhere_is_refused():
    layer = make(window=5)
    hidden = torch.randn(1, 2, 32, dtype=torch.float64)
    past = layer.keys_values(hidden, positions(0, 2))
    scope = AttentionScope(MaskLayout.dense(torch.ones(2, 4, dtype=torch.bool)))
    with pytest.raises((LayoutError, AttentionInputError), match="kv_positions"):
        layer(hidden, scope, positions(2, 4), past=past)


def test_the_steps_of_a_draft_project_their_keys_once_under_a_union():
    """Token i of step s sees the first step up to i, and token i of each later one up to s."""
    layer, steps, length = make(), 3, 6
    hidden = [torch.randn(1, length, 32, dtype=torch.float64) for _ in range(steps)]
    diagonal = MaskLayout.full(length).with_window(1).to_dense()
    keys: list = []
    for step, own in enumerate(hidden):
        mask = torch.cat([MaskLayout.causal(length).to_dense(), *[diagonal] * step], 3)
        scope = AttentionScope(MaskLayout.dense(mask))
        past = tuple(torch.cat(parts, 2) for parts in zip(*keys, strict=True)) if keys else None
        got = layer(own, scope, positions(step, step + length), past=past)
        keys.append(layer.keys_values(own, positions(step, step + length)))
        every = torch.cat(hidden[: step + 1], 1)
        at = torch.cat([positions(s, s + length) for s in range(step + 1)], 1)
        wide = torch.ones(1, 1, every.shape[1], every.shape[1], dtype=torch.bool)
        wide[:, :, -length:] = mask
        torch.testing.assert_close(got, layer(every, AttentionScope(MaskLayout.dense(wide)), at)[:, -length:])


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_may_read_another_width_than_it_gives(fused):
    layer = make(input_size=64, fused=fused)
    assert layer.spec.input_size == 64
    hidden = torch.randn(1, 3, 64, dtype=torch.float64)
    scope = AttentionScope(MaskLayout.causal(3))
    assert layer(hidden, scope, positions(0, 3)).shape == (1, 3, 32)
    assert GroupedQueryAttention.from_spec(type(layer.spec).from_dict(layer.spec.to_dict())).spec == layer.spec
    with pytest.raises(AttentionInputError, match=r"hidden must be a floating tensor \[B, S, 64\]"):
        layer(hidden[..., :32], scope, positions(0, 3))
    with pytest.raises(AttentionInputError, match=r"hidden must be a floating tensor \[B, S, 64\]"):
        layer.keys_values(hidden[..., :32], positions(0, 3))


def test_two_sources_of_keys_are_an_error_and_so_are_keys_of_another_shape():
    layer = make()
    hidden, scope = torch.randn(1, 2, 32, dtype=torch.float64), AttentionScope(MaskLayout.causal(2))
    pair = layer.keys_values(hidden, positions(0, 2))
    cache = KVCache(layer.spec, 1, 8, dtype=torch.float64)
    sources = {"kv_hidden": hidden, "past": pair, "keys_values": pair, "cache": cache}
    for name, value in sources.items():
        for other, second in sources.items():
            if other != name:
                with pytest.raises(AttentionInputError, match="at most one of kv_hidden, past, keys_values, cache"):
                    layer(hidden, scope, positions(0, 2), **{name: value, other: second})
    with pytest.raises(AttentionInputError, match=r"past must be a pair of tensors \(keys, values\)"):
        layer(hidden, scope, positions(0, 2), past=hidden)
    with pytest.raises(
        AttentionInputError, match=r"the values of past must be \[1, 2, K, 8\] of torch.float64"
    ) as error:
        layer(hidden, scope, positions(0, 2), past=(pair[0], pair[1].float()))
    assert "kv_len=4 for these hidden states, got q_len=2 and kv_len=2" in str(error.value)
    with pytest.raises(AttentionInputError, match="cache must be a KVCache, got int"):
        layer(hidden, scope, positions(0, 2), cache=3)


def test_the_examples_of_the_page_run_as_shown():
    examples = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    said = []
    test = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.attempted > 10
    assert not result.failed, "".join(said)
