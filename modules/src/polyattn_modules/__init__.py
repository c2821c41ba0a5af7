"""Attention layers on prepared attention: layers, their specs, what serving engines can read, and training configs."""

from polyattn_modules.cache import KVCache
from polyattn_modules.config import AttentionConfig
from polyattn_modules.fields import QKNorm
from polyattn_modules.gqa import GroupedQueryAttention
from polyattn_modules.latent import LatentAttention
from polyattn_modules.latent_spec import LatentSpec
from polyattn_modules.norm import RMSNorm
from polyattn_modules.serving import check_servable
from polyattn_modules.spec import AttentionSpec
from polyattn_modules.trees import NextTokens, PackedTree, pack_tree
from polyattn_modules.yaml_files import read_yaml

__all__ = [
    "AttentionConfig",
    "AttentionSpec",
    "GroupedQueryAttention",
    "KVCache",
    "LatentAttention",
    "LatentSpec",
    "NextTokens",
    "PackedTree",
    "QKNorm",
    "RMSNorm",
    "check_servable",
    "pack_tree",
    "read_yaml",
]
