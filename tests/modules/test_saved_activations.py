"""What a layer keeps for the backward: no more than transformers' sdpa path keeps, and linear in the length."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from polyattn import AttentionScope, AttentionSpec, GroupedQueryAttention, MaskLayout

LAYERS = {"llama": (LlamaConfig, LlamaAttention), "qwen3": (Qwen3Config, Qwen3Attention)}
WIDTH, HEAD = 128, 16


def kept(forwards, parameters):
    """Bytes that the last of ``forwards`` keeps beside parameters and what the ones before it keep already."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[-1] += storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    sizes = []
    for forward in forwards:
        sizes.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive.append(forward())
    return sizes[-1]


def pair(kind, dtype, length, layout):
    """Bytes of the peer and of ours, for the second of two equal layers of a forward."""
    config_class, peer_class = LAYERS[kind]
    config = config_class(
        hidden_size=WIDTH,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD,
        num_hidden_layers=1,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    peer = peer_class(config, 0).to(dtype)
    ours = GroupedQueryAttention.from_spec(AttentionSpec.from_hf(config), backend="sdpa").to(dtype)
    positions = torch.arange(length)[None]
    scope, mask = AttentionScope(layout), None if "packed" not in layout.describe() else layout.to_dense()
    tables = ours.rotary(positions)
    cos, sin = (torch.cat((table, table), -1).to(dtype) for table in (tables.cos, tables.sin))
    hidden = [torch.randn(1, length, WIDTH).to(dtype).requires_grad_() for _ in range(2)]
    of_peer = [lambda x=x: peer(x, position_embeddings=(cos, sin), attention_mask=mask)[0] for x in hidden]
    of_ours = [lambda x=x: ours(x, scope, positions) for x in hidden]
    return kept(of_peer, peer.parameters()), kept(of_ours, ours.parameters())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_a_layer_keeps_no_more_than_the_peers(kind, dtype, packed):
    layout = MaskLayout.packed([100, 156]) if packed else MaskLayout.causal(256)
    of_peer, of_ours = pair(kind, dtype, 256, layout)
    assert of_ours <= of_peer + 256  # the table of documents, a few dozen bytes


def test_the_norm_of_a_narrow_dtype_keeps_a_third_of_what_the_peers_does():
    of_peer, of_ours = pair("qwen3", torch.bfloat16, 256, MaskLayout.causal(256))
    without_norm = pair("llama", torch.bfloat16, 256, MaskLayout.causal(256))
    assert of_ours - without_norm[1] < (of_peer - without_norm[0]) / 2.5


def test_what_a_packed_layer_keeps_grows_with_the_length_not_with_its_square():
    short, long = (pair("llama", torch.float32, n, MaskLayout.packed([n // 4] * 4))[1] for n in (128, 512))
    assert long < 4.1 * short
