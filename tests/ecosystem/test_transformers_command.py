"""``python -m polyattn_transformers``: any module or script runs with the backends registered."""

from __future__ import annotations

import json
import sys

import pytest

from polyattn_transformers.__main__ import main

REPORT = """\
import json, sys
from transformers import AttentionInterface
found = [name for name in AttentionInterface().valid_keys() if name.startswith("polyattn_")]
print(json.dumps([__name__, sys.argv[1:], sys.path[0], found]))
"""


def test_a_module_runs_as_main_with_its_arguments_and_the_names(tmp_path, run_python):
    (tmp_path / "job.py").write_text(REPORT, encoding="utf-8")
    done = run_python(["-m", "polyattn_transformers", "-m", "job", "--config", "run.yaml", "-m"])
    name, arguments, folder, found = json.loads(done.stdout)
    assert (name, arguments) == ("__main__", ["--config", "run.yaml", "-m"])
    assert folder in ("", str(tmp_path))
    assert {"polyattn_eager", "polyattn_sdpa", "polyattn_auto"} <= set(found)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("polyattn")]
    assert line == f"polyattn: registered {', '.join(sorted(found, key=line.index))}; running job"


@pytest.fixture
def restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_script_finds_its_neighbours_as_python_lets_it(tmp_path, capsys, restored):
    (tmp_path / "neighbour_of_a_script.py").write_text("WORD = 'found'\n", encoding="utf-8")
    script = tmp_path / "job.py"
    script.write_text("import sys, neighbour_of_a_script as n\nprint(n.WORD, sys.argv)\n", encoding="utf-8")
    main([str(script), "--steps", "3"])
    sys.modules.pop("neighbour_of_a_script")
    assert capsys.readouterr().out == f"found {[str(script), '--steps', '3']}\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_process_of_several_says_what_was_done(tmp_path, capsys, restored, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    (tmp_path / "job.py").write_text("", encoding="utf-8")
    main(["--allow-untested", str(tmp_path / "job.py")])
    assert capsys.readouterr().err.count("polyattn: registered") == int(rank == "0")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give -m MODULE or a script to run, got nothing"),
        (["-m"], "-m must be followed by the name of a module, got nothing"),
        (["--config", "x"], "give -m MODULE or a script to run, got --config; options of a script stand behind it"),
        (["no.py"], "the script must be a file, got no.py, which is not there; give a module as -m NAME"),
        (["-m", "no.such.module"], "got no.such.module, which is not found"),
        (["-m", ".relative"], "got .relative, which is not found"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert text in said.err


def test_an_error_of_the_module_is_its_own(tmp_path, restored):
    (tmp_path / "job.py").write_text("raise RuntimeError('of the job')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="of the job"):
        main([str(tmp_path / "job.py")])


def test_help_says_how_launchers_take_it(capsys):
    main(["--help"])
    assert "torchrun --nproc-per-node 2 -m polyattn_transformers -m MODULE" in capsys.readouterr().out
