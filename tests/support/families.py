"""Random tiny models of the families that specs and weights are read from, and the same models on our attention."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from polyattn import AttentionScope, AttentionSpec, GroupedQueryAttention, MaskLayout

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_KINDS = ["sliding_attention", "full_attention"]

#: Model class, configuration class, and what differs from the sizes above.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "rope_parameters": _PLAIN}),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {"sliding_window": 5, "head_dim": 12, "rope_parameters": _PLAIN},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": [*_KINDS, "sliding_attention"],
            "query_pre_attn_scalar": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": _PLAIN,
            },
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"rope_parameters": _PLAIN}),
    "llama4_text": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 24,
            "moe_layers": [],
            "no_rope_layers": [1, 0],
            "layer_types": ["full_attention"] * 2,
            "attn_temperature_tuning": False,
            "use_qk_norm": True,
            "rope_parameters": _PLAIN,
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": _PLAIN},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "rope_parameters": _PLAIN,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": None,
            "attn_implementation": "eager",  # transformers' sdpa leaves the softcap out
            "rope_parameters": _PLAIN,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": _PLAIN,
        },
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            "sliding_window": 5,
            "layer_types": _KINDS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": _PLAIN,
            },
        },
    ),
    "glm4": (
        "Glm4ForCausalLM",
        "Glm4Config",
        {"head_dim": 8, "attention_bias": True, "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": 5, "layer_types": _KINDS, "rope_parameters": _PLAIN},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {"attention_multiplier": 0.3, "rope_parameters": _PLAIN},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "sliding_window": 5,
            "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
        },
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {"sliding_window": 5, "layer_types": _KINDS, "rope_parameters": _PLAIN},
    ),
}


@dataclasses.dataclass
class Run:
    """What the layers of one forward read; set before the forward."""

    scope: AttentionScope | None = None
    positions: Tensor | None = None


class Attention(nn.Module):
    """Our layer in the place of a transformers one."""

    def __init__(self, layer: GroupedQueryAttention, run: Run) -> None:
        super().__init__()
        self.layer = layer
        self.run = run

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states, self.run.scope, self.run.positions), None


def config_of(family: str) -> Any:
    """The configuration of a tiny model."""
    _, config, changes = FAMILIES[family]
    return getattr(transformers, config)(**(_SIZES | copy.deepcopy(changes)))


@functools.cache
def model_of(family: str) -> Any:
    """A tiny model with random weights, norms included; do not change it."""
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family][0])(config_of(family)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
            elif "self_attn" in name:  # the usual ones are so small that any attention would do
                parameter.mul_(10)
    return model


class OnOurs:
    """A copy of a tiny model in which every attention is ours.

    Args:
        family: of the model.
        backend: of every layer.
        options: of the backend.
    """

    def __init__(self, family: str, backend: str, options: dict[str, Any] | None = None) -> None:
        peer = model_of(family)
        self.model = copy.deepcopy(peer)
        self.run = Run()
        for index, block in enumerate(self.model.model.layers):
            spec = AttentionSpec.from_hf(peer.config, layer=index)
            layer = GroupedQueryAttention.from_spec(spec, backend=backend, backend_options=options).eval()
            layer.load_hf_weights(peer.state_dict(), peer.config, layer=index)
            block.self_attn = Attention(layer, self.run)

    def __call__(self, ids: Tensor, layout: MaskLayout, positions: Tensor) -> Tensor:
        self.run.scope, self.run.positions = AttentionScope(layout), positions
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits
