"""Decoding from caches gives what the full forward gives, whatever was rolled back or reordered."""

import dataclasses
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cache_schedules import BOUNDS, KINDS, ROPES, Schedule, rope
from polyattn import (
    AttentionInputError,
    AttentionScope,
    ConfigError,
    GroupedQueryAttention,
    KVCache,
    LayoutError,
    MaskLayout,
)

WINDOWS = {"static": (None, 4), "growing": (None, 4), "sliding": (1, 4)}
CASES = [
    (backend, kind, window, group) for backend in ("eager", "sdpa") for kind in KINDS for window in WINDOWS[kind]
    for group in (1, 2, 4)
]  # fmt: skip


@pytest.mark.parametrize(("backend", "kind", "window", "group"), CASES)
def test_decoding_equals_the_full_forward(backend, kind, window, group):
    for variant in ROPES:
        assert Schedule(backend, kind, window, group, variant).worst() < 1e-12


@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("seed", range(24))
def test_random_schedules_equal_the_full_forward(seed):
    assert Schedule.drawn(seed, tuple(BOUNDS)).fits()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize("backend", BOUNDS)
def test_five_hundred_random_schedules_equal_the_full_forward(backend):
    assert [seed for seed in range(500) if not Schedule.drawn(seed, (backend,)).fits()] == []


def make(window=None, group=2, backend="sdpa", **rest):
    return GroupedQueryAttention(32, 4, 4 // group, 8, rope=rope("default"), window=window, backend=backend, **rest)


@torch.no_grad()
def step(layer, cache, hidden):
    count = hidden.shape[1]
    return layer(hidden, AttentionScope(cache.layout(count)), cache.positions(count), cache=cache)


def full(layer, hidden):
    with torch.no_grad():
        return layer(hidden, AttentionScope(MaskLayout.causal(hidden.shape[1])), torch.arange(hidden.shape[1])[None])


def test_the_layers_of_a_model_share_their_rows_and_advance_together():
    layers = [make(), make(window=4), make()]
    caches = KVCache.for_layers([layer.spec for layer in layers], 2, 16)
    scope, positions = AttentionScope(caches[0].layout(3)), caches[0].positions(3)
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        for layer, cache in zip(layers, caches, strict=True):
            assert cache.lengths.tolist() == [0, 0]
            hidden = layer(hidden, scope, positions, cache=cache)
    assert [cache.lengths.tolist() for cache in caches] == [[3, 3]] * 3
    assert scope.builds == {"attention": 2, "rotary": 1}
    caches[1].rollback(torch.tensor([3, 1]))
    assert caches[2].lengths.tolist() == [3, 1]
    assert caches[0].positions(2).tolist() == [[3, 4], [1, 2]]


def test_a_hybrid_model_slides_where_it_has_windows_and_names_its_layouts():
    specs = [make(window=4, layout="sliding").spec, make(layout="full").spec]
    caches = KVCache.for_layers(specs, 1, 32, kind="sliding", max_new=2)
    assert [(cache.kind, cache.capacity) for cache in caches] == [("sliding", 5), ("static", 32)]
    layers = [GroupedQueryAttention.from_spec(spec, backend="sdpa") for spec in specs]
    hidden = torch.randn(1, 12, 32)
    want = hidden
    names = {name: MaskLayout.causal(12) for name in ("sliding", "full")}
    with torch.no_grad():
        for layer in layers:
            want = layer(want, AttentionScope(names), torch.arange(12)[None])
        for start in range(0, 12, 2):
            scope = AttentionScope({"sliding": caches[0].layout(2), "full": caches[1].layout(2)})
            got = hidden[:, start : start + 2]
            for layer, cache in zip(layers, caches, strict=True):
                got = layer(got, scope, caches[0].positions(2), cache=cache)
            torch.testing.assert_close(got, want[:, start : start + 2])


@pytest.mark.parametrize("packed", [False, True])
def test_prompts_of_unequal_lengths_need_no_padding_afterwards(packed):
    layer, lengths = make(), torch.tensor([5, 2])
    cache = KVCache(layer.spec, 2, 16)
    hidden = torch.randn(2, 9, 32)
    if packed:
        tokens = torch.cat([hidden[0, :5], hidden[1, :2]])[None]
        with torch.no_grad():
            keys, values = layer.keys_values(tokens, torch.tensor([[0, 1, 2, 3, 4, 0, 1]]))
            cache.append_packed(keys, values, torch.tensor([0, 5, 7]))
    else:
        step(layer, cache, hidden[:, :5])
        cache.rollback(lengths)
    assert torch.equal(cache.lengths, lengths)
    at = lengths[:, None] + torch.arange(3)
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(step(layer, cache, hidden[rows, at]), full(layer, hidden)[rows, at])


def test_a_cache_that_was_reset_begins_anew_and_one_that_was_copied_goes_its_own_way():
    layer, hidden = make(), torch.randn(1, 6, 32)
    cache = KVCache(layer.spec, 1, kind="growing")
    first = step(layer, cache, hidden)
    twin = pickle.loads(pickle.dumps(cache))
    cache.reset()
    assert cache.lengths.tolist() == [0]
    assert not cache.keys.any()
    torch.testing.assert_close(step(layer, cache, hidden), first)
    assert twin.lengths.tolist() == [6]
    assert cache.to("cpu") is cache


def test_it_serves_a_layer_of_many_sizes_under_inference_mode():
    with torch.inference_mode():
        layer = make()
        cache = KVCache(layer.spec, 1, 8)
        step(layer, cache, torch.randn(1, 2, 32))
    step(layer, cache, torch.randn(1, 2, 32))
    assert cache.lengths.tolist() == [4]


def test_no_key_is_copied_and_none_repeated():
    layer = make(group=4)
    cache = KVCache(layer.spec, 1, 4096)
    step(layer, cache, torch.randn(1, 3, 32))
    hidden, scope = torch.randn(1, 1, 32), AttentionScope(cache.layout(1))
    with torch.no_grad():
        layer.fill(scope, hidden, None, cache=cache)
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(hidden, scope, None, cache=cache)
    keys = cache.keys.nbytes
    assert max(event.self_cpu_memory_usage for event in profile.events()) < keys / 4


def test_a_graph_takes_lengths_as_an_input_and_one_serves_every_step():
    layer = make()
    cache, twin = (KVCache(layer.spec, 2, 1200) for _ in range(2))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda hidden: step(layer, cache, hidden), fullgraph=True, backend=count)
    for i in range(30):
        hidden = torch.randn(2, 1, 32)
        torch.testing.assert_close(compiled(hidden), step(layer, twin, hidden))
        if i == 10:
            for one in (cache, twin):
                one.rollback(torch.tensor([4, 11]))
    assert len(graphs) == 1
    assert any(node.op == "placeholder" for node in graphs[0].graph.nodes)


@pytest.mark.nightly
def test_a_thousand_steps_take_at_most_two_graphs():
    layer = make()
    cache = KVCache(layer.spec, 1, 1100)
    counter = CompileCounter()
    compiled = torch.compile(lambda hidden: step(layer, cache, hidden), fullgraph=True, backend=counter)
    compiled(torch.randn(1, 7, 32))
    for _ in range(1000):
        compiled(torch.randn(1, 1, 32))
    assert counter.frame_count <= 2
    assert cache.lengths.tolist() == [1007]


SPEC = make(window=4).spec


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"spec": 3}, "spec must be an AttentionSpec, such as layer.spec, got 3"),
        ({"batch": 0}, "batch must be an int >= 1, got 0"),
        ({"capacity": None}, "capacity must be given for a static cache"),
        ({"kind": "paged"}, "kind must be one of static, sliding, growing, got 'paged'"),
        ({"kind": "sliding"}, "capacity of a sliding cache must not be given: it is window - 1 + max("),
        (
            {"spec": make().spec, "kind": "sliding", "capacity": None},
            "kind must be static or growing for a layer without a window, got sliding",
        ),
        ({"max_new": 0}, "max_new must be an int >= 1, got 0"),
        ({"max_rollback": -1}, "max_rollback must be an int >= 0, got -1"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(arguments, text):
    with pytest.raises(ConfigError) as error:
        KVCache(**{"spec": SPEC, "batch": 1, "capacity": 8, **arguments})
    assert text in str(error.value)


def test_more_than_a_cache_takes_is_refused_before_any_work():
    layer, hidden = make(window=4), torch.randn(1, 6, 32)
    ring = KVCache(layer.spec, 1, kind="sliding", max_new=3, max_rollback=2)
    assert ring.capacity == 6
    with pytest.raises(AttentionInputError, match=r"made with max_new=3 takes so many new tokens at once, got 6"):
        step(layer, ring, hidden)
    for _ in range(3):
        step(layer, ring, hidden[:, :3])
    ring.rollback(torch.tensor([8]))
    with pytest.raises(AttentionInputError, match=r"goes back 2 tokens \(max_rollback\) behind the furthest"):
        ring.rollback(torch.tensor([6]))
    with pytest.raises(AttentionInputError, match="rollback must keep 0 to all tokens"):
        ring.rollback(torch.tensor([9]))
    short = KVCache(layer.spec, 1, 4)
    with pytest.raises(AttentionInputError, match="got 6 new ones after 0 in a cache of 4 slots"):
        step(layer, short, hidden)
    assert short.lengths.tolist() == [0]


def test_a_layout_or_positions_that_are_not_the_caches_are_refused():
    layer, hidden = make(), torch.randn(1, 1, 32)
    cache = KVCache(layer.spec, 1, 8)
    late = cache.layout(1)
    step(layer, cache, hidden)
    own = AttentionScope(MaskLayout.cached(torch.tensor([2]), 1, 8))
    with torch.no_grad():
        for scope in (AttentionScope(late), own, AttentionScope(MaskLayout.causal(1, 8))):
            with pytest.raises(AttentionInputError, match=r"must be that of the cache, cache.layout\(1\), made anew"):
                layer(hidden, scope, None, cache=cache)
        with pytest.raises(AttentionInputError, match=r"positions must be those of the cache, cache.positions\(1\)"):
            layer(hidden, AttentionScope(cache.layout(1)), torch.tensor([[0]]), cache=cache)


def test_a_cache_takes_no_gradients_and_keys_of_its_own_shape():
    layer, hidden = make(), torch.randn(1, 1, 32)
    cache = KVCache(layer.spec, 1, 8)
    with pytest.raises(AttentionInputError, match=r"takes no gradients: call under torch.no_grad\(\)"):
        layer(hidden, AttentionScope(cache.layout(1)), None, cache=cache)
    keys, values = layer.keys_values(hidden, torch.tensor([[0]]))
    with pytest.raises(AttentionInputError, match="keys must not need gradients in a cache"):
        cache.append(keys, values)
    with pytest.raises(AttentionInputError, match=r"keys must be \[1, 2, 1, 8\] of torch.float32 on cpu"):
        cache.append(keys.detach().half(), values.detach())
    wide = KVCache(make(group=1).spec, 2, 8)
    with pytest.raises(AttentionInputError, match="with num_kv_heads=2, got 4; the cache must have the batch") as error:
        step(layer, wide, hidden)
    assert "got 2 rows" in str(error.value)


def test_a_layer_that_appends_twice_in_one_call_is_named():
    specs = [make().spec] * 2
    caches = KVCache.for_layers(specs, 1, 8)
    keys = torch.randn(1, 2, 1, 8)
    caches[0].append(keys, keys)
    with pytest.raises(AttentionInputError, match="cache of layer 0 has the tokens of this call already, and those of"):
        caches[0].append(keys, keys)
    caches[0].rollback(caches[0].lengths)
    caches[0].append(keys, keys)
    caches[1].append(keys, keys)
    assert caches[0].lengths.tolist() == [1]


def test_a_rotary_rule_that_depends_on_the_length_has_one_length_for_the_life_of_a_cache():
    cache = KVCache(SPEC, 1, 8)
    cache.hold_length(16)
    cache.hold_length(16)
    with pytest.raises(AttentionInputError, match="must stay 16 while a cache is used"):
        cache.hold_length(32)
    cache.reset()
    cache.hold_length(32)


def test_a_name_that_the_scope_has_not_is_an_error_naming_both():
    hidden, positions = torch.randn(1, 3, 32), torch.arange(3)[None]
    named = GroupedQueryAttention.from_spec(dataclasses.replace(make().spec, layout="slide"), backend="sdpa")
    scope = AttentionScope({"full": MaskLayout.causal(3), "sliding": MaskLayout.causal(3)})
    with pytest.raises(
        LayoutError, match="got the name 'slide' in the layer's spec and a scope that has 'full', 'sliding'"
    ):
        named(hidden, scope, positions)
    with pytest.raises(LayoutError, match="got no name in the layer's spec and a scope that has 'full', 'sliding'"):
        make()(hidden, scope, positions)
    with pytest.raises(LayoutError, match="a scope that has one without a name"):
        named(hidden, AttentionScope(MaskLayout.causal(3)), positions)
