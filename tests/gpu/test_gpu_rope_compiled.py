"""R10 on CUDA: the compiled legacy rotation in bfloat16 rounds as ours does, and the eager one does not."""

from __future__ import annotations

import torch

from polyattn import RopeSpec, RotaryEmbedding, RotaryTables, apply_rotary
from polyattn_conformance.checks.host_reads import forbid_host_reads


def legacy(q, cos, sin):
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


def test_every_element_equals_the_compiled_legacy_rotation(device):
    angles = torch.randn(1, 1, 256, 32, device=device) * 1000
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    q = torch.randn(4, 8, 256, 64, device=device).bfloat16()
    wide = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    tables = RotaryTables(cos[0].float(), sin[0].float())
    ours, _ = apply_rotary(q, q, tables, interleaved=False)
    assert torch.equal(torch.compile(legacy, fullgraph=True)(q, *wide), ours)
    assert 0.25 < (legacy(q, *wide) != ours).float().mean() < 0.4
    compiled = torch.compile(lambda q: apply_rotary(q, q, tables, interleaved=False)[0], fullgraph=True)
    assert torch.equal(compiled(q), ours)


def test_pieces_and_plain_operations_give_the_same_bits(device, monkeypatch):
    from polyattn.rope import rotate

    q = torch.randn(2, 4, 300, 64, device=device).bfloat16()
    angles = torch.randn(1, 300, 32, device=device) * 1000
    tables = RotaryTables(angles.cos(), angles.sin())
    for interleaved in (False, True):
        at_once, _ = apply_rotary(q, q, tables, interleaved=interleaved)
        with monkeypatch.context() as patch:
            patch.setattr(rotate, "_PIECE_ELSEWHERE", 0)
            in_pieces, _ = apply_rotary(q, q, tables, interleaved=interleaved)
        assert torch.equal(at_once, in_pieces)


def test_a_forward_reads_no_value_on_the_host_once_the_device_has_its_copy(device):
    spec = RopeSpec(
        variant="default",
        theta=10000.0,
        head_dim=64,
        rotary_dim=64,
        interleaved=False,
        max_position=4096,
        original_max_position=None,
        parameters={},
    )
    embedding, positions = RotaryEmbedding(spec), torch.arange(64, device=device)[None]
    embedding(positions)
    q = torch.randn(1, 4, 64, 64, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with forbid_host_reads("the rotation"):
            apply_rotary(q, q, embedding(positions), interleaved=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
