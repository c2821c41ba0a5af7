"""``tiny-lm sample``: text from a checkpoint, byte by byte from caches."""

import pytest
import torch

from polyattn import MaskLayout
from tiny_lm import config
from tiny_lm.sample import sample
from tiny_lm.train import Run

WINDOWS = [{"layers": [0], "window": 5}]


@pytest.fixture
def trained(tiny_lm, settings, write_config, tmp_path):
    """A config with a layer that has a window, and the folder of its checkpoint."""
    path, out = write_config({**settings, "groups": WINDOWS}), tmp_path / "out"
    assert tiny_lm("train", path, "--out", out).exit_code == 0
    return path, out


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_greedy_bytes_are_those_that_the_full_forward_ranks_first(settings, write_config, backend):
    run = Run(config.load(write_config({**settings, "groups": WINDOWS}), attn_backend=backend))
    prompt = b"def f("
    text = list(prompt) + list(sample(run, prompt, 20))
    for length in range(len(prompt), len(text)):
        with torch.no_grad():
            scores = run.model(torch.tensor([text[:length]]), MaskLayout.causal(length), torch.arange(length)[None])
        assert int(scores[0, -1].argmax()) == text[length]


def test_a_prompt_comes_back_with_text_and_tokens_per_second(tiny_lm, trained):
    path, out = trained
    result = tiny_lm("sample", path, "--out", out, "--prompt", "import ", "--tokens", "30")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("import ")
    assert result.output.rstrip().endswith("tokens/s")
    assert "30 bytes, " in result.output
    text = result.output.rpartition("\n30 bytes")[0]
    again = tiny_lm("sample", path, "--out", out, "--prompt", "import ", "--tokens", "30", "--attn-backend", "eager")
    assert again.output.startswith(text)


def test_a_temperature_draws_and_a_seed_draws_the_same_again(settings, write_config):
    run = Run(config.load(write_config(settings)))
    drawn = [bytes(sample(run, b"a", 40, temperature=5.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--prompt", ""), "--prompt must be at least one character, got none"),
        (("--tokens", "0"), "0 is not in the range x>=1"),
        (("--temperature", "-1"), "-1.0 is not in the range x>=0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(tiny_lm, trained, options, text):
    path, out = trained
    result = tiny_lm("sample", path, "--out", out, *options)
    assert result.exit_code == 2
    assert text in result.output


def test_a_folder_without_a_checkpoint_is_named(tiny_lm, settings, write_config, tmp_path):
    result = tiny_lm("sample", write_config(settings), "--out", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "checkpoint.pt" in result.output
