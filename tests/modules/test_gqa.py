"""The attention layer: structure, sharing through the scope, and what it refuses."""

import copy
import pickle

import pytest
import torch

import polyattn
from polyattn import (
    AttentionInputError,
    AttentionScope,
    AttentionSpec,
    ConfigError,
    GroupedQueryAttention,
    MaskLayout,
    RopeSpec,
    UnsupportedAttentionError,
)
from polyattn_modules import QKNorm, RMSNorm


def rope(head_dim=8):
    return RopeSpec(
        variant="default",
        theta=10000.0,
        head_dim=head_dim,
        rotary_dim=head_dim,
        interleaved=False,
        max_position=64,
        original_max_position=64,
        parameters={},
    )


def layer(**options):
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "rope": rope(), "backend": "eager", **options}
    return GroupedQueryAttention(**fields)


def hidden_of(batch=2, length=6, width=32, seed=1):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


POSITIONS = torch.arange(6)[None]
NORMS = [None] + [
    QKNorm(position=p, scope=s, weighted=w, eps=1e-6)
    for p in ("before", "after")
    for s in ("head", "projection")
    for w in (True, False)
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_norm_and_head_count_gives_the_same_numbers_on_both_backends(norm, kv_heads):
    module = layer(num_kv_heads=kv_heads, qk_norm=norm, v_head_dim=5, bias=True, window=4)
    hidden = hidden_of()
    outputs = []
    for name in ("eager", "sdpa"):
        module.set_backend(name)
        outputs.append(module(hidden, AttentionScope(MaskLayout.packed([2, 4])), POSITIONS))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def by_definition(module, hidden, window):
    """The whole layer on one causal row, token by token and head by head."""
    spec, length = module.spec, hidden.shape[0]
    norm, tables = spec.qk_norm, module.rotary(torch.arange(length)[None])

    def normed(x, weight):
        unit = x / torch.sqrt(x.square().mean() + norm.eps)
        return unit * weight if norm.weighted else unit

    def of_heads(x, weight, heads):
        """``[heads, D]`` from ``[heads * D]``."""
        if norm.scope == "projection":
            return normed(x.reshape(-1), weight).view(heads, -1)
        return torch.stack([normed(head, weight) for head in x.view(heads, -1)])

    def rotated(x, token):
        first, second = x.chunk(2, -1)
        cos, sin = tables.cos[0, token].double(), tables.sin[0, token].double()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def of_token(projected, own_norm, token, heads):
        weight = own_norm.weight if norm is not None and norm.weighted else None
        x = projected[token].view(heads, -1)
        x = of_heads(x, weight, heads) if norm is not None and norm.position == "before" else x
        x = rotated(x, token)
        return of_heads(x, weight, heads) if norm is not None and norm.position == "after" else x

    groups, heads = spec.num_kv_heads, spec.num_heads
    q = [of_token(module.q_proj(hidden), module.q_norm, token, heads) for token in range(length)]
    k = [of_token(module.k_proj(hidden), module.k_norm, token, groups) for token in range(length)]
    v = module.v_proj(hidden).view(length, groups, -1)
    rows = []
    for query in range(length):
        keys, mixed = range(max(0, query - window + 1), query + 1), []
        for head in range(heads):
            group = head // (heads // groups)
            weights = torch.stack([q[query][head] @ k[key][group] * spec.head_dim**-0.5 for key in keys]).softmax(0)
            mixed.append(sum(weight * v[key, group] for weight, key in zip(weights, keys, strict=True)))
        rows.append(module.o_proj(torch.cat(mixed)))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_layer_is_what_the_conventions_say_it_is(backend, norm):
    module = layer(qk_norm=norm, v_head_dim=5, bias=True, output_bias=True, window=4, backend=backend).double()
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    hidden = hidden_of(1).double()
    got = module(hidden, AttentionScope(MaskLayout.causal(6)), POSITIONS)
    torch.testing.assert_close(got[0], by_definition(module, hidden[0], 4), rtol=1e-6, atol=1e-7)


def test_each_document_of_a_packed_row_equals_the_document_alone():
    module = layer(qk_norm=NORMS[1], backend="sdpa")
    hidden = hidden_of(1)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    packed = module(hidden, AttentionScope(MaskLayout.packed([2, 4])), positions)
    for start, stop in ((0, 2), (2, 6)):
        alone = module(
            hidden[:, start:stop], AttentionScope(MaskLayout.causal(stop - start)), positions[:, start:stop].clone()
        )
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-5, atol=1e-6)


def test_equal_layers_build_one_mask_and_one_table_whatever_their_number():
    layers = [layer() for _ in range(5)] + [layer(window=3)]
    scope = AttentionScope(MaskLayout.causal(6))
    for module in layers:
        module.fill(scope, hidden_of(), POSITIONS)
    assert scope.builds == {"attention": 2, "rotary": 1}
    for module in layers:
        module(hidden_of(), scope, POSITIONS)
    assert scope.builds == {"attention": 2, "rotary": 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients_and_builds_nothing_again(reentrant):
    module = layer(backend="sdpa")
    hidden = hidden_of().requires_grad_()
    scope = AttentionScope(MaskLayout.packed([2, 4]))
    module.fill(scope, hidden, POSITIONS)
    plain = module(hidden, scope, POSITIONS)
    want = torch.autograd.grad(plain.sin().sum(), [hidden, *module.parameters()])
    output = torch.utils.checkpoint.checkpoint(module, hidden, scope, POSITIONS, use_reentrant=reentrant)
    output.sin().sum().backward()
    got = [hidden.grad, *(p.grad for p in module.parameters())]
    assert scope.builds == {"attention": 1, "rotary": 1}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_context_keys_come_before_the_layers_own_and_have_their_own_positions():
    module = layer(qk_norm=NORMS[5])
    hidden, context = hidden_of(), hidden_of(length=3, seed=2)
    context_positions = torch.tensor([[4, 5, 6]])
    output = module(
        hidden, AttentionScope(MaskLayout.full(6, 9)), POSITIONS + 7, context, kv_positions=context_positions
    )
    whole = torch.cat([context, hidden], 1)
    positions = torch.cat([context_positions, POSITIONS + 7], 1)
    want = module(whole, AttentionScope(MaskLayout.full(9)), positions)[:, 3:]
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-6)


def test_a_context_layout_serves_only_layers_with_context():
    module = layer()
    scope = AttentionScope(MaskLayout.causal(6), context_layout=MaskLayout.full(6, 9))
    module(hidden_of(), scope, POSITIONS)
    module(hidden_of(), scope, POSITIONS, hidden_of(length=3), kv_positions=torch.arange(3)[None])
    assert scope.builds == {"attention": 2, "rotary": 2}


def test_bias_sinks_softcap_scale_and_lse_reach_the_backend():
    module = layer(sinks=True, softcap=3.0, scale=0.2)
    torch.nn.init.normal_(module.sinks.weight)
    bias = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(3))
    result = module(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS, attention_bias=bias, return_lse=True)
    assert result.lse.shape == (2, 4, 6)
    q, k = polyattn.apply_rotary(
        module.q_proj(hidden_of()).view(2, 6, 4, 8).transpose(1, 2),
        module.k_proj(hidden_of()).view(2, 6, 2, 8).transpose(1, 2),
        module.rotary(POSITIONS),
        interleaved=False,
    )
    v = module.v_proj(hidden_of()).view(2, 6, 2, 8).transpose(1, 2)
    want = polyattn.attention(
        q,
        k,
        v,
        MaskLayout.causal(6),
        backend="eager",
        softcap=3.0,
        scale=0.2,
        bias=bias,
        sinks=module.sinks.logits(),
        return_lse=True,
    )
    torch.testing.assert_close(result.lse, want.lse)
    torch.testing.assert_close(result.output, module.o_proj(want.output.transpose(1, 2).flatten(2)))


def test_dropout_acts_in_training_only():
    module = layer(dropout=0.5)
    scope = AttentionScope(MaskLayout.causal(6))
    assert not torch.equal(module(hidden_of(), scope, POSITIONS), module(hidden_of(), scope, POSITIONS))
    module.eval()
    assert torch.equal(module(hidden_of(), scope, POSITIONS), module(hidden_of(), scope, POSITIONS))


def test_a_layer_survives_deepcopy_pickle_and_a_state_dict():
    module = layer(qk_norm=NORMS[1], sinks=True, backend="sdpa")
    want = module(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.backend == module.backend
        assert torch.equal(other(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS), want)
    fresh = GroupedQueryAttention.from_spec(module.spec, backend="sdpa")
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS), want)


def test_a_layer_built_on_meta_is_whole_after_to_empty_and_reset():
    with torch.device("meta"):
        module = layer(qk_norm=NORMS[1], sinks=True, bias=True)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    module.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert (module.q_norm.weight == 1).all()
    assert torch.isfinite(module(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS)).all()


def test_fp32_norm_weights_train_under_autocast_without_a_warning():
    module = layer(qk_norm=NORMS[1], backend="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        output = module(hidden_of(), AttentionScope(MaskLayout.causal(6)), POSITIONS)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert torch.isfinite(module.q_norm.weight.grad).all()


def test_the_norm_rounds_once():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RMSNorm(16, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    assert torch.equal(norm(x), exact.bfloat16())


def test_the_spec_round_trips_and_requires_every_field():
    spec = layer(qk_norm=NORMS[1], window=4).spec
    data = spec.to_dict()
    assert AttentionSpec.from_dict(data) == spec
    for name in data:
        with pytest.raises(ConfigError, match=name):
            AttentionSpec.from_dict({key: value for key, value in data.items() if key != name})
    with pytest.raises(ConfigError, match=r"qk_norm\.eps is missing"):
        AttentionSpec.from_dict({**data, "qk_norm": {"position": "before", "scope": "head", "weighted": True}})
    with pytest.raises(ConfigError, match="extra is unknown"):
        AttentionSpec.from_dict({**data, "extra": 1})


@pytest.mark.parametrize(
    "options, text",
    [
        ({"hidden_size": 30, "rope": None}, "hidden_size must be a multiple of num_heads .* got hidden_size=30"),
        ({"num_kv_heads": 3}, "num_heads=4 and num_kv_heads=3"),
        ({"num_heads": "4"}, "num_heads must be an int from 1 to 2147483647, got '4'"),
        ({"hidden_size": None, "num_heads": 0}, "hidden_size must be an int .* got None; num_heads must be an int"),
        ({"rope": rope(16)}, "rope.head_dim must equal head_dim, got rope.head_dim=16 and head_dim=8"),
        ({"window": 0}, r"window must be an int >= 1, a pair \(left, right\) of ints >= 0 .* or None, got 0"),
        ({"dropout": 1.5}, r"dropout must be a number in \[0, 1\), got 1.5"),
        ({"softcap": -1.0}, "softcap must be a positive number or None, got -1.0"),
        ({"qk_norm": "head"}, "qk_norm must be a QKNorm or None, got 'head'"),
        ({"head_dim": 0, "rope": None}, "^head_dim must be an int from 1 to 2147483647, got 0$"),
        ({"fused_qkv": 3}, r"^fused_qkv must be True \(one matrix .* or False \(three\), got 3$"),
        ({"fused_qkv": "no"}, "fused_qkv must be .* got 'no'"),
        ({"dtype": "float32"}, "dtype must be one of torch.float64, .* or None, got 'float32'"),
        ({"dtype": torch.int32}, "dtype must be one of .* got torch.int32"),
        ({"device": "gpu"}, "device must be a torch.device, its name or None, got 'gpu'"),
        ({"device": "gpu", "fused_qkv": None}, "fused_qkv must be .* got None; device must be"),
    ],
)
def test_a_contradictory_structure_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        layer(**options)


def test_a_width_that_heads_do_not_divide_is_fine_with_a_head_width():
    module = layer(hidden_size=30, head_dim=8)
    assert module.q_proj.weight.shape == (32, 30)
    assert module.o_proj.weight.shape == (30, 32)


def test_a_norm_without_eps_is_refused():
    with pytest.raises(ConfigError, match=r"qk_norm\.eps must be a small positive number"):
        QKNorm(position="before", scope="head", weighted=True, eps=None)


def test_a_backend_that_cannot_serve_the_layer_is_refused_at_construction_with_all_reasons():
    with pytest.raises(UnsupportedAttentionError) as caught:
        layer(softcap=2.0, sinks=True, dropout=0.1, backend="sdpa")
    assert {reason.feature for reason in caught.value.reasons} == {"softcap", "sinks"}
    module = layer(softcap=2.0)
    with pytest.raises(UnsupportedAttentionError):
        module.set_backend("sdpa")
    assert module.backend.name == "eager"


@pytest.mark.parametrize(
    "call, text",
    [
        (
            {"hidden": torch.zeros(2, 6, 31)},
            r"hidden must be .* \[B, S, 32\], got torch.float32 \(2, 6, 31\)",
        ),
        (
            {"positions": torch.arange(5)[None]},
            r"positions must be .* \[B\|1, 6\] with B=2, got \(1, 5\)",
        ),
        ({"positions": torch.zeros(1, 6)}, r"positions must be an integer tensor \[B\|1, 6\], got torch.float32"),
        ({"positions": None}, "positions must be an integer tensor .* got NoneType"),
        ({"scope": AttentionScope(MaskLayout.causal(5))}, "q_len=6 and kv_len=6 for these hidden states, got q_len=5"),
        ({"scope": MaskLayout.causal(6)}, "scope must be an AttentionScope, got MaskLayout"),
        ({"kv_hidden": torch.zeros(2, 3, 32)}, "kv_len=9"),
        ({"kv_hidden": torch.zeros(1, 0, 32)}, "kv_hidden must have the batch of hidden, 2, got 1"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_before_any_product(call, text):
    arguments = {"hidden": hidden_of(), "scope": AttentionScope(MaskLayout.causal(6)), "positions": POSITIONS, **call}
    module = layer()
    module.q_proj.weight = None  # any matrix product would fail differently
    with pytest.raises(AttentionInputError, match=text):
        module(arguments.pop("hidden"), arguments.pop("scope"), arguments.pop("positions"), **arguments)
