"""The ``sdpa`` backend: torch's fused attention kernels, run on the structure of a mask instead of a dense mask."""

from polyattn_sdpa._backend import SdpaBackend
from polyattn_sdpa._options import SdpaOptions

__all__ = ["SdpaBackend", "SdpaOptions"]
