"""The example of a hook plugin: what it records, and that it stays out of the way."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn import MaskLayout
from polyattn.registry import hooks

# It is not a part of the workspace, so it is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "chrome_trace" / "src"))

from polyattn_chrome_trace import VARIABLE, Tracer

FOLDER = Path(__file__).parents[2] / "examples" / "chrome_trace"


@pytest.fixture
def tracer(tmp_path):
    """A registered tracer that writes into this test's folder."""
    for name in ("eager", "sdpa"):
        polyattn.backends.get(name)  # so that loading it is not an event of the test
    tracer = Tracer(tmp_path / "traces")
    hooks.register(tracer, "chrome trace")
    yield tracer
    hooks.unregister("chrome trace")
    tracer.close()


def attend(layout=None, **fields):
    q = torch.zeros(1, 2, 4, 8)
    polyattn.attention(q, q, q, layout or MaskLayout.causal(4), **{"backend": "eager", **fields})


def events(folder):
    return [event for file in sorted(folder.iterdir()) for event in json.loads(file.read_text(encoding="utf-8"))]


def test_a_mark_says_what_was_prepared_by_whom_and_for_what(tracer, tmp_path):
    attend(MaskLayout.causal(4, window=2), softcap=3.0)
    tracer.close()
    mark, count = events(tmp_path / "traces")
    assert (mark["name"], mark["ph"], mark["pid"]) == ("prepared eager", "i", os.getpid())
    assert mark["tid"] == threading.get_native_id()
    assert mark["args"]["layout"] == MaskLayout.causal(4, window=2).describe()
    assert mark["args"]["plan"] == "eager"
    request = mark["args"]["request"]
    assert (request["dtype"], request["device"], request["softcap"]) == ("torch.float32", "cpu", 3.0)
    assert count == {"name": "prepared", "ph": "C", "args": {"eager": 1}, "pid": os.getpid(), "ts": count["ts"]}
    assert count["ts"] >= mark["ts"] > 0


def test_counters_grow_backend_by_backend(tracer, tmp_path):
    for backend in ("eager", "sdpa", "eager"):
        attend(backend=backend)
    tracer.close()
    counts = [event["args"] for event in events(tmp_path / "traces") if event["ph"] == "C"]
    assert counts == [{"eager": 1}, {"eager": 1, "sdpa": 1}, {"eager": 2, "sdpa": 1}]


def test_a_killed_process_leaves_every_event_and_only_the_bracket_is_missing(tracer, tmp_path):
    attend()
    (file,) = (tmp_path / "traces").iterdir()
    assert len(json.loads(file.read_text(encoding="utf-8") + "]")) == 2


def test_many_threads_write_one_file_line_by_line(tracer, tmp_path):
    threads = [threading.Thread(target=attend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    marks = [event for event in events(tmp_path / "traces") if event["ph"] == "i"]
    assert len(marks) == 8
    assert len({event["tid"] for event in marks}) > 1


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    tracer = Tracer()
    hooks.register(tracer, "chrome trace")
    try:
        attend()
    finally:
        hooks.unregister("chrome trace")
    tracer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def target(build_wheel, pip_install, tmp_path_factory):
    """A clean folder into which it was installed from its wheel."""
    return pip_install(tmp_path_factory.mktemp("target"), build_wheel(FOLDER))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_installed_it_traces_a_program_that_knows_nothing_of_it_and_its_forks(target, run_python, tmp_path):
    code = """
import os, warnings
import torch, polyattn
warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; forking beside them is the point
q = torch.zeros(1, 2, 4, 8)
polyattn.attention(q, q, q, polyattn.MaskLayout.causal(4), backend="eager")
child = os.fork()
polyattn.attention(q, q, q, polyattn.MaskLayout.full(4), backend="eager")
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.getpid(), child)
"""
    done = run_python(code, path=[target], env={VARIABLE: "traces"})
    parent, child = (tmp_path / "traces" / f"polyattn-{pid}.json" for pid in done.stdout.split())
    names = [event["name"] for event in json.loads(parent.read_text(encoding="utf-8")) if event["ph"] == "i"]
    assert names == ["loaded eager", "prepared eager", "prepared eager"]
    alone = json.loads(child.read_text(encoding="utf-8") + "]")
    assert [event["name"] for event in alone] == ["prepared eager", "prepared"]


def test_doctor_shows_the_hook(target, run_python):
    report = json.loads(run_python(["-m", "polyattn", "doctor", "--json"], path=[target]).stdout)
    (hook,) = [entry for entry in report["hooks"] if entry["name"] == "chrome_trace"]
    assert (hook["status"], hook["dist"]) == ("loaded", "polyattn-chrome-trace")
