"""The sdpa backend on layouts whose queries see several runs of keys, against the same attention without them.

    python benchmarks/bench_runs.py [--rounds 7] [--quick] [--only NAME] [--json FILE]

Forward and backward, FP32, H=4, D=64. Rounds alternate between the two sides and each figure is a median, so that a
busy machine slows both alike; the ratios, peer over ours, are what to quote. "attend" leaves out the making of the
layout and ``prepare``, which a model does once for all its layers; "with prepare" counts both.
"""

from __future__ import annotations

import functools
import operator
from pathlib import Path

import click
import torch
from pairs import against, report

import polyattn
from polyattn import AttentionRequest, MaskLayout, StructuredMask

HEADS, WIDTH = 4, 64
SDPA = polyattn.backends.get("sdpa")


class Side:
    """One layout, attended to forward and backward with gradients into q, k and v."""

    def __init__(self, make):
        self.make = make
        layout = make()
        generator = torch.Generator().manual_seed(0)
        lengths = (layout.q_len, layout.kv_len, layout.kv_len)
        self.qkv = [torch.randn(1, HEADS, n, WIDTH, generator=generator).requires_grad_() for n in lengths]
        self.grad = torch.randn(1, HEADS, layout.q_len, WIDTH, generator=generator)
        self.request = AttentionRequest.of(*self.qkv)
        self.prepared = SDPA.prepare(layout, self.request)

    def attend(self):
        torch.autograd.grad(self.prepared(*self.qkv).output, self.qkv, self.grad)

    def whole(self):
        prepared = SDPA.prepare(self.make(), self.request)
        torch.autograd.grad(prepared(*self.qkv).output, self.qkv, self.grad)


def as_mod(layout):
    """The same mask as a function, whose structure no backend can see."""
    return MaskLayout.from_mod(layout.to_mask_mod(), q_len=layout.q_len, kv_len=layout.kv_len)


def measured(make, peer, bars, rounds):
    ours, other = Side(make), Side(peer)
    result = {"path": SDPA.describe(ours.prepared)}
    for name, bar in bars.items():
        method = {"attend": "attend", "with prepare": "whole"}[name]
        timed = against(getattr(ours, method), getattr(other, method), rounds)
        result |= {name: timed["ratio"], f"{name}, bar": bar, f"{name}, ours_s": timed["ours_s"]}
    return result


def paths(parents, lengths):
    """Each leaf of a tree as a row of its own: the lengths from the root to it, added up."""
    length = []
    for parent, own in zip(parents, lengths, strict=True):
        length.append(own + (length[parent] if parent >= 0 else 0))
    return [length[node] for node in range(len(parents)) if node not in parents]


def tree(parents, lengths):
    make = functools.partial(MaskLayout.tree, parents, lengths)
    return make, lambda: MaskLayout.packed(paths(parents, lengths))


def prefix(quick):
    return [-1] + [0] * 8, [1024 >> quick] + [256 >> quick] * 8


def levels(lengths, children):
    """A tree of three levels: the tokens of a node of each, and how many children a node of the first two has."""
    second, third = children[0], children[0] * children[1]
    parents = [-1, *[0] * second, *[1 + i // children[1] for i in range(third)]]
    return parents, [lengths[0]] + [lengths[1]] * second + [lengths[2]] * third


def block_diffusion(length, size):
    """A context and, behind it, blocks of queries, each seen both ways, for every ``size`` tokens of the context.

    That is a tree whose context is split at the blocks' anchors.
    """
    count = length // size
    parents = [*range(-1, count - 1), *range(count)]

    def make():
        tree = MaskLayout.tree(parents, [size] * (2 * count), causal=False)
        return tree.select_queries(slice(length, 2 * length))

    return make


def draft_steps(length, steps):
    """Query i sees the keys up to i of the first step and its own key of each later step."""
    query = torch.arange(length)[None]
    # One position for the tokens of all steps; a step is a segment, which the keys of the others do not have.
    keys = query.repeat(1, steps)
    step = torch.arange(steps).repeat_interleave(length)[None]

    def part(number, **rule):
        mask = StructuredMask(
            causal=True,
            q_positions=query,
            kv_positions=keys,
            q_segments=torch.full_like(query, number),
            kv_segments=step,
            **rule,
        )
        return MaskLayout(length, steps * length, visibility=mask)

    def make():
        parts = [part(0), *[part(number, window=1) for number in range(1, steps)]]
        return functools.reduce(operator.or_, parts)

    return make


def shared_prefix(rounds, quick):
    make, packed = tree(*prefix(quick))
    bars = {"attend": ">= 2.2", "with prepare": ">= 2.2"}
    unshared = measured(make, packed, bars, rounds)
    dense = measured(make, lambda: as_mod(make()), bars, rounds)
    return unshared | {f"mask_mod, {name}": value for name, value in dense.items() if name != "path"}


def deep_tree(lengths, children, bar):
    def run(rounds, quick):
        make, packed = tree(*levels([n >> quick for n in lengths], children))
        return measured(make, packed, {"attend": bar, "with prepare": bar}, rounds)

    return run


def sinks(rounds, quick):
    length = 8192 >> 2 * quick
    plain = functools.partial(MaskLayout.causal, length, window=512)
    return measured(
        functools.partial(plain, sink_tokens=4), plain, {"attend": ">= 0.8", "with prepare": ">= 0.8"}, rounds
    )


def blocks(rounds, quick):
    make = block_diffusion(2048 >> quick, 32)
    bars = {"attend": ">= 2", "with prepare": ">= 3"}
    return measured(make, lambda: as_mod(make()), bars, rounds)


def drafts(steps, bars):
    def run(rounds, quick):
        make = draft_steps(2048 >> quick, steps)
        return measured(make, lambda: as_mod(make()), bars, rounds)

    return run


def _formed(form, make):
    return form(make())


class Steps:
    """All steps of a draft's training, EAGLE-3's form: step s has the keys of all steps up to its own."""

    def __init__(self, form, length, steps):
        makers = [draft_steps(length, count) for count in range(1, steps + 1)]
        self.sides = [Side(functools.partial(_formed, form, make)) for make in makers]

    def attend(self):
        for side in self.sides:
            side.attend()

    def whole(self):
        for side in self.sides:
            side.whole()


def training(rounds, quick):
    length = 2048 >> quick
    ours, other = Steps(lambda layout: layout, length, 7), Steps(as_mod, length, 7)
    attend = against(ours.attend, other.attend, rounds)
    whole = against(ours.whole, other.whole, 1)
    return {
        "attend": attend["ratio"],
        "attend, bar": ">= 4",
        "attend, ours_s": attend["ours_s"],
        "with prepare": whole["ratio"],
        "with prepare, bar": ">= 4",
    }


BENCHES = {
    "prefix 1024 and 8 responses of 256": shared_prefix,
    "a tree of 1024, 3 of 256, 12 of 128": deep_tree((1024, 256, 128), (3, 4), ">= 2.5"),
    # It has 1.78 times fewer pairs of a query and a key than its paths.
    "a tree of 512, 4 of 256, 12 of 256": deep_tree((512, 256, 256), (4, 3), ">= 1.78"),
    "window 512 with 4 sink tokens in 8192": sinks,
    "block diffusion, 2048 in blocks of 32": blocks,
    "draft of 7 steps at 2048": drafts(7, {"attend": ">= 5", "with prepare": ">= 5"}),
    "EAGLE-3, all 7 steps at 2048": training,
    "draft of 4 steps at 2048": drafts(4, {"attend": ">= 3", "with prepare": ">= 5"}),
}


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--quick", is_flag=True, help="Half the lengths or less, which the bars do not hold for, and 3 rounds.")
@click.option("--only", default="", help="Run the benchmarks whose name contains this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(rounds, quick, only, path):
    """Print the ratios, and their bars, of layouts of several runs against the same attention without them."""
    report(
        {name: functools.partial(bench, 3 if quick else rounds, quick) for name, bench in BENCHES.items()}, only, path
    )


if __name__ == "__main__":
    main()
