"""The command line with input that nobody means: one short message, nothing half-written, nothing on stdout."""

from __future__ import annotations

import os

import pytest

from command_line import runner
from polyattn._layout import MaskLayout
from polyattn_cli import cli

LONG = "9" * 5000
CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 64, '
    '"rope_theta": 10000.0}'
)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """``refused(argument, ...)``: the message of a refusal in the test's folder, which has a ``config.json``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)

    def invoke(*arguments):
        before = sorted(tmp_path.iterdir())
        result = runner().invoke(cli, [*arguments], prog_name="polyattn")
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert isinstance(result.exception, SystemExit)
        assert sorted(tmp_path.iterdir()) == before
        return result.stderr.partition("Error: ")[2].strip()

    return invoke


@pytest.mark.parametrize(
    "arguments",
    [
        [LONG],
        [f"--{LONG}"],
        ["list", LONG],
        ["mask", LONG],
        ["mask", "full", "--q-len", LONG],
        ["mask", "causal", "--out", LONG],
        ["explain", "causal", "--dtype", LONG],
        ["explain", "causal", "--scale", "x" * 5000],
        ["check", "eager", "--only", LONG],
        ["check", "eager", "--only", "attributes", "--device", LONG],
        ["new", "fast", "--into", LONG],
        ["rope", "config.json", "--plot", LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_a_message_is_short_however_long_the_argument(arguments, refused):
    assert 0 < len(refused(*arguments)) <= 500


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "the layout must fit into memory, got --q-len 7; give fewer queries and keys"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "the layout must fit into memory"),
    ],
)
@pytest.mark.parametrize("command", ["mask", "explain", "bench"])
def test_a_layout_that_does_not_fit_into_memory_is_refused_with_its_sizes(command, error, said, refused, monkeypatch):
    def full(*_arguments, **_options):
        raise error

    monkeypatch.setattr(MaskLayout, "causal", full)
    assert said in refused(command, "causal", "--q-len", "7")


def test_a_mask_that_is_too_large_to_be_drawn_is_refused_before_it_is_made(refused, monkeypatch):
    monkeypatch.setattr(MaskLayout, "packed", lambda *_arguments, **_options: pytest.fail("it is made"))
    assert "got 2147483647 x 2147483647; draw a shorter one" in refused("mask", "packed", "--lengths", "2147483647")


def test_a_rope_that_cannot_be_computed_prints_nothing(refused):
    assert "length must be None, got 3" in refused("rope", "config.json", "--length", "3")


def test_a_picture_that_cannot_be_written_whole_leaves_the_old_one(refused, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "mask.png").write_text("mine")

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    said = refused("mask", "causal", "--out", "mask.png")
    assert said == "--out cannot write 'mask.png': No space left on device; name another file"
    assert (tmp_path / "mask.png").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="there are no links here")
def test_a_link_to_a_picture_stays_a_link_and_a_loop_of_links_is_refused(refused, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "link.png").symlink_to("mask.png")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot write 'loop': Too many levels of symbolic links" in refused("mask", "causal", "--out", "loop")
    assert runner().invoke(cli, ["mask", "causal", "--out", "link.png"]).exit_code == 0
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("author", ["a\nb", "\udcff", "\x1b[31m"])
def test_an_author_is_one_line_of_text(author, refused):
    assert refused("new", "fast", "--author", author).startswith("Invalid value for --author: must be one line of text")


def test_a_link_without_a_target_is_not_written_through(refused, tmp_path):
    (tmp_path / "polyattn-fast").symlink_to("elsewhere")
    assert "polyattn-fast exists and is left as it is" in refused("new", "fast")


def test_a_path_that_the_terminal_cannot_show_is_written_in_escapes(run_python, tmp_path):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "\udcff.png")  # as Python has a byte that is not UTF-8
    done = run_python(["-m", "polyattn", "mask", "causal", "--out", path])
    assert done.stdout.strip().endswith("\\udcff.png")
