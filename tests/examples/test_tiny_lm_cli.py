from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn
from polyattn.registry.discovery import BACKENDS
from polyattn.registry.names import FIRST_PARTY
from tiny_lm import checkpoint, report
from tiny_lm.report import Report, largest_difference
from tiny_lm.train import Run


def refused(result):
    """The message of a refusal: status 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_a_run_leaves_a_checkpoint_and_a_report(tiny_lm, settings, write_config, tmp_path):
    out = tmp_path / "out"
    result = tiny_lm("train", write_config(settings), "--out", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [".lock", "checkpoint.pt", "report.json"]
    stored = Report.read(out)
    assert (stored.backend, stored.distribution, len(stored.losses)) == (
        "sdpa",
        f"polyattn-sdpa {polyattn.__version__}",
        6,
    )
    assert stored.losses == checkpoint.load(out / "checkpoint.pt")["losses"]


def test_the_command_line_replaces_the_backend_and_the_number_of_steps(tiny_lm, settings, write_config, tmp_path):
    out = tmp_path / "out"
    assert (
        tiny_lm("train", write_config(settings), "--out", out, "--attn-backend", "eager", "--steps", 2).exit_code == 0
    )
    assert (Report.read(out).backend, len(Report.read(out).losses)) == ("eager", 2)


def test_resume_on_the_command_line_gives_the_uninterrupted_curve(tiny_lm, settings, write_config, tmp_path):
    path = write_config(settings)
    assert tiny_lm("train", path, "--out", tmp_path / "whole").exit_code == 0
    assert tiny_lm("train", path, "--out", tmp_path / "parts", "--steps", 3).exit_code == 0
    assert tiny_lm("train", path, "--out", tmp_path / "parts", "--resume").exit_code == 0
    assert Report.read(tmp_path / "parts").losses == Report.read(tmp_path / "whole").losses


BAD_CONFIGS = {
    "misspelt backend": ({"attn_backend": "sdap"}, ["sdap", "sdpa", "eager"]),
    "sequence parallelism": ({"attn_backend": "usp"}, ["usp", "polyattn-context-parallel", "sdpa"]),
    "backend of a wrong type": ({"attn_backend": 3}, ["attn_backend", "3"]),
    "unknown key": ({"optimizer": {}}, ["optimizer is unknown, did you mean optimiser?"]),
    "misspelt attention key": ({"attn_backnd": "sdpa"}, ["attn_backnd is unknown, did you mean attn_backend?"]),
    "unknown key in a section": (
        {"data": {"rows": 2, "row_lenght": 9}},
        ["data.row_lenght", "data.row_length is missing"],
    ),
    "attention in a section of its own": ({"attention": {"attn_backend": "eager"}}, ["attention is unknown"]),
    "wrong type": ({"steps": "many"}, ["steps must be a whole number of at least 1, got 'many'"]),
    "a number that YAML reads as text": (
        {"optimiser": {"learning_rate": "1e-3"}},
        ["learning_rate must be a number", "got '1e-3'; write 1.0e-3"],
    ),
    "a truth value for a number": ({"steps": True}, ["steps must be a whole number of at least 1, got True"]),
    "out of range": ({"steps": 0}, ["steps must be a whole number of at least 1, got 0"]),
    "a section that is not a mapping": ({"model": 3}, ["model must be a mapping of layers, hidden_size,", "got 3"]),
    "a missing section": ({"model": None}, ["model must be a mapping", "got None"]),
    "a batch larger than the text": ({"data": {"rows": 10**6, "row_length": 512}}, ["a text of"]),
    "a rope that is not a mapping": ({"rope": "default"}, ["rope", "mapping", "str"]),
    "a number that no machine has": ({"steps": 10**400}, ["steps must be a whole number of at least 1 and below 2147"]),
    "a width that no machine has": (
        {"softcap": 10**400, "window": 0},
        ["softcap: must be a positive", "window: must"],
    ),
    "a group for no layer": ({"groups": [{"layers": [9], "window": 3}], "stpes": 1}, ["groups[0].layers", "stpes is"]),
    "a width of its own in a group": (
        {"groups": [{"layers": [1], "window": 3}, {"layers": [0], "hidden_size": 64}, {"layers": [9], "window": 3}]},
        ["groups[1].hidden_size must be that of the model, 32, got 64; leave it out", "groups[2].layers must lie"],
    ),
    "wrong backend option": ({"backend_options": {"speed": 11}}, ["speed"]),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_one_message_and_writes_nothing(tiny_lm, settings, write_config, tmp_path, case):
    change, said = BAD_CONFIGS[case]
    out = tmp_path / "out"
    for command in ("train", "demo"):
        message = refused(tiny_lm(command, write_config(settings | change), "--out", out))
        for part in said:
            assert part in message, f"{part!r} in {message!r}"
        assert not out.exists()


def test_a_known_backend_that_is_not_installed_comes_with_its_pip_command(
    tiny_lm, settings, write_config, tmp_path, monkeypatch
):
    monkeypatch.setitem(FIRST_PARTY[BACKENDS], "absent", "polyattn-absent")
    message = refused(tiny_lm("train", write_config(settings | {"attn_backend": "absent"}), "--out", tmp_path / "out"))
    assert "`pip install polyattn-absent` brings it" in message
    assert not (tmp_path / "out").exists()


def test_an_unknown_rope_variant_is_refused_with_the_closest_name(tiny_lm, settings, write_config, tmp_path):
    settings["rope"]["variant"] = "defualt"
    message = refused(tiny_lm("train", write_config(settings), "--out", tmp_path / "out"))
    assert "defualt" in message
    assert "default" in message


def test_heads_that_do_not_divide_are_refused_with_both_numbers(tiny_lm, settings, write_config, tmp_path):
    settings["model"]["num_kv_heads"] = 3
    message = refused(tiny_lm("train", write_config(settings), "--out", tmp_path / "out"))
    assert "num_heads" in message
    assert "4" in message
    assert "3" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content", [b"- a list", b"", b"a: [1", b"\xff\xfe\x00"], ids=["list", "empty", "cut", "binary"]
)
def test_a_file_that_is_not_a_yaml_mapping_is_refused_by_name(tiny_lm, tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert str(path) in refused(tiny_lm("train", path, "--out", tmp_path / "out")).replace(" ", "")


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_missing_file_is_refused_by_name_before_anything_else(tiny_lm, tmp_path, command):
    for name in ("checkpoint.pt", "loss.png"):
        (tmp_path / name).write_text("mine")
    message = refused(tiny_lm(command, tmp_path / "there.yaml", "--out", tmp_path))
    assert "there.yaml' does not exist" in message
    assert "--overwrite" not in message


def test_a_broken_plugin_is_named_with_its_distribution(tiny_lm, settings, write_config, tmp_path):
    polyattn.backends.register("cracked", "tiny_lm.no_such_module:Backend")
    try:
        message = refused(
            tiny_lm("train", write_config(settings | {"attn_backend": "cracked"}), "--out", tmp_path / "out")
        )
    finally:
        polyattn.backends.unregister("cracked")
    assert "cracked" in message
    assert "ModuleNotFoundError" in message


def test_a_finished_run_is_never_overwritten_by_accident(tiny_lm, settings, write_config, tmp_path):
    out, path = tmp_path / "out", write_config(settings)
    assert tiny_lm("train", path, "--out", out).exit_code == 0
    before = {file: file.read_bytes() for file in out.iterdir()}
    message = refused(tiny_lm("train", path, "--out", out))
    assert all(option in message for option in ("--resume", "--overwrite", "--out"))
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    assert tiny_lm("train", path, "--out", out, "--overwrite").exit_code == 0


def test_a_damaged_checkpoint_is_neither_read_nor_overwritten(tiny_lm, settings, write_config, tmp_path):
    out, path = tmp_path / "out", write_config(settings)
    out.mkdir()
    (out / "checkpoint.pt").write_bytes(b"damaged")
    for options in ([], ["--resume"]):
        refused(tiny_lm("train", path, "--out", out, *options))
        assert (out / "checkpoint.pt").read_bytes() == b"damaged"
        assert len(list(out.iterdir())) == 1


def test_resuming_without_a_checkpoint_says_so(tiny_lm, settings, write_config, tmp_path):
    message = refused(tiny_lm("train", write_config(settings), "--out", tmp_path / "out", "--resume"))
    assert "there is no checkpoint" in message


def test_resuming_a_finished_run_does_nothing(tiny_lm, settings, write_config, tmp_path):
    out, path = tmp_path / "out", write_config(settings)
    assert tiny_lm("train", path, "--out", out).exit_code == 0
    before = {file: file.read_bytes() for file in out.iterdir()}
    result = tiny_lm("train", path, "--out", out, "--resume", "--steps", 4)
    assert (result.exit_code, "step 6 of 4: nothing to do" in result.output) == (0, True)
    assert {file: file.read_bytes() for file in out.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_refused_before_training(tiny_lm, settings, write_config, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in refused(tiny_lm("train", write_config(settings), "--out", tmp_path / "file" / "out"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_finish_the_step_and_leave_a_usable_checkpoint(
    tiny_lm, settings, write_config, tmp_path, monkeypatch, number
):
    step = Run.step
    calls = []

    def interrupted(run):
        calls.append(run)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return step(run)

    monkeypatch.setattr(Run, "step", interrupted)
    out, path = tmp_path / "out", write_config(settings)
    before = signal.getsignal(number)
    result = tiny_lm("train", path, "--out", out)
    assert result.exit_code == 128 + number
    assert "Interrupted after step 3" in result.output
    assert signal.getsignal(number) is before
    assert len(checkpoint.load(out / "checkpoint.pt")["losses"]) == 3
    assert tiny_lm("train", path, "--out", out, "--resume").exit_code == 0
    assert len(Report.read(out).losses) == 6


@pytest.mark.slow
def test_the_demo_compares_two_backends_and_draws_their_curves(tiny_lm, settings, write_config, tmp_path):
    out = tmp_path / "out"
    result = tiny_lm("demo", write_config(settings), "--out", out)
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("eager", "polyattn-sdpa", "tokens/s", "MiB", "Largest difference"))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [Report.read(out / name).backend for name in ("eager", "sdpa")] == ["eager", "sdpa"]


@pytest.mark.parametrize("last", [1.01, float("nan")])
def test_the_demo_fails_when_the_curves_differ_by_too_much(
    tiny_lm, settings, write_config, tmp_path, monkeypatch, last
):
    def pretend(config_path, backend, out, stop):
        out.mkdir(parents=True)
        Report(backend, f"polyattn-{backend} 0.1.0", [2.0, last if backend == "sdpa" else 1.0], 1.0, 2**20).write(out)
        return 0

    monkeypatch.setattr("tiny_lm.cli._train_in_process", pretend)
    monkeypatch.setattr(report, "plot", lambda reports, path: None)
    assert tiny_lm("demo", write_config(settings), "--out", tmp_path / "out").exit_code == 1


def test_the_largest_difference_is_taken_step_by_step():
    first = Report("a", "a 1", [3.0, 2.0, 1.0], 1.0, 1)
    second = Report("b", "b 1", [3.0, 2.5, 1.25], 1.0, 1)
    assert largest_difference([first, second]) == 0.5


def test_a_report_is_plain_json(tmp_path):
    original = Report("a", "polyattn-a 1", [3.0], 10.0, 7)
    original.write(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["losses"] == [3.0]
    assert Report.read(tmp_path) == original


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "ended by SIGKILL: most likely there was too little memory"),
        (signal.SIGSEGV, "ended by SIGSEGV: a crash in native code"),
        (signal.SIGTERM, "ended by SIGTERM: somebody asked it to stop"),
        (signal.SIGRTMIN + 1, f"ended by signal {signal.SIGRTMIN + 1}: "),
    ],
)
def test_a_run_of_the_demo_that_a_signal_ended_is_named_with_the_signal(
    tiny_lm, settings, write_config, tmp_path, monkeypatch, number, said
):
    # A child that does nothing but die of the signal, whatever it is started with.
    child = f"import os; os.kill(os.getpid(), {int(number)})"
    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", lambda command: popen([sys.executable, "-c", child]))
    result = tiny_lm("demo", write_config(settings), "--out", tmp_path / "out")
    assert result.exit_code == 128 + number
    assert f"the run with eager was {said}" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_run_of_the_demo_that_refuses_speaks_for_itself(tiny_lm, settings, write_config, tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_lm.cli._train_in_process", lambda *arguments: 2)
    result = tiny_lm("demo", write_config(settings), "--out", tmp_path / "out")
    assert (result.exit_code, result.output) == (2, "")


@pytest.mark.parametrize("name", ["eager/checkpoint.pt", "sdpa/report.json", "loss.png"])
def test_the_demo_overwrites_nothing_unless_it_is_told_to(tiny_lm, settings, write_config, tmp_path, monkeypatch, name):
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    monkeypatch.setattr("tiny_lm.cli._train_in_process", lambda *arguments: 5)
    message = refused(tiny_lm("demo", write_config(settings), "--out", out))
    assert f"{name} exists; give --overwrite to replace them, or another --out" in message
    assert [path for path in out.rglob("*") if path.is_file()] == [out / name]
    assert (out / name).read_text() == "mine"
    assert tiny_lm("demo", write_config(settings), "--out", out, "--overwrite").exit_code == 5


def test_a_report_of_something_else_is_not_overwritten(tiny_lm, settings, write_config, tmp_path):
    (tmp_path / "report.json").write_text("mine")
    message = refused(tiny_lm("train", write_config(settings), "--out", tmp_path))
    assert "report.json exists; give --resume to go on, --overwrite to start again, or another --out" in message
    assert (tmp_path / "report.json").read_text() == "mine"


@pytest.mark.parametrize("command", ["train", "demo"])
@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_in_the_place_of_the_folder_is_said_before_anything_else(
    tiny_lm, settings, write_config, tmp_path, command, below
):
    file = tmp_path / "file"
    file.write_text("mine")
    for options in ([], ["--overwrite"]):
        message = refused(
            tiny_lm(command, write_config(settings | {"attn_backend": "sdap"}), "--out", file / below, *options)
        )
        assert message.replace(" ", "").endswith(f"but{file}isafile;giveanother--out".replace(" ", ""))
        assert "Errno" not in message
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_folder_that_one_may_not_write_to_is_refused(tiny_lm, settings, write_config, tmp_path, monkeypatch, command):
    def refuse(*_arguments, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    config = write_config(settings)
    with monkeypatch.context() as context:  # root, who runs this at times, may write anywhere
        context.setattr(os, "access", lambda path, mode: mode == os.R_OK)
        assert "must be a folder that one may write to" in refused(tiny_lm(command, config, "--out", tmp_path))
    with monkeypatch.context() as context:
        context.setattr(Path, "mkdir", refuse)
        message = refused(tiny_lm(command, config, "--out", tmp_path / "out"))
    assert "cannot be made: Permission denied; give another --out" in message
