"""Rotary tables built on CUDA are those of the CPU, and rotation keeps the dtype rules there."""

from __future__ import annotations

import pytest
import torch

from polyattn import RopeSpec, RotaryEmbedding, apply_rotary

SPEC = RopeSpec.from_dict(
    {
        "schema_version": 1,
        "variant": "default",
        "theta": 10000.0,
        "head_dim": 64,
        "rotary_dim": 64,
        "interleaved": False,
        "max_position": 65536,
        "original_max_position": None,
        "parameters": {},
        "axes": None,
    }
)
POSITIONS = torch.tensor([[0, 1, 17, 4095, 32768, 65535]])


@pytest.fixture
def tables(device):
    embedding = RotaryEmbedding(SPEC)
    return embedding(POSITIONS), embedding(POSITIONS.to(device))


def test_tables_built_on_the_device_are_fp32_and_equal_to_one_unit_of_rounding(tables):
    on_cpu, on_cuda = tables
    for name in ("cos", "sin"):
        one, other = getattr(on_cpu, name), getattr(on_cuda, name)
        assert other.dtype is torch.float32
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=2**-23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_happens_in_fp32_and_is_cast_once(tables, device, dtype):
    _, on_cuda = tables
    q = torch.randn(1, 4, POSITIONS.shape[1], 64, device=device).to(dtype)
    low, _ = apply_rotary(q, q, on_cuda, interleaved=False)
    wide, _ = apply_rotary(q.float(), q.float(), on_cuda, interleaved=False)
    assert torch.equal(low, wide.to(dtype))


def test_a_moved_embedding_builds_no_tables_in_low_precision(device):
    embedding = RotaryEmbedding(SPEC)
    embedding.to(device, torch.bfloat16)
    tables = embedding(POSITIONS.to(device))
    assert torch.equal(tables.cos, RotaryEmbedding(SPEC)(POSITIONS.to(device)).cos)
