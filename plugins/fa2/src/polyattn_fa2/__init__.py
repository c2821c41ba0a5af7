"""The ``fa`` backend: FlashAttention-2, by the package flash_attn or by torch itself."""

from polyattn_fa2._backend import FlashBackend, FlashOptions

__all__ = ["FlashBackend", "FlashOptions"]
