"""The two rotations that draft models were trained with before, whole, written from their description.

DFlash: the model's cast to bfloat16 rounds the frequencies; tables are made from them in float32 and rounded; the
rotation runs eagerly in bfloat16 and rounds both products and their sum.

EAGLE: frequencies stay float32; the table and the rotation are bfloat16; under dynamic scaling a sequence
longer than any before rebuilds the table with the base of that length, and every later call reads it.
"""

from __future__ import annotations

import torch


def plain_frequencies(base, dim):
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def doubled(angles):
    return torch.cat((angles, angles), -1)


class DFlashRotary:
    """``inv_freq`` rounded by ``model.to(bfloat16)``; everything else as its Qwen3 ancestor does it."""

    def __init__(self, base, dim):
        self.inv_freq = plain_frequencies(base, dim).bfloat16()

    def tables(self, positions):
        angles = doubled(positions[:, None].float() * self.inv_freq.float())
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def __call__(self, q, positions):
        """q ``[..., S, D]`` in bfloat16."""
        cos, sin = self.tables(positions)
        return q * cos + rotate_half(q) * sin


class EagleRotary:
    """Tables in bfloat16; with ``factor`` the base follows the longest sequence seen."""

    def __init__(self, base, dim, max_position, factor=None):
        self.base, self.dim, self.max_position, self.factor = base, dim, max_position, factor
        self._build(max_position)

    def _build(self, length):
        base = self.base
        if self.factor is not None and length > self.max_position:
            stretched = self.factor * length / self.max_position - (self.factor - 1)
            base *= stretched ** (self.dim / (self.dim - 2))
        self.inv_freq = plain_frequencies(base, self.dim)
        angles = doubled(torch.arange(length)[:, None].float() * self.inv_freq)
        self.cos, self.sin, self.length = angles.cos().bfloat16(), angles.sin().bfloat16(), length

    def __call__(self, q, positions):
        """q ``[..., S, D]`` in bfloat16."""
        needed = int(positions.max()) + 1
        if needed > self.length:
            self._build(needed)
        return q * self.cos[positions] + rotate_half(q) * self.sin[positions]
