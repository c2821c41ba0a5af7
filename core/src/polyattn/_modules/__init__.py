"""Projections built on prepared attention."""

from polyattn._modules.gqa import GroupedQueryAttention
from polyattn._modules.norm import RMSNorm
from polyattn._modules.serving import check_servable
from polyattn._modules.spec import AttentionSpec, QKNorm

__all__ = ["AttentionSpec", "GroupedQueryAttention", "QKNorm", "RMSNorm", "check_servable"]
