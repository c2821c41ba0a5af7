"""The ``fa`` backend: FlashAttention-2, by the package flash_attn or by torch itself.

:func:`cu_seqlens` gives a layout as the arguments of a varlen call to who makes that call directly;
:func:`paged_attention` attends over a cache whose pages the caller manages.
"""

from polyattn_fa2._backend import FlashBackend, FlashOptions
from polyattn_fa2._paged import paged_attention
from polyattn_fa2._varlen import VarlenCall, cu_seqlens

__all__ = ["FlashBackend", "FlashOptions", "VarlenCall", "cu_seqlens", "paged_attention"]
