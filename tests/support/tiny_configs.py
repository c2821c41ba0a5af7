"""A tiny configuration for any model class of transformers, made from the defaults of its own configuration class.

Sizes are set by their names, lists with one entry per layer keep the first layer of each kind, and composed
configurations shrink part by part. ``CHANGES`` holds what cannot be seen from a name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 99
WINDOW = 5

_NAMES = {
    32: """
        attention_hidden_size d_model dim_model emb_dim embed_dim embedding_dim hidden_dim hidden_size
        hidden_size_global input_embedding_size input_size lru_width n_embd out_hidden_size output_embedding_size
        projector_input_dim projector_output_dim pronunciation_embed_dim shape_embed_dim word_embed_proj_dim
    """,
    48: """
        d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim feed_forward_size ffn_dim
        ffn_hidden_size intermediate_size intermediate_size_mlp mlp_dim n_inner
    """,
    16: """
        backbone_hidden_size expert_ffn_hidden_size moe_intermediate_size moe_shared_expert_intermediate_size
        o_lora_rank q_lora_rank router_hidden_size shared_expert_intermediate_size shared_intermediate_size
    """,
    12: "qk_head_dim",
    8: """
        adapter_rank attention_head_size chunk_size d_head d_rel dim_head gated_norm_rank hc_lowrank head_dim
        hidden_size_per_layer_input index_head_dim kv_channels kv_lora_rank laurel_rank linear_head_dim
        linear_key_head_dim linear_value_head_dim mamba_chunk_size mamba_d_head mamba_d_state mamba_dt_rank
        mamba_head_dim num_mel_bins prompt_length qk_nope_head_dim rel_extent ssm_state_size state_size swa_head_dim
        time_step_rank v_head_dim
    """,
    WINDOW: """
        attention_chunk_size attention_window_size keep_window_size local_attention sliding_window
        sliding_window_size window_size
    """,
    4: """
        attention_heads decoder_attention_heads encoder_attention_heads index_n_heads index_topk linear_num_heads
        linear_num_key_heads linear_num_value_heads moe_num_experts n_head n_heads n_routed_experts
        num_attention_heads num_decoder_attention_heads num_encoder_attention_heads num_experts num_heads
        num_local_experts qk_rope_head_dim swa_num_attention_heads zero_expert_num
    """,
    2: """
        decoder_layers depth encoder_layers index_topk_blocks moe_k moe_top_k moe_topk n_group n_layer n_layers
        num_blocks num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token num_hidden_layers
        num_layers num_layers_per_stack top_k_experts
    """,
    1: "num_codebooks topk_group",
    64: """
        context_length max_position_embeddings max_seq_len max_source_positions max_target_positions
        model_max_length n_ctx n_positions num_position_embeddings original_max_position_embeddings
    """,
    VOCABULARY: """
        decoder_vocab_size encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size vocab_size
        vocab_size_per_layer_input
    """,
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_HEADS = ("num_attention_heads", "n_heads", "n_head", "swa_num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_TWO_WINDOWS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MAMBA = {"mamba_n_heads": 8}
_DRAFT = {
    "text_config": {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": _TWO_WINDOWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": WINDOW,
        "vocab_size": VOCABULARY,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }
}

#: What a class needs beside its sizes, by the type of its configuration; ``...`` takes a key away.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "head_dim": 16,
        "rope_parameters": {kind: _ROPE | {"mrope_section": [2, 2, 4]} for kind in _TWO_WINDOWS},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _TWO_WINDOWS * 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "intermediate_size": 48,
    },
    "gemma4_assistant": _DRAFT,
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_unified_assistant": _DRAFT,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": ...},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": ...},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral": {"layer_types": _TWO_WINDOWS},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 2,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": dict.fromkeys(("attention_head_dim", "attention_hidden_size", "hybrid_layer_ids", "kv_channels"), ...)
    | dict.fromkeys(("mamba_headdim", "num_query_groups"), ...)
    | {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {
        "num_experts_per_tok": 1,
        "num_key_value_heads": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": WINDOW,
    },
}


def tiny_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """A configuration of the class ``kind`` for a decoder of a few thousand parameters."""
    base = kind()
    arguments = _shrunk(base)
    if hasattr(base, "is_decoder"):
        arguments["is_decoder"] = True
    _change(arguments, CHANGES.get(kind.model_type, {}))
    return kind(**arguments)


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    plain = config.to_dict()
    per_layer, keep = _layers(plain)
    small: dict[str, Any] = {name: [value[index] for index in keep] for name, value in per_layer.items()}
    tokens = iter(range(90, VOCABULARY))
    for name, value in plain.items():
        part = getattr(config, name) if name in config.sub_configs else None
        if isinstance(part, PretrainedConfig):
            small[name] = _shrunk(part) | {"model_type": part.model_type}
        elif name in _LAYERS and isinstance(value, int):
            small[name] = len(keep)
        elif type(value) is int and value > 0:
            small |= _size(plain, name, value, tokens)
    if "sliding_window" in plain:
        small |= {"sliding_window": WINDOW} | ({"use_sliding_window": True} if "use_sliding_window" in plain else {})
        if set(small.get("layer_types", ())) == {"full_attention"}:
            small["layer_types"] = _TWO_WINDOWS
    if "qk_rope_head_dim" in plain:
        small["head_dim"] = _SIZES["qk_rope_head_dim"]
    elif "head_dim" in plain:
        small["head_dim"] = _SIZES["head_dim"]
    return small


def _layers(plain: dict[str, Any]) -> tuple[dict[str, list[Any]], list[int]]:
    """The lists with one entry per layer, and the indices of the first layer of each kind, at least two."""
    count = next((plain[name] for name in _LAYERS if isinstance(plain.get(name), int)), 0)
    lists = {name: value for name, value in plain.items() if isinstance(value, list) and len(value) == count > 2}
    first: dict[str, int] = {}
    for index, kinds in enumerate(zip(*lists.values(), strict=True)):
        first.setdefault(repr(kinds), index)
    keep = sorted(first.values())[:5]
    return lists, keep if len(keep) > 1 else [0, 1]


def _size(plain: dict[str, Any], name: str, value: int, tokens: Iterator[int]) -> dict[str, int]:
    if name in _KV_HEADS:
        heads = next((plain[other] for other in _HEADS if plain.get(other)), value)
        return {name: _SIZES[_HEADS[0]] if value >= heads else min(value, 2)}
    if re.search(r"token_(id|index)$", name) and value >= 10:
        return {name: next(tokens)}
    return {name: _SIZES[name]} if name in _SIZES else {}


def _change(arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if value is ...:
            arguments.pop(name, None)
        elif isinstance(value, dict) and isinstance(arguments.get(name), dict):
            _change(arguments[name], value)
        else:
            arguments[name] = copy.deepcopy(value)
