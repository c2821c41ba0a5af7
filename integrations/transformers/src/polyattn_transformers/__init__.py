"""Any Hugging Face model on any polyattn backend."""

import transformers

from polyattn_transformers._versions import check_version

check_version(transformers.__version__, allow_untested=True)  # an older one lacks what the modules below import

from polyattn_transformers._layout_mask import LayoutMask  # noqa: E402
from polyattn_transformers._packed import packed  # noqa: E402
from polyattn_transformers._packing import PackedMask  # noqa: E402
from polyattn_transformers._register import register, use  # noqa: E402

__all__ = ["LayoutMask", "PackedMask", "packed", "register", "use"]
__version__ = "0.1.0"
