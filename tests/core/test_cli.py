"""The command line: what it prints, where, with which exit status, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from polyattn import MaskLayout
from polyattn_cli import COMMANDS, cli
from polyattn_cli.table import draw
from tiny_dists import backend_source


def polyattn(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)), prog_name="polyattn")


def test_help_names_every_command_and_imports_none(run_python):
    code = """
import sys
from polyattn_cli import COMMANDS, cli
try:
    cli(["--help"], prog_name="polyattn")
except SystemExit as done:
    assert done.code == 0
assert not [m for m in sys.modules if m.startswith("polyattn_cli.") or m.split(".")[0] in {"torch", "rich"}]
"""
    said = run_python(code).stdout
    for name, (_, line) in COMMANDS.items():
        assert name in said
        assert line in said


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_in_the_table_exists_and_explains_itself(name):
    result = polyattn(name, "--help")
    assert result.exit_code == 0, result.output
    assert f"Usage: polyattn {name}" in result.output


def test_version():
    from polyattn import __version__

    assert polyattn("--version").output == f"polyattn {__version__}\n"


def test_an_unknown_command_is_a_usage_error():
    result = polyattn("lsit")
    assert result.exit_code == 2
    assert "No such command 'lsit'" in result.output


def test_python_dash_m_is_the_same_command(run_python):
    assert "Usage: polyattn [OPTIONS] COMMAND" in run_python(["-m", "polyattn", "--help"]).stdout


def test_an_error_of_polyattn_is_one_message_on_stderr_with_status_2(run_python):
    done = run_python(["-m", "polyattn", "explain", "causal", "--backend", "usp"], status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(
        "Error: backend 'usp' cannot be used: sequence parallelism is a scope, in polyattn-context-parallel"
    )
    assert "Traceback" not in done.stderr


# list


def test_list_imports_no_torch_and_rich_only_for_a_table(run_python, tmp_path, make_dist):
    folder = make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    for arguments, modules in (
        (["list", "--json"], {"torch", "rich", "acme_attention"}),
        (["list"], {"torch", "acme_attention"}),
    ):
        code = f"""
import sys
from polyattn_cli import cli
try: cli({arguments!r}, prog_name="polyattn")
except SystemExit as done: assert done.code == 0
assert not {modules!r} & set(sys.modules)
"""
        assert "acme-attention" in run_python(code, path=[folder]).stdout


def test_list_as_json_has_a_section_for_each_group(run_python, tmp_path, make_dist):
    folder = make_dist(
        "acme-attention",
        "2.3",
        backends={"acme": "acme:Backend"},
        rope={"spiral": "acme:Spiral"},
        hooks={"trace": "acme"},
    ).unpack(tmp_path / "site")
    listed = json.loads(run_python(["-m", "polyattn", "list", "--json"], path=[folder]).stdout)
    assert list(listed) == ["backends", "rope", "hooks"]
    (acme,) = [entry for entry in listed["backends"] if entry["name"] == "acme"]
    assert acme == {
        "name": "acme",
        "group": "polyattn.backends",
        "status": "available",
        "dist": "acme-attention",
        "version": "2.3",
        "summary": "The tiny acme-attention",
        "value": "acme:Backend",
        "source": str(folder / "acme_attention-2.3.dist-info" / "entry_points.txt"),
        "error": "",
    }
    assert "spiral" in [entry["name"] for entry in listed["rope"]]
    assert "trace" in [entry["name"] for entry in listed["hooks"]]


def test_a_piped_table_is_whole_however_wide(run_python, tmp_path, make_dist):
    name = "acme_" + "x" * 200
    folder = make_dist("acme-" + "y" * 60, "1.0", backends={name: "acme:Backend"}).unpack(tmp_path / "site")
    (line,) = [
        line
        for line in run_python(["-m", "polyattn", "list"], path=[folder], env={"COLUMNS": "40"}).stdout.splitlines()
        if name in line
    ]
    assert "acme-" + "y" * 60 in line
    assert "The tiny acme-" + "y" * 60 in line


def test_a_piped_table_is_padded_between_columns_and_nowhere_else(run_python):
    listed = run_python(["-m", "polyattn", "list"]).stdout
    checked = run_python(["-m", "polyattn", "check", "eager", "--only", "attributes"]).stdout
    assert listed.splitlines()[0].split() == ["kind", "name", "status", "distribution", "version", "summary"]
    assert checked.splitlines() == ["eager on cpu", "check       result  detail", "attributes  pass", "1 pass"]
    assert not [line for line in (listed + checked).splitlines() if line != line.rstrip()]


def test_text_of_several_lines_is_one_line_of_a_piped_table(capsys):
    draw(("check", "detail"), [("one", "first\n  second"), ("three", "")])
    assert capsys.readouterr().out.splitlines() == ["check  detail", "one    first second", "three"]


def test_a_table_for_people_fits_the_window(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    draw(("check", "detail"), [("one", "word " * 30)], title="a title")
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert lines[0].strip() == "a title"
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).count("word") == 30


def test_brackets_in_a_summary_are_text(run_python, tmp_path, make_dist):
    folder = make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    metadata = folder / "acme_attention-1.0.dist-info" / "METADATA"
    metadata.write_text("Name: acme-attention\nVersion: 1.0\nSummary: for [bold]all[/bold] of us [/]\n")
    assert "for [bold]all[/bold] of us [/]" in run_python(["-m", "polyattn", "list"], path=[folder]).stdout


def test_list_takes_at_most_a_quarter_of_importing_torch():
    def fastest(*arguments, tries):
        times = []
        for _ in range(tries):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        return min(times)

    torch = fastest("-c", "import torch", tries=1)
    assert fastest("-m", "polyattn", "list", tries=3) <= torch / 4


# doctor


def test_doctor_with_nothing_wrong_has_status_0(run_python, tmp_path, make_dist):
    folder = make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    done = run_python(["-m", "polyattn", "doctor"], path=[folder], env={"POLYATTN_ALLOW": "acme-attention"})
    assert f"code         {folder / 'acme_attention.py'}" in done.stdout
    assert f"entry point  {folder / 'acme_attention-1.0.dist-info' / 'entry_points.txt'}" in done.stdout
    for key in ("polyattn", "python", "torch", "cuda", "devices"):
        assert f"\n{key} " in "\n" + done.stdout


def test_doctor_finds_code_inside_a_package_without_importing_the_package(tmp_path, run_python, make_dist):
    folder = make_dist(
        "acme-attention",
        backends={"acme": "acme.inner.kernel:Backend"},
        modules={
            "acme/__init__.py": "raise SystemExit('imported')",
            "acme/inner/__init__.py": "",
            "acme/inner/kernel.py": "",
        },
    ).unpack(tmp_path / "site")
    code = """
from polyattn_cli.doctor import _code
print(_code("acme.inner.kernel"), [_code("acme.nothing"), _code("nowhere.at.all")], sep="\\n")
"""
    assert run_python(code, path=[folder]).stdout.splitlines() == [
        str(folder / "acme" / "inner" / "kernel.py"),
        "['', '']",
    ]


def test_doctor_tells_why_a_backend_cannot_run_on_a_device(tmp_path, run_python, make_dist):
    reasons = (
        "    def device_reasons(self, device):\n        return ('no ' + device.type,) if device.type == 'cuda' else ()"
    )
    broken = "    def device_reasons(self, device):\n        raise OSError('libkernel.so')"
    site = tmp_path / "site"
    make_dist(
        "a-dist", backends={"picky": "picky:Backend"}, modules={"picky.py": backend_source("picky", after=reasons)}
    ).unpack(site)
    make_dist(
        "b-dist", backends={"lame": "lame:Backend"}, modules={"lame.py": backend_source("lame", after=broken)}
    ).unpack(site)
    done = run_python(
        ["-m", "polyattn", "doctor", "--json"], path=[site], env={"POLYATTN_ALLOW": "a-dist,b-dist"}, status=1
    )
    entries = {entry["name"]: entry for entry in json.loads(done.stdout)["backends"]}
    assert entries["picky"]["cannot_run_on"] == {"cuda": ["no cuda"]}
    assert (entries["lame"]["status"], entries["lame"]["error"]) == ("broken", "device_reasons: OSError: libkernel.so")


NO_TORCH = """
import builtins, os
if hasattr(builtins, "torch_was_tried"):
    os.abort()
builtins.torch_was_tried = True
raise OSError("libcudart.so: cannot open shared object file")
"""


def test_doctor_imports_a_broken_torch_once_and_names_the_cause(tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme", before="import torch").unpack(tmp_path / "site")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(NO_TORCH)
    report = json.loads(run_python(["-m", "polyattn", "doctor", "--json"], path=[folder], status=1).stdout)
    assert report["torch"] is None
    assert report["problems"][0] == (
        "torch cannot be imported, so no plugin was loaded: OSError: libcudart.so: cannot open shared object file"
    )
    assert {entry["status"] for entry in report["backends"]} == {"available"}
    assert (
        "problem: torch cannot be imported" in run_python(["-m", "polyattn", "doctor"], path=[folder], status=1).stdout
    )


@pytest.mark.parametrize("line", [b"acme", b"\xff\xfe = acme:Backend"])
def test_doctor_names_the_entry_points_that_keep_torch_from_being_imported(line, tmp_path, run_python, make_dist):
    folder = make_dist("bad-dist").unpack(tmp_path / "site")
    path = folder / "bad_dist-1.0.dist-info" / "entry_points.txt"
    path.write_bytes(b"[polyattn.backends]\n" + line + b"\n")
    report = json.loads(run_python(["-m", "polyattn", "doctor", "--json"], path=[folder], status=1).stdout)
    assert report["problems"][0].startswith("torch cannot be imported, so no plugin was loaded: ")
    assert report["problems"][1].startswith(f"{path.parent}: its entry_points.txt cannot be read, which `import torch`")
    without = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "POLYATTN_ALLOW": "polyattn-eager"}
    report = json.loads(
        run_python(["-m", "polyattn", "doctor", "--json"], path=[folder], env=without, status=None).stdout
    )
    assert {entry["name"]: entry["status"] for entry in report["backends"]}["eager"] == "loaded"


@pytest.mark.parametrize("command", [["doctor"], ["explain", "causal"], ["bench", "causal", "--q-len", "4"]])
def test_what_a_plugin_prints_is_kept_out_of_the_answer(command, tmp_path, run_python, make_dist):
    before = "import os\nprint('a greeting')\nos.system('echo a compiler')"
    folder = make_dist.backend("acme-attention", "acme", before=before).unpack(tmp_path / "site")
    env = {"POLYATTN_ALLOW": "acme-attention,polyattn-eager"}
    done = run_python(["-m", "polyattn", *command, "--json"], path=[folder], env=env, status=None)
    assert json.loads(done.stdout)
    assert {"a greeting", "a compiler"} <= set(done.stderr.splitlines())


def test_a_plugin_whose_native_code_crashes_is_named(tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme", before="import os\nos.abort()").unpack(tmp_path / "site")
    env = {"POLYATTN_ALLOW": "acme-attention"}
    done = run_python(["-m", "polyattn", "doctor"], path=[folder], env=env, status=None)
    assert done.returncode not in {0, 1}
    assert "Fatal Python error: Aborted" in done.stderr
    assert str(folder / "acme_attention.py") in done.stderr


def test_ctrl_c_in_doctor_tells_which_plugin_was_being_loaded(tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme", before="raise KeyboardInterrupt").unpack(tmp_path / "site")
    env = {"POLYATTN_ALLOW": "acme-attention"}
    done = run_python(["-m", "polyattn", "doctor"], path=[folder], env=env, status=1)
    assert done.stderr.splitlines()[0] == "interrupted while acme of acme-attention 1.0 was loaded"
    assert "Aborted!" in done.stderr


def test_a_name_of_the_other_kind_is_recognised(tmp_path, run_python, make_dist):
    folder = make_dist("acme", backends={"acme": "acme:B"}, rope={"spiral": "acme:R"}).unpack(tmp_path / "site")
    done = run_python(["-m", "polyattn", "check", "spiral"], path=[folder], status=2)
    assert "no backend named 'spiral' is installed, but a RoPE variant of that name is; installed: acme" in done.stderr


# explain and mask


def test_explain_names_the_chosen_backend_and_every_other_ones_reasons():
    result = polyattn("explain", "causal", "--q-len", 64, "--window", 16, "--kv-heads", 2, "--grad")
    assert result.exit_code == 0, result.output
    assert "chosen: " in result.output
    assert "eager: can" in result.output


def test_explain_as_json_gives_reasons_for_programs():
    result = polyattn("explain", "packed", "--lengths", "3,5", "--dtype", "bfloat16", "--json")
    decision = json.loads(result.output)
    assert decision["chosen"] in decision["candidates"]
    assert decision["candidates"]["eager"] == []


def test_explain_for_one_backend_has_status_1_when_it_cannot(monkeypatch):
    # The gradient of the log-sum-exp under dropout is a combination that only eager takes.
    can = polyattn("explain", "full", "--backend", "eager", "--training", "--dropout", 0.1, "--lse-grad", "--json")
    assert can.exit_code == 0, can.output
    assert json.loads(can.output)["candidates"] == {"eager": []}
    cannot = polyattn("explain", "full", "--backend", "sdpa", "--training", "--dropout", 0.1, "--lse-grad", "--json")
    assert cannot.exit_code == 1, cannot.output
    assert json.loads(cannot.output)["candidates"]["sdpa"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "triangular"], "'triangular' is not one of 'full', 'causal'"),
        (["explain", "packed"], "the layout packed needs --lengths"),
        (["explain", "causal", "--chunk-size", "4"], "--chunk-size means nothing for the layout causal; leave it out"),
        (["explain", "packed", "--lengths", "3,x"], "'3,x' must be whole numbers with commas between them"),
        (["explain", "causal", "--device", "quantum"], "Invalid value for --device"),
        (["explain", "causal", "--dtype", "int8"], "'int8' is not one of"),
        (
            ["explain", "causal", "--heads", "6", "--kv-heads", "4"],
            "heads must be a multiple of kv_heads, got heads=6 and kv_heads=4",
        ),
        (["explain", "causal", "--backend", "sdap"], "did you mean 'sdpa'?"),
        (["mask", "causal", "--row", "1"], "the layout has 1 batch rows, got row 1"),
        *(
            (
                ["mask", "causal", "--window", wrong],
                f"'{wrong}' must be a whole number >= 1, such as 128, or how many keys",
            )
            for wrong in ("0", "-1", "wide", "1,2,3", "-2,0", "1,")
        ),
        (["mask", "causal", "--sink-tokens", "2"], "--sink-tokens means nothing without --window, which hides them"),
        (["mask", "tree", "--lengths", "3"], "the layout tree needs --parents"),
        (["mask", "tree", "--lengths", "3", "--parents", "0"], "parents must each be an earlier node or -1 for a root"),
        (["mask", "tree", "--lengths", "9", "--q-len", "9"], "--q-len means nothing for the layout tree; leave it out"),
        (
            ["mask", "shared_prefix", "--prefix", "3,4", "--lengths", "2"],
            "--prefix must be one number for the layout shared_prefix, got [3, 4]",
        ),
        (["mask", "block_causal"], "the layout block_causal needs --block-size"),
        (["mask", "causal", "--q-len", "1000000"], "65536 queries x 65536 keys, got 1000000 x 1000000; draw a shorter"),
        (["mask", "causal", "--q-len", "0", "--kv-len", "99999999"], "got 0 x 99999999; draw a shorter one"),
        (["mask", "packed", "--lengths", "1000000,2"], "got 1000002 x 1000002; draw a shorter one"),
        (["mask", "full", "--q-len", "99999999999"], "Invalid value for '--q-len': 99999999999 is not in the range"),
        (["mask", "packed", "--lengths", "9,99999999999"], "'9,99999999999' must add up to at most 2147483647"),
        (
            ["explain", "padded", "--lengths", "3,2", "--batch", "3"],
            "Invalid value for --batch: must be the 2 batch rows of the layout, got 3; leave it out",
        ),
        (["explain", "padded", "--lengths", "3,2", "--batch", "1"], "must be the 2 batch rows of the layout, got 1"),
        (
            ["explain", "causal", "--backend", "sdpa", "--backend", "eager"],
            "Invalid value for '--backend': must be given once, got sdpa, eager; without it all are asked",
        ),
    ],
)
def test_bad_input_is_one_clear_message_with_status_2(arguments, said):
    result = polyattn(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["full", "--q-len", "4"],
        ["causal", "--q-len", "4", "--kv-len", "6", "--window", "2"],
        ["padded", "--lengths", "2,4", "--kv-len", "6", "--side", "left", "--row", "1"],
        ["packed", "--lengths", "2,3", "--bidirectional"],
        ["prefix_lm", "--prefix", "2", "--q-len", "4"],
        ["chunked", "--chunk-size", "2", "--q-len", "5"],
        ["causal", "--window", "2", "--sink-tokens", "2"],
        ["packed", "--lengths", "2,3", "--window", "-1,1", "--sink-tokens", "2", "--bidirectional"],
        ["tree", "--parents", "-1,0,0", "--lengths", "2,1,3", "--bidirectional"],
        ["shared_prefix", "--prefix", "2", "--lengths", "1,3"],
        ["block_causal", "--block-size", "2", "--q-len", "3", "--kv-len", "5"],
    ],
)
def test_mask_draws_every_kind_of_layout(arguments):
    result = polyattn("mask", *arguments)
    assert result.exit_code == 0, result.output
    assert "#" in result.output
    assert polyattn("explain", *[argument for argument in arguments if argument not in {"--row", "1"}]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        (
            ["tree", "--parents", "-1,0,1,0", "--lengths", "3,2,2,3", "--window", "2,0"],
            MaskLayout.tree([-1, 0, 1, 0], [3, 2, 2, 3], window=(2, 0)),
        ),
        (["shared_prefix", "--prefix", "3", "--lengths", "2,0,4"], MaskLayout.shared_prefix(3, [2, 0, 4])),
        (["block_causal", "--block-size", "3", "--q-len", "4", "--kv-len", "8"], MaskLayout.block_causal(3, 4, 8)),
        (
            ["causal", "--q-len", "8", "--window", "3", "--sink-tokens", "2"],
            MaskLayout.causal(8, window=3, sink_tokens=2),
        ),
        (
            ["packed", "--lengths", "3,5", "--window", "2", "--sink-tokens", "1"],
            MaskLayout.packed([3, 5], window=2, sink_tokens=1),
        ),
        (["full", "--q-len", "5", "--window", "-1,1"], MaskLayout.full(5).with_window((None, 1))),
    ],
)
def test_mask_draws_the_layout_that_the_words_mean(arguments, layout):
    assert polyattn("mask", *arguments).stdout == f"{layout.describe()}\n{layout.draw()}\n"


@pytest.mark.parametrize("kind", [["causal"], ["tree", "--parents", "-1,0,0", "--lengths", "9,4,6"]])
def test_mask_writes_a_picture(tmp_path, kind):
    result = polyattn("mask", *kind, "--out", tmp_path / "mask.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_by_its_path(tmp_path):
    for name in ("no/folder.png", "picture.zzz"):
        result = polyattn("mask", "causal", "--out", tmp_path / name)
        assert result.exit_code == 2, result.output
        assert f"--out cannot write '{tmp_path / name}': " in result.output
    assert polyattn("mask", "causal", "--out", tmp_path / "bare").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_rows_of_one_layout_may_be_as_many_as_asked():
    result = polyattn("explain", "padded", "--lengths", "3", "--kv-len", 4, "--batch", 3, "--backend", "eager")
    assert result.exit_code == 0, result.output


# check


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_check_that_left_everything_out_is_status_2(options):
    result = polyattn("check", "eager", "--only", "window*", "--device", "xpu:7", *options)
    assert result.exit_code == 2, result.output
    assert "left out" in result.stdout
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert "Error: nothing was checked, all of 6 were left out: nothing runs on xpu:7: " in line


def test_a_check_that_needs_no_kernel_is_enough_for_status_0():
    assert polyattn("check", "fa", "--only", "attributes", "--device", "cpu").exit_code == 0
