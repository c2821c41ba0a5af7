"""Latent attention at the widths of DeepSeek-V2-Lite against transformers' class on its sdpa, with the same weights.

    python benchmarks/bench_latent.py [--rounds 5] [--only NAME] [--json FILE]

FP32, hidden 2048, 16 heads, latent of 512, heads of 128 + 64 channels, values of 128. Rounds alternate between the
sides; ratios, peer over ours, of medians are what to quote.

* training: forward and backward of the whole layer, 16 packed documents in 4096 tokens;
* beyond the projections: the same less what the projections alone take on each side, measured in the same rounds;
* decoding: one new token over 2,000 cached ones.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import click
import torch
from pairs import against, report, seconds
from transformers import DeepseekV2Config
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding

from polyattn import AttentionScope, KVCache, LatentAttention, MaskLayout

LENGTH, DOCUMENTS, CACHED = 4096, 16, 2000


def sides():
    """Our layer and the peer's with the same weights, and the peer's rotary module."""
    config = DeepseekV2Config(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    peer = DeepseekV2Attention(config, 0)
    ours = LatentAttention.from_hf(config, backend="sdpa")
    ours.load_state_dict(peer.state_dict())
    return ours, peer, DeepseekV2RotaryEmbedding(config)


def projections(layer, hidden, grad):
    """The matrix products of a layer and their gradients, and nothing else."""
    q = layer.q_proj(hidden)
    latent = layer.kv_a_proj_with_mqa(hidden)
    both = layer.kv_b_proj(latent[..., :512])
    output = layer.o_proj(both[..., : 16 * 128])
    torch.autograd.grad(
        [q, latent, output], [hidden, *layer.parameters()], [grad[0], grad[1], grad[2]], allow_unused=True
    )


def training(rounds):
    ours, peer, rotary = sides()
    lengths = [LENGTH // DOCUMENTS] * DOCUMENTS
    hidden = torch.randn(1, LENGTH, 2048, requires_grad=True)
    weights = torch.randn(1, LENGTH, 2048)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    layout = MaskLayout.packed(lengths)
    mask = layout.to_dense()

    def our_step():
        output = ours(hidden, AttentionScope(layout), positions)
        torch.autograd.grad(output, [hidden, *ours.parameters()], weights)

    def peer_step():
        output = peer(hidden, attention_mask=mask, position_embeddings=rotary(hidden, positions))[0]
        torch.autograd.grad(output, [hidden, *peer.parameters()], weights)

    with torch.no_grad():
        one = ours(hidden, AttentionScope(layout), positions)
        two = peer(hidden, attention_mask=mask, position_embeddings=rotary(hidden, positions))[0]
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    grads = [torch.randn(1, LENGTH, width) for width in (16 * 192, 576, 2048)]
    timed = against(our_step, peer_step, rounds)
    alone = statistics.median(seconds(functools.partial(projections, ours, hidden, grads)) for _ in range(rounds))
    beyond = (timed["peer_s"] - alone) / (timed["ours_s"] - alone)
    return {
        **timed,
        "bar": ">= 3.5",
        "projections_s": alone,
        "what the projections allow": timed["peer_s"] / alone,
        "beyond the projections": beyond,
        "beyond, bar": ">= 6",
    }


@torch.no_grad()
def decoding(rounds):
    ours, peer, rotary = sides()
    prompt, token = torch.randn(1, CACHED, 2048), torch.randn(1, 1, 2048)
    cache = KVCache(ours.spec, 1, CACHED + 1)
    ours(prompt, AttentionScope(cache.layout(CACHED)), None, cache=cache)
    kept = DynamicCache()
    places = torch.arange(CACHED + 1)[None]
    mask = MaskLayout.causal(CACHED).to_dense()
    peer(prompt, attention_mask=mask, position_embeddings=rotary(prompt, places[:, :-1]), past_key_values=kept)

    def our_step():
        output = ours(token, AttentionScope(cache.layout(1)), None, cache=cache)
        cache.rollback(cache.lengths - 1)
        return output

    def peer_step():
        embedded = rotary(token, places[:, -1:])
        output = peer(token, attention_mask=None, position_embeddings=embedded, past_key_values=kept)[0]
        kept.crop(CACHED)
        return output

    torch.testing.assert_close(our_step(), peer_step(), rtol=1e-4, atol=1e-5)
    return against(our_step, peer_step, 20 * rounds) | {"bar": ">= 8"}


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="Run the benchmarks whose name contains this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(rounds, only, path):
    """Print how many times faster a latent layer is than the peer's, and the bars."""
    benches = {"training, 16 documents in 4096": training, "decoding over 2000 cached": decoding}
    report({name: functools.partial(bench, rounds) for name, bench in benches.items()}, only, path)


if __name__ == "__main__":
    main()
