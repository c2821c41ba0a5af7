"""Decoding with our caches against the same weights in transformers with its caches and ``attn_implementation="sdpa"``.

    python benchmarks/bench_decode.py [--rounds 60] [--compiled] [--only growing] [--json FILE]

12 layers, hidden 512, 8 query heads over 2 KV heads, FP32, caches of 2,048 slots, one new token a step. Everything but
attention is the peer's own modules on both sides; steps of the two sides alternate, and the median ratio is what to
quote. ``ratio`` is the peer's time by ours; ``share`` is ours by the peer's.

* static: one row, half of the slots used, against the static cache;
* few of many: four rows with 200 tokens each, against the static cache, which computes all slots;
* growing: one row, half as many tokens as the static one, against the dynamic cache;
* compiled: the first under ``torch.compile`` on both sides.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from pairs import against, report
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from polyattn import AttentionScope, AttentionSpec, GroupedQueryAttention, KVCache

LAYERS, SLOTS, VOCABULARY = 12, 2048, 512


def peer():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=SLOTS,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).eval()


class Decoder(nn.Module):
    """The peer's modules around our attention, with caches."""

    def __init__(self, model):
        super().__init__()
        self.body, self.head, self.attention = model.model, model.lm_head, nn.ModuleList()
        for index in range(LAYERS):
            spec = AttentionSpec.from_hf(model.config, layer=index)
            layer = GroupedQueryAttention.from_spec(spec, backend="sdpa", fused_qkv=True)
            layer.load_hf_weights(model.state_dict(), model.config, layer=index)
            self.attention.append(layer)

    def forward(self, tokens, caches):
        count = tokens.shape[1]
        scope, positions = AttentionScope(caches[0].layout(count)), caches[0].positions(count)
        hidden = self.body.embed_tokens(tokens)
        for block, attend, cache in zip(self.body.layers, self.attention, caches, strict=True):
            hidden = hidden + attend(block.input_layernorm(hidden), scope, positions, cache=cache)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.head(self.body.norm(hidden))


def sides(model, decoder, rows, used, kind):
    """A step of each, which leaves its cache as it was, and the largest difference of their logits."""
    caches = KVCache.for_layers([layer.spec for layer in decoder.attention], rows, SLOTS, kind=kind)
    theirs = StaticCache(model.config, max_cache_len=SLOTS) if kind == "static" else DynamicCache(config=model.config)
    prompt, token = torch.randint(VOCABULARY, (rows, used)), torch.randint(VOCABULARY, (rows, 1))
    lengths = torch.full((rows,), used)
    at = torch.tensor([[used]]).expand(rows, 1)

    def ours(run=decoder):
        caches[0].rollback(lengths)
        return run(token, caches)

    def peers(run=model):
        if kind == "static":
            for layer in theirs.layers:  # the same slot again
                layer.cumulative_length.fill_(used) if hasattr(layer, "cumulative_length") else None
        else:
            theirs.crop(used - theirs.get_seq_length()) if theirs.get_seq_length() > used else None
        return run(token, past_key_values=theirs, position_ids=at, cache_position=at[0]).logits

    decoder(prompt, caches)
    model(prompt, past_key_values=theirs)
    return ours, peers, float((ours() - peers()).abs().max())


def measured(rows, used, kind, rounds, compiled=False):
    model = peer()
    decoder = Decoder(model)
    with torch.no_grad():
        ours, peers, difference = sides(model, decoder, rows, used, kind)
        if compiled:
            a, b = torch.compile(decoder, fullgraph=True), torch.compile(model)
            first, second = (lambda: ours(a)), (lambda: peers(b))
            difference = float((first() - second()).abs().max())
        else:
            first, second = ours, peers
        result = against(first, second, rounds)
    return {**result, "share": 1 / result["ratio"], "difference": difference}


@click.command()
@click.option("--rounds", default=60)
@click.option("--compiled", is_flag=True, help="Also under torch.compile, which takes minutes.")
@click.option("--only", default="", help="Benchmarks whose names contain this.")
@click.option("--threads", default=1)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(rounds, compiled, only, threads, path):
    torch.set_num_threads(threads)
    benches = {
        "static": lambda: measured(1, SLOTS // 2, "static", rounds),
        "few of many": lambda: measured(4, 200, "static", rounds),
        "growing": lambda: measured(1, SLOTS // 2, "growing", rounds),
    }
    if compiled:
        benches["compiled"] = lambda: measured(1, SLOTS // 2, "static", rounds, compiled=True)
    report(benches, only, path)


if __name__ == "__main__":
    main()
