"""A tiny model with its tokenizer and a file of texts on disk: what a user brings to a trainer."""

from __future__ import annotations

import json
import pydoc_data.topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def brought(tmp_path_factory):
    """A folder with ``model`` and ``data.jsonl``."""
    folder = tmp_path_factory.mktemp("brought")
    texts = list(pydoc_data.topics.topics.values())[:20]
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<unk>", "<pad>", "</s>"]
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    lines = [json.dumps({"text": text[start : start + 100]}) for text in texts for start in range(0, 400, 100)]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder
