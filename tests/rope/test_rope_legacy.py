"""How far the rotations that draft models were trained with are from ours, one effect at a time.

The rows that are measured here stand in docs/rope-conventions.md, word for word.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from legacy_rope import DFlashRotary, EagleRotary, doubled, rotate_half
from polyattn import RopeSpec, RotaryEmbedding, RotaryTables
from polyattn.rope import rotate_heads
from rope_golden import DATA, SAME_BITS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "rope-conventions.md").read_text(encoding="utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
AT = torch.tensor([32768, 65535])
BASES = (10000, 1000000)


def plain(base, **fields):
    spec = RopeSpec(
        variant="default",
        theta=float(base),
        head_dim=128,
        rotary_dim=128,
        interleaved=False,
        max_position=65536,
        original_max_position=None,
        parameters={},
    )
    return RotaryEmbedding(dataclasses.replace(spec, **fields))(AT[None])


def dynamic(base):
    """Fixed length 65536, whatever was rotated before."""
    return plain(base, variant="dynamic", max_position=32768, original_max_position=32768, parameters={"factor": 2.0})


def queries(base):
    """The recorded q: eight heads, the same at both positions, ``[1, 8, 2, 128]`` in FP32."""
    with np.load(DATA / "legacy_bf16.npz") as stored:
        return torch.from_numpy(stored[f"d128_b{base}__q"])[None, :, None].expand(1, 8, 2, 128)


def tables_of(inv_freq, positions):
    angles = positions[:, None].float() * inv_freq.float()
    return RotaryTables(angles.cos()[None], angles.sin()[None])


def rounded(tables):
    return RotaryTables(tables.cos.bfloat16().float(), tables.sin.bfloat16().float())


def at_each_position(difference):
    return difference.abs().amax([axis for axis in range(difference.dim()) if axis != difference.dim() - 2]).tolist()


def rotated(q, tables):
    return rotate_heads(q, tables, interleaved=False)


def in_bfloat16(q, tables):
    """Eager bfloat16 arithmetic: both products and the sum are rounded."""
    cos, sin = doubled(tables.cos[0]).bfloat16(), doubled(tables.sin[0]).bfloat16()
    return q * cos + rotate_half(q) * sin


def frequencies(base):
    ours, legacy = plain(base), tables_of(DFlashRotary(float(base), 128).inv_freq, AT)
    return legacy.cos - ours.cos, rotated(queries(base), legacy) - rotated(queries(base), ours)


def tables(base):
    ours = plain(base)
    return rounded(ours).cos - ours.cos, rotated(queries(base), rounded(ours)) - rotated(queries(base), ours)


def arithmetic(base):
    q, given = queries(base).bfloat16(), rounded(plain(base))
    return torch.zeros(1, 2, 1), in_bfloat16(q, given).float() - rotated(q, given).float()


def history(base):
    """The first long position that is decoded, against the fixed length."""
    parts = []
    for position in AT:
        eagle = EagleRotary(float(base), 128, 32768, factor=2.0)
        eagle(queries(base)[:, :, :1].bfloat16(), position[None])
        parts.append(tables_of(eagle.inv_freq, position[None]))
    legacy = RotaryTables(torch.cat([part.cos for part in parts], 1), torch.cat([part.sin for part in parts], 1))
    ours = dynamic(base)
    return legacy.cos - ours.cos, rotated(queries(base), legacy) - rotated(queries(base), ours)


EFFECTS = {
    "frequencies rounded to bfloat16": frequencies,
    "tables rounded to bfloat16": tables,
    "bfloat16 arithmetic (three roundings), same tables": arithmetic,
    "dynamic base that follows history": history,
}


@pytest.mark.skipif(not SAME_BITS, reason="the record was made with AVX-512; other CPUs differ in the last digits")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_legacy_effect_is_as_large_as_the_document_says(effect, base):
    cos, q = map(at_each_position, EFFECTS[effect](base))
    cells = " | ".join(f"{a:.2g} / {b:.2g}" for a, b in zip(cos, q, strict=True))
    assert f"| {effect} | {base} | {cells} |" in DOCUMENT
    assert base != BASES[0] or cells.replace(" | ", " and ") in CHANGES


@pytest.mark.parametrize("base", BASES)
def test_the_whole_dflash_rotation_is_noise_at_long_range(base):
    q = queries(base).bfloat16()
    legacy = DFlashRotary(float(base), 128)(q, AT).float()
    ours = rotated(q, plain(base)).float()
    assert min(at_each_position(legacy - ours)) > 4.0
    assert max(at_each_position(legacy - ours)) < 6.0


@pytest.mark.parametrize("base", BASES)
def test_the_whole_eagle_rotation_differs_by_its_roundings_only(base):
    q = queries(base).bfloat16()
    legacy = EagleRotary(float(base), 128, 65536)(q, AT).float()
    assert max(at_each_position(legacy - rotated(q, plain(base)).float())) <= 0.032


def test_eagle_rotates_a_position_by_what_was_decoded_before():
    """Position 32768 is rotated like ours only after 65536 positions were seen."""
    q, ours = queries(10000).bfloat16(), rotated(queries(10000).bfloat16(), dynamic(10000)).float()

    def error(*before):
        eagle = EagleRotary(10000.0, 128, 32768, factor=2.0)
        for position in before:
            eagle(q[:, :, :1], torch.tensor([position]))
        return (eagle(q[:, :, :1], AT[:1]).float() - ours[:, :, :1]).abs().max()

    assert error() > 4.0
    assert error(65535) <= 0.032
