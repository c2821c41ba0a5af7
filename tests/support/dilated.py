"""Run with a core whose StructuredMask has one field more, ``dilation``: what every backend and operation makes of it.

Prints one JSON object, statement -> what was found. The backends are those that are installed, unchanged.
"""

from __future__ import annotations

import copy
import json
import pickle

import torch

import fa_stand_in
import polyattn
import polyattn_fa2
from polyattn import AttentionRequest, MaskLayout, StructuredMask, UnsupportedAttentionError, attention, backends
from polyattn_eager import EagerBackend
from polyattn_fa2 import FlashBackend
from polyattn_flex import FlexBackend, FlexOptions
from polyattn_sdpa import SdpaBackend

LENGTH = 9
DILATED = StructuredMask(causal=True, dilation=2)
LAYOUT = MaskLayout(LENGTH, LENGTH, visibility=DILATED)


def oracle(rows=range(LENGTH), columns=range(LENGTH), also=lambda _q, _k: True):
    return torch.tensor([[k <= q and (q - k) % 2 == 0 and bool(also(q, k)) for k in columns] for q in rows])


def request(dtype=torch.float32):
    q = torch.zeros(1, 2, LENGTH, 8, dtype=dtype)
    return AttentionRequest.of(q, q, q)


def refused(backend, dtype=torch.float32):
    """The features that the refusal names."""
    try:
        backend.prepare(LAYOUT, request(dtype))
    except UnsupportedAttentionError as refusal:
        return sorted(reason.feature for reason in refusal.reasons)
    return []


def claiming(kind, *arguments):
    """The backend, unchanged but for the word."""
    backend = type(f"Claiming{kind.__name__}", (kind,), {"abilities_on": lambda self, _: self.abilities})(*arguments)
    backend.abilities = kind(*arguments).abilities | {"dilation"}
    return backend


def error_of(backend):
    """The largest difference from the reference under the oracle's mask."""
    q, k, v = (torch.randn(2, 2, LENGTH, 8, dtype=torch.float64) for _ in range(3))
    want = attention(q, k, v, MaskLayout.dense(oracle()), backend="eager").output
    return float((attention(q, k, v, LAYOUT, backend=backend).output - want).abs().max())


def same(layout, want):
    return bool((layout.to_dense()[0, 0] == want).all())


def operations():
    everything = range(LENGTH)
    index = [7, 2, 3]
    documents = MaskLayout.packed([4, 5])
    valid = MaskLayout.padded(torch.arange(LENGTH)[None] < 7, causal=False)
    device = MaskLayout(LENGTH, LENGTH, visibility=DILATED.replace(kv_valid=torch.ones(1, LENGTH, dtype=torch.bool)))
    apart = oracle(also=lambda q, k: (q < 4) == (k < 4))
    return {
        "a & b": same(LAYOUT & documents, apart),
        "b & a": same(documents & LAYOUT, apart),
        "a & a": same(LAYOUT & LAYOUT, oracle()),
        "a & padding": same(LAYOUT & valid, oracle(also=lambda _q, k: k < 7)),
        "a & dense": same(LAYOUT & MaskLayout.dense(apart), apart),
        "with_window": same(LAYOUT.with_window(4), oracle(also=lambda q, k: q - k < 4)),
        "with_window twice": same(LAYOUT.with_window(6).with_window(3), oracle(also=lambda q, k: q - k < 3)),
        "select_queries": same(LAYOUT.select_queries(index), oracle(rows=index)),
        "select_queries slice": same(LAYOUT.select_queries(slice(3, 8)), oracle(rows=range(3, 8))),
        "select_keys": same(LAYOUT.select_keys(index), oracle(everything, index)),
        "select_heads": same(LAYOUT.select_heads(slice(0, 1)), oracle()),
        "select, then window": same(
            LAYOUT.select_queries(index).with_window(3), oracle(rows=index, also=lambda q, k: q - k < 3)
        ),
        "expand": same(LAYOUT.expand(3), oracle()),
        "to": device.to("meta").visibility.dilation == 2,
        "pickle": same(pickle.loads(pickle.dumps(LAYOUT)), oracle()),
        "deepcopy": same(copy.deepcopy(LAYOUT), oracle()),
        "to_mask_mod": same(MaskLayout.from_mod(LAYOUT.to_mask_mod(), q_len=LENGTH, kv_len=LENGTH), oracle()),
        "no blocks": LAYOUT.to_blocks() is None and LAYOUT.key_ranges() is None,
        "described": "dilation" in LAYOUT.describe(),
        "drawn": "-" in LAYOUT.draw().splitlines()[-1],
    }


def main():
    found = {"core": polyattn.__file__, "field": str(DILATED.given())}
    unchanged = {name: backends.get(name) for name in ("eager", "sdpa", "flex_attention")}
    unchanged["flex_attention uncompiled"] = FlexBackend(FlexOptions(compiled=False))
    found["refused"] = {name: refused(backend) for name, backend in unchanged.items()}
    with fa_stand_in.stand_in():
        found["refused"]["fa"] = refused(FlashBackend(), torch.bfloat16)
        provider = polyattn_fa2.providers.get("flash_attn")
        provider.abilities |= {"dilation"}
        found["claimed by fa"] = refused(FlashBackend(), torch.bfloat16)
    claims = [claiming(EagerBackend), claiming(SdpaBackend), claiming(FlexBackend, FlexOptions(compiled=False))]
    found["claimed"] = {backend.name: error_of(backend) for backend in claims}
    plan = claiming(FlexBackend).plan(LAYOUT, request())
    found["compiled flex is dense"] = plan.ranges is None and bool((plan.dense[0, 0] == oracle()).all())
    found["operations"] = operations()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
