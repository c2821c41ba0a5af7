"""Weights of transformers models in our layers give the logits of those models."""

import copy
import dataclasses

import pytest
import torch

from families import FAMILIES, VOCABULARY, OnOurs, model_of
from polyattn import AttentionSpec, ConfigError, GroupedQueryAttention, MaskLayout, UnsupportedAttentionError

pytestmark = pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
BACKENDS = ["eager", "sdpa", "flex_attention"]
LENGTH = 12


def ids_of(rows, seed=0):
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


#: Every family on sdpa, and a few that differ most on every backend; sdpa has no softcap.
PAIRS = [(family, "eager" if family == "gemma2" else "sdpa") for family in sorted(FAMILIES)]
PAIRS += [
    (family, backend) for family in ("llama", "gemma3_text", "gpt_oss") for backend in BACKENDS if backend != "sdpa"
]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    return request.param


@pytest.fixture
def family(pair):
    return pair[0]


@pytest.fixture
def ours(pair):
    return OnOurs(*pair, {"flex_attention": {"compiled": False}}.get(pair[1]))


def test_a_softcap_is_refused_by_a_backend_without_one():
    with pytest.raises(UnsupportedAttentionError, match=r"softcap 5\.0"):
        OnOurs("gemma2", "sdpa", None)


@torch.no_grad()
def test_causal_logits_are_those_of_the_peer(family, ours):
    ids = ids_of(2)
    want = model_of(family)(input_ids=ids, use_cache=False).logits
    got = ours(ids, MaskLayout.causal(LENGTH), torch.arange(LENGTH)[None])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_logits_are_those_of_the_peer_on_each_document_alone(family, ours):
    ids, lengths = ids_of(1), [3, 7, 2]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    want = torch.cat([model_of(family)(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    got = ours(ids, MaskLayout.packed(lengths), positions)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits_are_those_of_the_peer_at_real_tokens(family, ours, side):
    ids, lengths = ids_of(2), [7, LENGTH]
    valid = torch.stack([(torch.arange(LENGTH) < n) for n in lengths])
    valid = valid.flip(1) if side == "left" else valid
    want = model_of(family)(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits
    got = ours(ids, MaskLayout.padded(valid), torch.arange(LENGTH)[None])
    torch.testing.assert_close(got[valid], want[valid], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_token_that_sees_nothing_gets_zero_from_ours_and_the_mean_of_all_values_from_the_peer():
    ids = ids_of(1)
    valid = torch.arange(LENGTH)[None] >= 4
    peer, ours = copy.deepcopy(model_of("qwen3")), OnOurs("qwen3", "sdpa")
    peer.set_attn_implementation("eager")
    seen = []
    for model in (peer, ours.model):
        attention = model.model.layers[0].self_attn
        attention.register_forward_hook(lambda module, args, output: seen.append(output[0][~valid]))
    peer(input_ids=ids, attention_mask=valid.long(), use_cache=False)
    ours(ids, MaskLayout.padded(valid), torch.arange(LENGTH)[None])
    of_peer, of_ours = seen
    assert not of_ours.any()
    assert of_peer.abs().amin(1).min() > 0


def test_weights_are_not_loaded_into_a_layer_of_another_structure():
    peer = model_of("llama")
    spec = AttentionSpec.from_hf(peer.config, layer=0)
    other = dataclasses.replace(
        spec, scale=3.0, window=2, dropout=0.25, rope=dataclasses.replace(spec.rope, interleaved=True)
    )
    layer = GroupedQueryAttention.from_spec(other, backend="sdpa")
    text = (
        r"the layer must be as .* layer 0, got window 2 instead of None; .*scale 3.0 .*; rope.interleaved True instead"
    )
    with pytest.raises(ConfigError, match=text):
        layer.load_hf_weights(peer.state_dict(), peer.config, layer=0)
    same = dataclasses.replace(spec, scale=spec.head_dim**-0.5, dropout=0.25)
    GroupedQueryAttention.from_spec(same, backend="sdpa").load_hf_weights(peer.state_dict(), peer.config, layer=0)
