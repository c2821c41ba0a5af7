"""A tree of rows in models of transformers: each row has the logits and gradients that it has alone, or is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

import polyattn_transformers
from polyattn import LayoutError, MaskLayout, pack_tree
from polyattn_transformers import packed

ROWS = [[4, 5, 6, 7, 8, 9, 10], [4, 5, 6, 11, 12], [4, 5, 6, 7, 8, 13, 14, 15], [16, 17], [4, 5]]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
MODELS = {
    "Llama": SMALL,
    "Qwen3": SMALL | {"head_dim": 8},
    "Mistral": SMALL | {"sliding_window": 3},
    "Gemma3": SMALL | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 32},
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


@pytest.fixture(scope="module")
def tree():
    return pack_tree(ROWS)


def model_of(family, implementation, changes=None):
    """With weights that make logits of about 6."""
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**copy.deepcopy(MODELS[family] if changes is None else changes))
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))
    made = model._from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", MODELS)
def test_every_row_has_the_logits_and_gradients_that_it_has_alone(tree, family, backend):
    eager, ours = model_of(family, "eager"), model_of(family, f"polyattn_{backend}")
    together = tree.rows(ours(tree.tokens, **packed(tree=tree)).logits)
    alone = [eager(torch.tensor([row])).logits[0] for row in ROWS]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    weights = [torch.randn_like(logits) for logits in alone]
    for found in (together, alone):
        sum((logits * weight).sum() for logits, weight in zip(found, weights, strict=True)).backward()
    parameters = zip(ours.parameters(), eager.parameters(), strict=True)
    for one, other in ((a.grad, b.grad) for a, b in parameters if b.grad is not None):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


REFUSED = {
    "labels": (lambda tree: {"labels": tree.tokens}, r"labels must not be given beside packed\(tree=...\)"),
    "other positions": (
        lambda tree: {"position_ids": torch.arange(tree.tokens.shape[1])[None]},
        "position_ids must be the depths of the tree's tokens",
    ),
    "documents": (lambda tree: {"segment_ids": tree.tokens}, r"packed\(tree=...\) and segment_ids both say who sees"),
    "fewer tokens": (
        lambda tree: {"input_ids": tree.tokens[:, :5]},
        "must cover the tokens of the call, got 14 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_the_tree_is_refused_by_name(tree, name):
    change, text = REFUSED[name]
    ours = model_of("Llama", "polyattn_sdpa")
    with pytest.raises(LayoutError, match=text):
        ours(**{"input_ids": tree.tokens, **packed(tree=tree), **change(tree)})


def test_models_that_no_tree_fits_are_refused(tree):
    chunked = SMALL | {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    both_ways = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    bert = transformers.BertModel._from_config(
        transformers.BertConfig(**both_ways, intermediate_size=32), attn_implementation="polyattn_sdpa"
    )
    roberta = transformers.RobertaForCausalLM._from_config(
        transformers.RobertaConfig(**both_ways, intermediate_size=32, is_decoder=True, pad_token_id=1),
        attn_implementation="polyattn_sdpa",
    )
    for model, text in (
        (model_of("Llama4", "polyattn_sdpa", chunked), "must go into causal attention .*, got a mask with chunk"),
        (bert, "must go into causal attention .*, got a mask with no causality"),
        (roberta, "RobertaForCausalLM cannot run a tree: it numbers tokens from behind its padding index"),
    ):
        with pytest.raises(LayoutError, match=text):
            model(tree.tokens, **packed(tree=tree))


def test_only_a_causal_tree_alone_is_a_tree(tree):
    layout = MaskLayout.tree([-1, 0], [2, 2], causal=False)
    with pytest.raises(LayoutError, match=r"packed\(\) must get tree= alone, got also lengths"):
        packed([14], tree=tree)
    with pytest.raises(LayoutError, match=r"tree must be what polyattn.pack_tree\(rows\) returns, got list"):
        packed(tree=[[1, 2]])
    with pytest.raises(LayoutError, match="the layout of tree must be a causal tree without further rules, got both"):
        packed(tree=SimpleNamespace(layout=layout))
    mask = packed(tree=SimpleNamespace(layout=MaskLayout.tree([-1, 0], [2, 2])))["attention_mask"]
    assert mask.to(torch.bfloat16) is mask
    assert mask.to("meta").device.type == "meta"
