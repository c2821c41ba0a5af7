"""Random rotary dictionaries in both styles: whatever we read, transformers computes alike; else it is refused."""

from __future__ import annotations

import copy
import logging
import random
import warnings

import pytest
import torch

from polyattn import RopeConfigError, RopeSpec, RotaryEmbedding

transformers = pytest.importorskip("transformers")

ORIGINAL = "original_max_position_embeddings"
#: Keys of each type: needed, then optional.
KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
#: Odd but possible values. ``mscale: 0`` is left out: there packages disagree, and the documentation says what we do.
VALUES = {
    "factor": (1, 2, 4.0, 1.5, 8, 40, 0.5),
    ORIGINAL: (16, 32, 64, 1024),
    "low_freq_factor": (1, 1.0, 1.7, 3),
    "high_freq_factor": (1, 4.0, 7.3),
    "short_factor": ([1] * 8, [1.0, 1.1, 1.3, 1.4, 1.7, 2, 2.2, 3], [1.0] * 4),
    "long_factor": ([2] * 8, [1.0, 2.5, 4, 9.0, 13, 20.5, 26, 30], [2.0] * 4),
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0, 1),
    "attention_factor": (1.0, 0.5, 1.3, 0, 1),
    "beta_fast": (32, 8.0, 1.5),
    "beta_slow": (1, 0.25, 4, 0),
    "mscale": (1.0, 0.707, 1),
    "mscale_all_dim": (1.0, 0.707),
    "truncate": (True, False, 0),
    "attn_factor": (1.2,),
}


def dictionary(draw):
    kind = draw.choice(list(KEYS))
    needed, optional = KEYS[kind]
    names = [name for name in needed if draw.random() < 0.95] + [name for name in optional if draw.random() < 0.35]
    names += [draw.choice(list(VALUES))] * (draw.random() < 0.15)
    rope = {name: draw.choice((*VALUES[name], *[None] * (draw.random() < 0.1))) for name in names}
    rope |= {"rope_type": kind} if draw.random() < 0.85 else {}
    rope |= {"type": draw.choice((kind, kind, kind, "mrope", "su"))} if draw.random() < 0.4 else {}
    data = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    data |= {"max_position_embeddings": draw.choice((16, 64, 128, 4096))}
    style, theta = draw.choice(("v4", "v5", "mixed")), draw.choice((10000.0, 10000, 5e5, 100))
    for name in (ORIGINAL, "partial_rotary_factor"):
        if style != "v5" and name in rope and draw.random() < 0.3:
            data[name] = rope.pop(name) if draw.random() < 0.8 else 64
    if style == "v5":
        return {**data, "rope_parameters": {"rope_theta": theta, **rope}}
    return {**data, "rope_theta": theta, {"v4": "rope_scaling", "mixed": "rope_parameters"}[style]: rope}


def theirs(data):
    """Frequencies and factor of cosines by transformers, at the length that we fix."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**{name: value for name, value in data.items() if name != "model_type"})
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    longest = config.max_position_embeddings
    length = int(rope["factor"] * longest) if rope["rope_type"] == "dynamic" else longest
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)


def test_what_is_read_of_random_dictionaries_is_what_transformers_computes():
    read, before = 0, logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(800):
            data = dictionary(random.Random(seed))
            given = copy.deepcopy(data)
            try:
                spec = RopeSpec.from_hf(data)
            except RopeConfigError:
                continue
            finally:
                assert data == given
            if spec.variant == "default" and spec.rotary_dim < spec.head_dim:
                continue  # which this class ignores and serving engines do not, as the documentation says
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    inv_freq, scaling = theirs(copy.deepcopy(data))
                except (KeyError, TypeError, AttributeError):  # a null that transformers computes with
                    assert None in {**data, **(data.get("rope_parameters") or data.get("rope_scaling"))}.values()
                    continue
            angles, our_scaling = RotaryEmbedding(spec).angles(torch.tensor([[1]]))
            assert torch.allclose(angles[0, 0], inv_freq, rtol=3e-6, atol=1e-12), (seed, data)
            assert our_scaling == pytest.approx(scaling, rel=1e-6), (seed, data)
            read += 1
    finally:
        logging.disable(before)
    assert read > 300
