"""Any Hugging Face model on any polyattn backend."""

from polyattn_transformers._layout_mask import LayoutMask
from polyattn_transformers._packing import PackedMask, packed
from polyattn_transformers._register import register, use

__all__ = ["LayoutMask", "PackedMask", "packed", "register", "use"]
__version__ = "0.1.0"
