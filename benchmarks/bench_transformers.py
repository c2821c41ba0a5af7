"""Time and peak memory of transformers models on polyattn's sdpa backend, beside transformers' own sdpa.

Windows and packed documents are measured in processes of their own, one per implementation and round, alternating: peak
memory is that of the whole process. Plain causal attention is measured in pairs inside one process. What to quote are
the ratios of one run; the bars are what the project promises on two cores. On a busy machine only the ratio of CPU
seconds means something, with OMP_NUM_THREADS=1, since threads that wait for each other count as busy.

    python benchmarks/bench_transformers.py            # all three
    python benchmarks/bench_transformers.py packed     # one of them
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
import transformers

import polyattn_transformers

OWN, OURS = "sdpa", "polyattn_sdpa"
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,  # 8 / 3 of the hidden size, as in Llama
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "use_cache": False,
}
DOCUMENTS = 16
# Scenario: least speed-up and largest share of the peak memory.
BARS = {"window": (1.8, 0.75), "packed": (3.8, 0.62)}


def model_of(scenario, implementation):
    torch.manual_seed(0)
    if scenario == "window":
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(SHAPE["num_hidden_layers"])]
        config = transformers.Gemma3TextConfig(
            **SHAPE, sliding_window=512, layer_types=kinds, max_position_embeddings=8192
        )
    else:
        config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=8192)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


def inputs_of(scenario, length):
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
    if scenario == "packed":
        return {"input_ids": ids, "position_ids": torch.arange(length // DOCUMENTS).repeat(DOCUMENTS)[None]}
    return {"input_ids": ids}


def step(model, inputs):
    """Wall seconds, CPU seconds and loss of one forward and backward."""
    start, cpu = time.perf_counter(), time.process_time()
    loss = model(**inputs).logits.float().square().mean()
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - start, time.process_time() - cpu, loss.item()


def measure(scenario, implementation, length):
    """One measurement in a process of its own."""
    model = model_of(scenario, implementation)
    step(model, inputs_of(scenario, 256))  # warms up
    seconds, cpu, loss = step(model, inputs_of(scenario, length))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
    print(json.dumps({"seconds": seconds, "cpu": cpu, "loss": loss, "peak": peak}))


def compare(scenario, length, rounds):
    found = {OWN: [], OURS: []}
    for _ in range(rounds):
        for implementation, results in found.items():
            command = [sys.executable, __file__, scenario, "--child", implementation, "--length", str(length)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    return found


def smollm2_pairs(pairs, length):
    """Wall and CPU seconds of forward and backward of SmolLM2-135M's shape, implementations alternating."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    models = {
        name: transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name) for name in (OWN, OURS)
    }
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (1, length))}
    times = {name: [] for name in models}
    for round_ in range(pairs + 1):
        for name in (OWN, OURS) if round_ % 2 else (OURS, OWN):
            measured = step(models[name], inputs)
            if round_:  # the first pair warms up
                times[name].append(measured[:2])
    return times


@click.command()
@click.argument("scenarios", nargs=-1, type=click.Choice(["window", "packed", "smollm2"]))
@click.option("--length", default=8192, show_default=True, help="Tokens of window and packed.")
@click.option("--rounds", default=1, show_default=True, help="Measurements of window and packed per implementation.")
@click.option("--pairs", default=15, show_default=True, help="Pairs of smollm2.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
@click.option("--child", hidden=True)
def main(scenarios, length, rounds, pairs, path, child):
    """Time transformers models on polyattn beside transformers' own sdpa."""
    polyattn_transformers.register()
    if child:
        measure(scenarios[0], child, length)
        return
    report = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    for scenario in scenarios or ("window", "packed", "smollm2"):
        if scenario == "smollm2":
            report["causal, 512 tokens, SmolLM2's shape"] = figures = beside(smollm2_pairs(pairs, 512))
            figures["bar"] = "time at most 1.05"
        else:
            report[f"{scenario}, {length} tokens"] = figures = apart(compare(scenario, length, rounds))
            figures["bar"] = "at least {} times faster, memory at most {}".format(*BARS[scenario])
        name = list(report)[-1]
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        click.echo(f"{name}: " + ", ".join(shown))
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def beside(times):
    """Medians over pairs measured in one process."""
    wall, cpu = (
        statistics.median(b[kind] / a[kind] for a, b in zip(times[OWN], times[OURS], strict=True)) for kind in (0, 1)
    )
    own, ours = (statistics.median(seconds for seconds, _ in times[name]) for name in (OWN, OURS))
    return {f"{OWN} s": own, f"{OURS} s": ours, "time": wall, "CPU time": cpu}


def apart(found):
    """Medians over processes of their own; the losses must agree."""
    seconds, cpu = (
        {name: statistics.median(one[kind] for one in results) for name, results in found.items()}
        for kind in ("seconds", "cpu")
    )
    peak = {name: min(one["peak"] for one in results) for name, results in found.items()}
    losses = {one["loss"] for results in found.values() for one in results}
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise click.ClickException(f"both implementations must compute the same, losses are {sorted(losses)}")
    return {
        f"{OWN} s": seconds[OWN],
        f"{OURS} s": seconds[OURS],
        "times faster": seconds[OWN] / seconds[OURS],
        "times faster, CPU time": cpu[OWN] / cpu[OURS],
        f"{OWN} MiB": peak[OWN],
        f"{OURS} MiB": peak[OURS],
        "memory": peak[OURS] / peak[OWN],
    }


if __name__ == "__main__":
    main()
