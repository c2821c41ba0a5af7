"""The ``flex_attention`` backend: torch's FlexAttention kernels under block masks built from structure.

:func:`block_mask` gives such a block mask to who calls torch's kernel directly.
"""

from __future__ import annotations

from polyattn_flex._backend import FlexBackend
from polyattn_flex._block_mask import block_mask
from polyattn_flex._options import FlexOptions

__all__ = ["FlexBackend", "FlexOptions", "block_mask"]
