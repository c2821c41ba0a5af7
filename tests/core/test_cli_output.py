"""The command line where its output cannot be written, and with input that no person would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def shell(line, cwd):
    command = line.replace("polyattn", f"{sys.executable} -m polyattn", 1)
    return subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", ["list", "list --json", "--help", "mask causal"])
def test_a_full_disk_behind_the_output_is_one_line_and_status_2(command, tmp_path):
    done = shell(f"polyattn {command} > /dev/full", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: the output cannot be written: [Errno 28] No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="closing an output is a matter of POSIX shells")
@pytest.mark.parametrize("command", ["list", "list --json", "--version"])
def test_a_closed_output_leaves_the_exit_status(command, tmp_path):
    done = shell(f"polyattn {command} >&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_has_seen_enough_causes_no_message(tmp_path):
    assert shell("polyattn list | true", tmp_path).stderr == ""


def test_json_that_is_nested_too_deeply_is_one_line(run_python, tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    done = run_python(["-m", "polyattn", "rope", "config.json"], status=2)
    assert done.stderr == "Error: config.json cannot be read: it is nested too deeply\n"


def test_a_plugin_with_an_endless_name_is_refused_before_anything_is_written(run_python, tmp_path):
    done = run_python(["-m", "polyattn", "new", "a" * 300], status=2)
    assert "a plugin's name must have at most 100 letters, got 300" in " ".join(done.stderr.replace("│", " ").split())
    assert not [*tmp_path.glob("polyattn-*")]


def test_doctor_names_a_plugin_that_ends_the_process(run_python, site, make_dist):
    folder = site.parent / "ends"
    folder.mkdir()
    make_dist("acme-exit", backends={"acme": "acme_exit:B"}).unpack(folder)
    (folder / "acme_exit.py").write_text("import os\nos._exit(0)\n")
    done = run_python(["-m", "polyattn", "doctor"], path=[folder], status=1)
    assert "it calls os._exit(0), which ends every program that loads it" in done.stdout
