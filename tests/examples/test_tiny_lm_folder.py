"""What a run leaves in its folder, whatever ends it, and who else may write there."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from filelock import FileLock

from tiny_lm import checkpoint
from tiny_lm.cli import Stop, _train_in_process, commands
from tiny_lm.report import Report
from tiny_lm.train import Run, peak_memory


@pytest.fixture
def train(settings, write_config, tmp_path):
    """Train into ``out`` of the test's folder, and give the result of the command."""
    path = write_config(settings)

    def run(*options):
        return CliRunner().invoke(commands, ["train", str(path), "--out", str(tmp_path / "out"), *map(str, options)])

    return run


def message(result):
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_one_writes(train, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        for options in ((), ("--overwrite",)):
            assert "another run writes to" in message(train(*options))
    assert not (tmp_path / "out" / "report.json").exists()
    assert train().exit_code == 0


def test_two_runs_that_start_at_once_leave_one_result_and_one_refusal(settings, write_config, tmp_path):
    command = [sys.executable, "-m", "tiny_lm", "train", str(write_config(settings | {"steps": 40}))]
    command += ["--out", str(tmp_path / "out")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate()[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2], errors
    assert any("another run writes to" in text or "exists" in text for text in errors)
    assert len(Report.read(tmp_path / "out").losses) == 40


def test_a_run_that_was_killed_before_its_report_gets_one_by_resume(train, tmp_path):
    assert train().exit_code == 0
    whole = Report.read(tmp_path / "out")
    (tmp_path / "out" / "report.json").unlink()
    assert train("--resume").exit_code == 0
    late = Report.read(tmp_path / "out")
    assert late.losses == whole.losses
    assert late.tokens_per_second is None, "this process took no step"
    assert "nothing to do" in train("--resume").output


def test_what_a_killed_run_left_half_written_is_removed(train, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    half = out / ".checkpoint.pt.4711.unfinished"
    half.write_bytes(b"half")
    assert train().exit_code == 0
    assert not half.exists()


@pytest.mark.parametrize("name", ["checkpoint.pt", "report.json"])
def test_a_folder_with_the_name_of_a_result_is_refused_before_training(train, tmp_path, monkeypatch, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    monkeypatch.setattr(Run, "step", lambda run: pytest.fail("it trains"))
    for options in ((), ("--overwrite",), ("--resume",)):
        assert f"{name} must be a file or absent, got a folder" in message(train(*options))


def test_a_full_disk_is_said_with_the_path(train, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    text = message(train())
    assert "checkpoint.pt cannot be written: No space left on device; what was there before is unchanged" in text
    assert str(tmp_path) in text.replace(" ", "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_log_gets_lines_as_the_run_goes(train):
    lines = [line for line in train("--attn-backend", "eager").output.splitlines() if line.startswith("eager")]
    assert [line.split("  ")[1] for line in lines] == [f"step {number} of 6" for number in range(1, 7)]
    assert all("loss" in line and "tokens/s" in line for line in lines)


def test_memory_is_unknown_where_the_system_does_not_say(monkeypatch):
    real = builtins.__import__

    def without_resource(name, *rest):
        if name == "resource":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    monkeypatch.setattr(builtins, "__import__", without_resource)
    assert peak_memory() is None


def test_sigterm_reaches_the_run_that_the_demo_started(settings, write_config, tmp_path):
    path, stop = write_config(settings | {"steps": 100000}), Stop()

    def ask_to_stop():
        while not (tmp_path / "out" / "checkpoint.pt").exists():
            time.sleep(0.05)
        stop.number = 15

    asking = threading.Thread(target=ask_to_stop)
    asking.start()
    assert _train_in_process(path, ((), ("--attn-backend", "eager")), tmp_path / "out", stop) == 143
    asking.join()
    assert checkpoint.load(tmp_path / "out" / "checkpoint.pt")["losses"] == Report.read(tmp_path / "out").losses


def test_a_folder_whose_name_is_too_long_is_refused_in_short(settings, write_config):
    result = CliRunner().invoke(commands, ["train", str(write_config(settings)), "--out", "x" * 5000])
    assert "File name too long; give another --out" in message(result)
    assert len(result.output) < 400


def test_a_model_that_does_not_fit_into_memory_is_refused(train, monkeypatch):
    def full(*_arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(Run, "__init__", full)
    assert "there is not enough memory; take a smaller model" in message(train())
