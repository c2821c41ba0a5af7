"""A whole decoder on our attention against the same weights in transformers with ``attn_implementation="sdpa"``.

    python benchmarks/bench_decoder.py [--rounds 3] [--length 4096] [--only overhead] [--json FILE]

12 layers, hidden 512, 8 query heads over 2 KV heads, FP32, eight packed documents, a window of 512 on five layers of
six: Qwen3 with ``layer_types``. Everything but attention is the peer's own modules on both sides. Three figures:

* training: forward and backward, rounds alternating between the sides; the ratio of medians is what to quote;
* memory: the highest resident size of a process that trains one step, above that of the model, at two lengths;
* overhead: what one small layer costs beside its bare projections, norm, rotation and one fused call.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyattn import AttentionScope, AttentionSpec, GroupedQueryAttention, MaskLayout, QKNorm, RopeSpec, apply_rotary

LAYERS, VOCABULARY, WINDOW, DOCUMENTS = 12, 512, 512, 8
FIGURES = ("overhead", "training", "memory of half the length", "memory")


def peer_of(layers=LAYERS):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=1 << 15,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


class Ours(nn.Module):
    """The peer's embedding, norms and MLPs, and our attention with the peer's weights."""

    def __init__(self, peer, backend="sdpa"):
        super().__init__()
        self.body, self.head = peer.model, peer.lm_head
        self.attention = nn.ModuleList()
        for index in range(len(peer.model.layers)):
            spec = AttentionSpec.from_hf(peer.config, layer=index)
            layer = GroupedQueryAttention.from_spec(spec, backend=backend)
            layer.load_hf_weights(peer.state_dict(), peer.config, layer=index)
            self.attention.append(layer)

    def forward(self, tokens, layout, positions):
        hidden = self.body.embed_tokens(tokens)
        scope = AttentionScope(layout)
        for attention in self.attention:
            attention.fill(scope, hidden, positions)
        for attention, block in zip(self.attention, self.body.layers, strict=True):
            hidden = hidden + attention(block.input_layernorm(hidden), scope, positions)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.head(self.body.norm(hidden))


def batch_of(length):
    """Eight documents of different lengths in one row."""
    shares = [1, 2, 3, 1, 4, 2, 2, 1]
    lengths = [length * share // sum(shares) for share in shares]
    lengths[0] += length - sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    return tokens, lengths, positions


def steps_of(peer, length):
    """One training step of each side, which returns the logits."""
    ours = Ours(peer)
    tokens, lengths, positions = batch_of(length)

    def theirs():
        logits = peer(input_ids=tokens, position_ids=positions).logits
        F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        return logits.detach()

    def mine():
        logits = ours(tokens, MaskLayout.packed(lengths), positions)
        F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        return logits.detach()

    return {"transformers": theirs, "polyattn": mine}


def train(length, rounds):
    """Medians of both sides and of the ratio; the logits are compared first."""
    steps = steps_of(peer_of(), length)
    difference = (steps["transformers"]() - steps["polyattn"]()).abs().max().item()
    if difference > 1e-3:
        raise click.ClickException(f"the two sides must compute the same, logits differ by {difference:.1e}")
    taken = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(taken["transformers"], taken["polyattn"], strict=True)]
    return {
        "length": length,
        "logits differ by": difference,
        **{f"{name} s": statistics.median(seconds) for name, seconds in taken.items()},
        "ratio": statistics.median(ratios),
    }


def resident(field):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024


def memory(length):
    """Bytes that one step of each side takes above the model, each in a process of its own."""
    taken = {}
    for side in ("transformers", "polyattn"):
        command = [sys.executable, __file__, "--length", str(length), "--step-of", side]
        taken[side] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"length": length, **{f"{side} MiB": bytes_ / 2**20 for side, bytes_ in taken.items()}}


def overhead(rounds=200, calls=20):
    """Microseconds of a whole layer beside its bare parts, small enough that the work itself is little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rope = RopeSpec(
        variant="default",
        theta=10000.0,
        head_dim=8,
        rotary_dim=8,
        interleaved=False,
        max_position=64,
        original_max_position=None,
        parameters={},
    )
    norm = QKNorm(position="before", scope="head", weighted=True, eps=1e-6)
    layer = GroupedQueryAttention(32, 4, 2, 8, rope=rope, qk_norm=norm, backend="sdpa")
    hidden, positions = torch.randn(1, 8, 32, requires_grad=True), torch.arange(8)[None]
    scope = AttentionScope(MaskLayout.causal(8))
    layer.fill(scope, hidden, positions)
    tables = scope.rotary(layer.rotary, positions)
    parts = [getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]

    def bare():
        q_proj, k_proj, v_proj, o_proj, q_norm, k_norm = parts
        q, k, v = q_proj(hidden), k_proj(hidden), v_proj(hidden).view(1, 8, 2, 8).transpose(1, 2)
        q, k = q_norm(q.view(1, 8, 4, 8)).transpose(1, 2), k_norm(k.view(1, 8, 2, 8)).transpose(1, 2)
        q, k = apply_rotary(q, k, tables, interleaved=False)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o_proj(output.transpose(1, 2).flatten(2))

    def timed(call):
        start = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - start) / calls * 1e6

    whole = lambda: layer(hidden, scope, positions)  # noqa: E731
    pairs = [(timed(bare), timed(whole)) for _ in range(rounds)]
    torch.set_num_threads(threads)
    return {
        "bare us": statistics.median(pair[0] for pair in pairs),
        "overhead us": statistics.median(pair[1] - pair[0] for pair in pairs),
        "of bare, %": statistics.median((pair[1] - pair[0]) / pair[0] for pair in pairs) * 100,
        "overhead us, least": min(pair[1] for pair in pairs) - min(pair[0] for pair in pairs),
    }


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--length", default=4096, show_default=True)
@click.option("--only", type=click.Choice(FIGURES), help="One of the figures.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the figures.")
@click.option("--step-of", type=click.Choice(["transformers", "polyattn"]), hidden=True)
def main(rounds, length, only, path, step_of):
    """Compare a decoder on our attention with the same weights in transformers."""
    if step_of:
        step = steps_of(peer_of(), length)[step_of]
        steps_of(peer_of(layers=1), 64)[step_of]()  # what is loaded at first use is not counted
        before = resident("VmRSS")
        step()
        click.echo(resident("VmHWM") - before)
        return
    figures = []
    measures = (overhead, lambda: train(length, rounds), lambda: memory(length // 2), lambda: memory(length))
    for name, measure in zip(FIGURES, measures, strict=True):
        if only not in (None, name):
            continue
        found = measure()
        click.echo(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
        figures.append({"what": name, **found})
    if path:
        threads = torch.get_num_threads()
        path.write_text(
            json.dumps({"torch": torch.__version__, "threads": threads, "figures": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
