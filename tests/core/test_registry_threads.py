"""First use from many threads, imports that meet each other, and what forked and spawned processes find."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyattn import BackendLoadError

COUNTED = "import builtins, time\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\ntime.sleep(0.05)"


@pytest.fixture
def counter():
    import builtins

    builtins.loads = 0
    yield builtins
    del builtins.loads


def in_threads(count, work):
    barrier = threading.Barrier(count)

    def run(index):
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), timeout=60))


def test_32_threads_get_one_object_of_one_import(site, make_dist, isolated_registry, counter):
    make_dist.backend("acme-attention", "acme", module="acme_threads", before=COUNTED).unpack(site)
    isolated_registry.refresh()
    found = in_threads(32, lambda _: isolated_registry.get("acme"))
    assert len(set(map(id, found))) == 1
    assert counter.loads == 1


def test_32_threads_are_told_the_same_failure_which_is_remembered(site, make_dist, isolated_registry, counter):
    make_dist.backend(
        "acme-attention", "acme", module="acme_broken", before=COUNTED + "\nraise OSError('gone')"
    ).unpack(site)
    isolated_registry.refresh()

    def attempt(_):
        with pytest.raises(BackendLoadError, match="gone"):
            isolated_registry.get("acme")

    in_threads(32, attempt)
    before = counter.loads
    attempt(0)
    assert counter.loads == before


def test_threads_that_ask_for_different_names_load_each_once(site, make_dist, isolated_registry, counter):
    for i in range(8):
        make_dist.backend(f"acme-{i}", f"acme_{i}", module=f"acme_many_{i}", before=COUNTED).unpack(site)
    isolated_registry.refresh()
    found = in_threads(32, lambda i: isolated_registry.get(f"acme_{i % 8}"))
    assert all(found[i] is found[i % 8] for i in range(32))
    assert counter.loads == 8


def test_listing_registering_and_refreshing_go_on_together(site, make_dist, isolated_registry):
    make_dist.backend("acme-attention", "acme", module="acme_busy").unpack(site)
    isolated_registry.refresh()

    def work(i):
        for _ in range(20):
            if i % 4 == 0:
                isolated_registry.refresh()
            elif i % 4 == 1:
                isolated_registry.register(f"mine_{i}", "acme_busy:Backend")
                isolated_registry.unregister(f"mine_{i}")
            elif i % 4 == 2:
                assert "acme" in isolated_registry.names()
                assert "acme" in [info.name for info in isolated_registry.infos()]
            else:
                assert isolated_registry.get("acme").name == "acme"
        return True

    assert all(in_threads(12, work))


def test_overrides_of_many_threads_leave_nothing(site, make_dist, isolated_registry):
    make_dist.backend("acme-attention", "acme", module="acme_overridden").unpack(site)
    isolated_registry.refresh()
    original = isolated_registry.get("acme")

    def work(_):
        for _ in range(20):
            mine = type(original)()
            with isolated_registry.override("acme", mine) as given:
                assert given is mine

    in_threads(16, work)
    assert isolated_registry.get("acme") is original
    assert not isolated_registry._overrides


MEETING = """
import threading
from polyattn import BackendLoadError, backends

outcomes = {}

def ask(name):
    try:
        outcomes[name] = backends.get(name).name
    except BackendLoadError as error:
        outcomes[name] = str(error).splitlines()[0]

threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in ("one", "two")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(20)
    assert not thread.is_alive(), "hung"
print(outcomes)
"""


def test_two_plugins_that_ask_for_each_other_at_once_do_not_hang(tmp_path, run_python, make_dist):
    for mine, other in (("one", "two"), ("two", "one")):
        before = f"import time, polyattn\ntime.sleep(0.2)\npolyattn.backends.get({other!r})"
        make_dist.backend(f"{mine}-attention", mine, before=before).unpack(tmp_path / "site")
    assert "cannot be loaded" in run_python(MEETING, path=[tmp_path / "site"], timeout=60).stdout


def test_a_thread_that_imports_a_plugin_itself_meets_one_that_loads_it(tmp_path, run_python, make_dist):
    # One thread holds the module lock and asks the registry; the other loads and wants the module lock.
    before = "import time\ntime.sleep(0.3)"
    after = """
import polyattn
polyattn.backends.names(), polyattn.backends.get("other")
try: polyattn.backends.get("acme")
except polyattn.BackendLoadError: pass
"""
    make_dist.backend("acme-attention", "acme", before=before, after=after).unpack(tmp_path / "site")
    make_dist.backend("other-attention", "other").unpack(tmp_path / "site")
    code = """
import threading, time, polyattn
from polyattn import backends
importer = threading.Thread(target=__import__, args=("acme_attention",), daemon=True)
importer.start()
time.sleep(0.1)
loader = threading.Thread(target=lambda: backends.get("acme"), daemon=True)
loader.start()
for thread in (importer, loader):
    thread.join(20)
    assert not thread.is_alive(), "hung"
print(backends.get("acme").name)
"""
    assert run_python(code, path=[tmp_path / "site"], timeout=60).stdout.split() == ["acme"]


def test_a_question_that_a_plugin_asks_about_itself_while_it_is_imported_condemns_it_not(
    site, make_dist, isolated_registry, counter
):
    before = (
        "import builtins\nfrom polyattn import BackendLoadError\n"
        "try: builtins.registry.get('acme')\nexcept BackendLoadError: builtins.loads += 1"
    )
    make_dist.backend("acme-attention", "acme", module="acme_curious", before=before).unpack(site)
    isolated_registry.refresh()
    counter.registry = isolated_registry
    try:
        assert isolated_registry.get("acme").name == "acme"
    finally:
        del counter.registry
    assert counter.loads == 1
    assert isolated_registry.info("acme").status == "loaded"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_while_another_thread_loads_can_load(tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme", module="acme_forked").unpack(tmp_path / "site")
    make_dist.backend("slow-attention", "slow", before="import time; time.sleep(1.5)").unpack(folder)
    code = """
import os, signal, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
from polyattn import backends
thread = threading.Thread(target=backends.get, args=("slow",))
thread.start()
time.sleep(0.3)
child = os.fork()
if child == 0:
    signal.alarm(20)
    assert backends.get("acme").name == "acme"
    os._exit(0 if "slow" in backends.names() and backends.info("slow").status == "available" else 1)
assert os.waitpid(child, 0)[1] == 0
thread.join()
assert backends.info("slow").status == "loaded"
"""
    run_python(code, path=[folder])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_find_plugins_by_name(method, tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    (tmp_path / "work.py").write_text(
        "from polyattn import backends\n\ndef name(_):\n    return backends.get('acme').name\n"
    )
    code = f"""
import multiprocessing, sys
sys.path.insert(0, "")
import work
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(pool.map(work.name, range(4)))
"""
    (tmp_path / "main.py").write_text(code)
    assert (
        run_python([tmp_path / "main.py"], path=[folder, tmp_path]).stdout.strip() == "['acme', 'acme', 'acme', 'acme']"
    )


def test_backends_layouts_configs_and_prepared_state_reach_a_spawned_data_loader_worker(tmp_path, run_python):
    (tmp_path / "data.py").write_text("""
import torch
import polyattn


class Probe(torch.utils.data.Dataset):
    def __init__(self, backend):
        self.q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
        self.layout = polyattn.MaskLayout.packed([2, 4])
        self.config = polyattn.AttentionConfig.from_dict({"attn_backend": backend.name})
        self.backend = backend
        self.prepared = backend.prepare(self.layout, polyattn.AttentionRequest.of(self.q, self.q, self.q))

    def __len__(self):
        return 1

    def __getitem__(self, index):
        q = self.q
        mine = polyattn.attention(q, q, q, self.layout, backend=self.backend).output
        theirs = polyattn.attention(q, q, q, self.layout, backend=self.config.attn_backend).output
        assert self.backend is polyattn.backends.get(self.backend.name)
        assert torch.equal(mine, self.prepared(q, q, q).output) and torch.equal(mine, theirs)
        return mine
""")
    (tmp_path / "main.py").write_text("""
import torch
import data
import polyattn

if __name__ == "__main__":
    probes = torch.utils.data.ConcatDataset([data.Probe(polyattn.backends.get(name)) for name in ("eager", "sdpa")])
    loader = torch.utils.data.DataLoader(probes, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for here, there in zip(probes, loader, strict=True):
        assert torch.equal(here, there)
    print("same")
""")
    assert run_python([tmp_path / "main.py"], path=[tmp_path], timeout=120).stdout.split() == ["same"]
