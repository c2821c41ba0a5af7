"""Random transformers models small enough for a test: one for each way of attending, and inputs for them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

VOCABULARY = 99
TOKENS = 11
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def _decoder(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (DECODER | changes).items() if value is not ...}


@dataclasses.dataclass(frozen=True)
class Zoo:
    """How to build one model, and what it takes.

    Attributes:
        kind: class name of the model in transformers.
        config: class name of the configuration, and its arguments.
        inputs: makes the inputs from a seed.
        live: which positions of the logits count, given the inputs.
        needs: features that a backend must have.
    """

    kind: str
    config: str
    arguments: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    needs: frozenset[str] = frozenset()


def ids(rows: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def left_padding() -> Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    return mask


def right_padding() -> Tensor:
    return left_padding().flip(1)


def _text() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": left_padding()}


def _encoder_text() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": right_padding()}


def _pair() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": right_padding(), "decoder_input_ids": ids(length=6)}


def _speech() -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": sound, "decoder_input_ids": ids(length=6)}


def _picture() -> dict[str, Tensor]:
    """Text around one picture of four patches in each row; positions have three axes there."""
    tokens = ids().clamp(min=10)
    tokens[:, 2], tokens[:, 3:7], tokens[:, 7] = 3, 5, 4
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(8, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "mm_token_type_ids": (tokens == 5).long(),
    }


_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}

ZOO: dict[str, Zoo] = {
    "llama": Zoo("LlamaForCausalLM", "LlamaConfig", _decoder(), _text),
    "qwen3": Zoo("Qwen3ForCausalLM", "Qwen3Config", _decoder(), _text),
    "mistral": Zoo("MistralForCausalLM", "MistralConfig", _decoder(sliding_window=5), _text),
    "gemma2": Zoo(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _decoder(sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=4),
        _text,
        frozenset({"softcap"}),
    ),
    "gemma3": Zoo(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _decoder(num_hidden_layers=3, sliding_window=5, layer_types=_KINDS, query_pre_attn_scalar=4),
        _text,
    ),
    "gpt_oss": Zoo(
        "GptOssForCausalLM",
        "GptOssConfig",
        _decoder(
            sliding_window=5,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        _text,
        frozenset({"sinks"}),
    ),
    "phi3": Zoo(
        "Phi3ForCausalLM",
        "Phi3Config",
        _decoder(head_dim=..., original_max_position_embeddings=16, rope_parameters=_LONGROPE),
        _text,
    ),
    "deepseek_v3": Zoo(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _decoder(
            head_dim=...,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=10,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        _text,
        frozenset({"unequal_width"}),
    ),
    "qwen2_vl": Zoo(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": _decoder(
                head_dim=..., rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            ),
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
                "spatial_merge_size": 1,
                "temporal_patch_size": 2,
            },
            "image_token_id": 5,
            "video_token_id": 6,
            "vision_start_token_id": 3,
            "vision_end_token_id": 4,
        },
        _picture,
    ),
    "bert": Zoo("BertForMaskedLM", "BertConfig", _ENCODER, _encoder_text),
    "modernbert": Zoo(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _ENCODER
        | {"local_attention": 6, "global_attn_every_n_layers": 2}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        _encoder_text,
    ),
    "t5": Zoo(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
        _pair,
        frozenset({"bias", "bias_grad"}),
    ),
    "whisper": Zoo(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": 10,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        _speech,
    ),
}


def config_of(name: str) -> Any:
    zoo = ZOO[name]
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # tiny numbers look like mistakes to it
    try:
        return getattr(transformers, zoo.config)(**zoo.arguments)
    finally:
        transformers.logging.set_verbosity(level)


def model_of(name: str, implementation: str = "eager", **changes: Any) -> Any:
    """A model with weights large enough for attention to matter, in evaluation mode."""
    if name == "t5" and Version(transformers.__version__) < Version("5.15"):
        pytest.skip("T5 uses the attention interface since transformers 5.15")
    config = config_of(name)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, ZOO[name].kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def live_tokens(inputs: dict[str, Tensor]) -> Tensor:
    """Which places of the logits count: those of a text that is not padding, and all of a decoder's."""
    if "decoder_input_ids" in inputs:
        return torch.ones_like(inputs["decoder_input_ids"], dtype=torch.bool)
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
