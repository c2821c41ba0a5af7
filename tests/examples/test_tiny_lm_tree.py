"""``tiny-lm tree``: responses to one prompt as rows and as a tree."""

import pytest


@pytest.fixture
def run(tiny_lm, settings, write_config, tmp_path):
    path = write_config(settings)

    def start(*more):
        sizes = ("--prompt", 40, "--response", 12, "--responses", 4, "--steps", 3)
        return tiny_lm("tree", path, "--out", tmp_path / "out", *sizes, *more)

    return start


def test_a_tree_has_fewer_tokens_the_same_losses_and_keeps_less_for_the_backward(run, tmp_path):
    result = run()
    assert result.exit_code == 0, result.output
    rows, tree, verdict, picture = result.output.splitlines()
    assert rows.startswith("rows: 208 tokens, ")
    assert int(tree.split()[1]) < 100
    saved = [int(line.rpartition(" s a step, ")[2].split()[0].replace(",", "")) for line in (rows, tree)]
    assert saved[1] <= saved[0]
    assert float(verdict.rpartition(" ")[2]) < 1e-4
    assert picture.endswith("tree.png")
    assert (tmp_path / "out" / "tree.png").stat().st_size > 1000


def test_a_picture_is_not_overwritten_unasked(run):
    assert run().exit_code == 0
    again = run()
    assert again.exit_code == 2
    assert "--overwrite to replace it" in again.output
    assert run("--overwrite").exit_code == 0
