"""Context parallelism: sequences shared out to ranks, under every mask and with every backend."""

from polyattn_context_parallel.attention import ContextParallelAttention, context_parallel_attention
from polyattn_context_parallel.config import ContextParallelConfig
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.planner import Cost, Plan, plan
from polyattn_context_parallel.scope import ContextParallelScope
from polyattn_context_parallel.shard import Shard

__all__ = [
    "ContextParallelAttention",
    "ContextParallelConfig",
    "ContextParallelError",
    "ContextParallelScope",
    "Cost",
    "Plan",
    "Shard",
    "context_parallel_attention",
    "plan",
]
