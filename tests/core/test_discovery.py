"""What is found in distribution metadata, and what broken metadata does to the rest: nothing."""

from __future__ import annotations

import importlib
import logging
import sys
import time
import zipfile

import pytest

from polyattn.registry import discovery
from polyattn_cli.leftovers import leftovers


def found(group="polyattn.backends"):
    return {plugin.name: plugin for plugin in discovery.rescan().candidates[group]}


def test_a_candidate_tells_where_it_comes_from(site, make_dist):
    make_dist.backend("acme-attention", "acme", version="2.3").unpack(site)
    acme = found()["acme"]
    assert (acme.dist, acme.version, acme.summary) == ("acme-attention", "2.3", "The tiny acme-attention")
    assert (acme.module, acme.attr, acme.fault) == ("acme_attention", "Backend", "")
    assert acme.source == str(site / "acme_attention-2.3.dist-info" / "entry_points.txt")
    assert acme.label == "acme-attention 2.3"


def test_all_groups_are_scanned_at_once(site, make_dist):
    make_dist("trio", backends={"acme": "m:B"}, rope={"spiral": "m:R"}, hooks={"trace": "m"}).unpack(site)
    scan = discovery.rescan()
    names = {
        group: [plugin.name for plugin in plugins if plugin.dist == "trio"]
        for group, plugins in scan.candidates.items()
    }
    found = {group: plugins for group, plugins in names.items() if plugins}
    assert found == {"polyattn.backends": ["acme"], "polyattn.rope": ["spiral"], "polyattn.hooks": ["trace"]}
    assert set(names) == set(discovery.GROUPS)


def test_one_scan_serves_until_the_next_refresh(site, make_dist):
    before = discovery.rescan()
    make_dist.backend("acme-attention", "acme").unpack(site)
    assert discovery.current() is before
    assert "acme" in found()
    assert discovery.current() is not before


def test_a_listing_of_the_folder_that_python_cached_does_not_hide_a_new_plugin(site, make_dist):
    found()
    make_dist.backend("acme-attention", "acme").unpack(site)
    assert "acme" in found()
    importlib.import_module("acme_attention")


def test_egg_info_beside_dist_info_is_one_plugin(site, make_dist):
    acme = make_dist.backend("acme-attention", "acme")
    acme.unpack(site)
    acme.unpack(site, info="acme_attention.egg-info")
    (claim,) = [plugin for plugin in discovery.rescan().candidates["polyattn.backends"] if plugin.name == "acme"]
    assert claim.source.endswith(".dist-info/entry_points.txt")


@pytest.mark.parametrize("newer_first", [False, True])
def test_of_one_distribution_twice_on_the_path_the_first_counts(newer_first, tmp_path, monkeypatch, site, make_dist):
    old = make_dist.backend("acme-attention", "acme", version="1.0", module="old").unpack(tmp_path / "a")
    new = make_dist.backend("Acme_Attention", "acme", version="2.0", module="new").unpack(tmp_path / "b")
    for folder in (old, new) if newer_first else (new, old):
        monkeypatch.syspath_prepend(folder)
    claims = [plugin for plugin in discovery.rescan().candidates["polyattn.backends"] if plugin.name == "acme"]
    assert [claim.version for claim in claims] == ["2.0" if newer_first else "1.0"]


def test_the_same_folder_twice_on_the_path_gives_one_plugin(site, monkeypatch, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    monkeypatch.syspath_prepend(str(site) + "/.")
    assert len([plugin for plugin in discovery.rescan().candidates["polyattn.backends"] if plugin.name == "acme"]) == 1


def test_leftover_metadata_without_its_main_file_loses_to_the_whole_one(site, make_dist):
    make_dist.backend("acme-attention", "acme", version="2.0").unpack(site)
    make_dist("acme-attention", "9.0", backends={"acme": "gone:Backend"}).unpack(site)
    (site / "acme_attention-9.0.dist-info" / "METADATA").unlink()
    assert found()["acme"].version == "2.0"


def test_metadata_with_no_main_file_at_all_is_named_after_its_folder(site, make_dist):
    make_dist.backend("acme-attention", "acme", version="2.0").unpack(site)
    (site / "acme_attention-2.0.dist-info" / "METADATA").unlink()
    assert found()["acme"].label == "acme_attention 2.0"


def test_an_empty_dist_info_and_pips_own_leftovers_are_passed_over(site, make_dist):
    (site / "hollow-1.0.dist-info").mkdir()
    make_dist.backend("acme-attention", "acme").unpack(site)
    make_dist("acme-attention", "0.9", backends={"acme": "old:Backend"}).unpack(
        site, info="~cme_attention-0.9.dist-info"
    )
    assert found()["acme"].version == "1.0"


def test_unreadable_metadata_is_a_problem_of_its_own(site, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    bad = site / "bad-1.0.dist-info"
    bad.mkdir()
    (bad / "entry_points.txt").write_bytes(b"[polyattn.backends]\n\xff\xfe = x\n")
    assert "acme" in found()
    (problem,) = [text for text in leftovers() if "bad-1.0" in text]
    assert "UnicodeDecodeError" in problem


def test_unreadable_metadata_is_logged(site, make_dist, caplog):
    make_dist.backend("acme-attention", "acme").unpack(site)
    (site / "acme_attention-1.0.dist-info" / "METADATA").write_bytes(b"Name: acme-attention\nSummary: gr\xf6\xdfer\n")
    with caplog.at_level(logging.WARNING, "polyattn"):
        assert "acme" not in found()
    assert "acme_attention-1.0.dist-info: UnicodeDecodeError" in caplog.text


def test_a_mark_of_byte_order_hides_nothing(site, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    for file in ("entry_points.txt", "METADATA"):
        path = site / "acme_attention-1.0.dist-info" / file
        path.write_text(path.read_text(), encoding="utf-8-sig")
    assert found()["acme"].label == "acme-attention 1.0"


def test_what_would_act_on_a_terminal_is_written_out(site, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    info = site / "acme_attention-1.0.dist-info"
    (info / "METADATA").write_text("Name: acme\x1b[31m\nVersion: 1.0\x07\nSummary: a\u202eb \u221e\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[polyattn.backends]\nacme = m:B\nan\x1b[2Jy = m:B\n", encoding="utf-8")
    plugins = found()
    assert (plugins["acme"].label, plugins["acme"].summary) == ("acme\\x1b[31m 1.0\\x07", "a\\u202eb \u221e")
    assert plugins["an\\x1b[2Jy"].fault


def test_a_look_alike_of_a_name_is_told_apart():
    assert discovery.illegal_name("polyattn.backends", "f\u0430").endswith(r"got 'f\u0430'")


def test_a_folder_called_entry_points_is_passed_over(site, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    (site / "bad-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    assert "acme" in found()


class BrokenFinder:
    def find_spec(self, *_args):
        return None

    def find_distributions(self, *_args):
        raise OSError("no finder today")


def test_a_finder_that_fails_hides_nobody_else_and_is_a_problem(site, monkeypatch, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    monkeypatch.setattr(sys, "meta_path", [BrokenFinder(), *sys.meta_path])
    assert "acme" in found()
    assert [problem for problem in leftovers() if "of sys.meta_path: OSError: no finder today" in problem]


def test_what_is_not_a_folder_on_the_path_hides_nobody(site, monkeypatch, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    monkeypatch.setattr(sys, "path", [3, "\0", *sys.path, None])
    assert "acme" in found()


@pytest.mark.parametrize("name", ["nx-loop", "FA", "1x", "", "auto", "a:b", "naïve"])
def test_an_illegal_name_is_kept_as_a_fault_and_logged_once(name, site, make_dist, caplog):
    make_dist("acme-attention", entry_points=f"[polyattn.backends]\n{name} = acme:Backend\n").unpack(site)
    with caplog.at_level(logging.WARNING, "polyattn"):
        plugin = found()[name]
        discovery.current()
    assert plugin.fault
    assert plugin.module == ""
    (record,) = [record for record in caplog.records if "acme-attention 1.0" in record.getMessage()]
    assert repr(name) in record.getMessage()


@pytest.mark.parametrize("value", ["not a value!", "a-b:C", "m:C:D", "m..n:C", ":C", "m:", "m:1x", ""])
def test_a_malformed_value_is_kept_as_a_fault(value, site, make_dist):
    make_dist("acme-attention", entry_points=f"[polyattn.backends]\nacme = {value}\n").unpack(site)
    fault = found()["acme"].fault
    assert repr(value) in fault
    assert "'module:attribute'" in fault


def test_a_line_that_is_not_an_entry_point_is_kept_as_a_fault(site, make_dist):
    make_dist(
        "acme-attention", entry_points="[polyattn.backends]\n# comment\n; comment\n\nacme\n[other]\nx = y\n"
    ).unpack(site)
    mine = [plugin for plugin in discovery.rescan().candidates["polyattn.backends"] if plugin.dist == "acme-attention"]
    assert [plugin.name for plugin in mine] == ["acme"]
    assert mine[0].fault


@pytest.mark.parametrize("value", ["m", "p.m:C", "m:C.attr", "m : C", "m:C [extra]"])
def test_every_form_of_a_value_is_read(value):
    plugin = discovery.candidate("polyattn.backends", "acme", value)
    assert not plugin.fault
    assert plugin.module in {"m", "p.m"}


def test_auto_is_reserved_among_backends_only():
    assert "reserved" in discovery.illegal_name("polyattn.backends", "auto")
    assert not discovery.illegal_name("polyattn.rope", "auto")


def test_a_zip_on_the_path_is_read_like_a_folder(tmp_path, run_python, make_dist):
    acme = make_dist.backend("acme-attention", "acme")
    with zipfile.ZipFile(tmp_path / "plugins.zip", "w") as archive:
        for name, text in acme.files().items():
            archive.writestr(name, text)
    code = "from polyattn import backends; print(backends.info('acme').dist, backends.get('acme').name)"
    assert run_python(code, path=[tmp_path / "plugins.zip"]).stdout.split() == ["acme-attention", "acme"]


def test_a_read_only_folder_is_enough(tmp_path, run_python, make_dist):
    folder = make_dist.backend("acme-attention", "acme").unpack(tmp_path / "site")
    before = sorted(folder.rglob("*"))
    for path in [*before, folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        code = "from polyattn import backends; backends.refresh(); print(backends.get('acme').name)"
        # Without byte code: a superuser's interpreter could write it here all the same.
        assert run_python(["-B", "-c", code], path=[folder]).stdout.split() == ["acme"]
        assert sorted(folder.rglob("*")) == before
    finally:
        folder.chmod(0o755)


def test_names_among_two_thousand_distributions_take_under_150_ms(site, make_dist):
    for i in range(2000):
        info = site / f"pkg_{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pkg-{i}\nVersion: 1.0\n")
        if i % 4 == 0:
            (info / "entry_points.txt").write_text("[console_scripts]\nrun = pkg:main\n")
    make_dist.backend("acme-attention", "acme").unpack(site)
    times = []
    for _ in range(3):
        start = time.thread_time()  # what the scan costs, whatever else this machine does
        assert "acme" in found()
        times.append(time.thread_time() - start)
    assert min(times) < 0.15, times


@pytest.mark.parametrize(
    "written", ["[polyattn.backends", "[polyattn.backend]", "[Polyattn.Backends]", "[polyatn.backends]"]
)
def test_a_section_that_was_meant_for_a_group_and_is_not_one_is_a_problem_that_names_the_group(
    written, site, make_dist
):
    make_dist.backend("acme-attention", "acme").unpack(site)
    (file,) = site.glob("acme*.dist-info/entry_points.txt")
    file.write_text(f"[console_scripts]\nx = y:z\n{written}\nacme = acme_attention:Backend\n")
    assert "acme" not in found()
    (problem,) = [text for text in leftovers() if "acme_attention" in text]
    assert problem.endswith(f"the section {written} is not a group of polyattn; did you mean [polyattn.backends]?")


@pytest.mark.parametrize("other", ["[polyattn.readers]", "[polyattn.scopes]", "[console_scripts]", "[polyattn.hooks]"])
def test_a_section_of_somebody_else_or_of_a_later_release_is_not_a_problem(other, site, make_dist):
    make_dist.backend("acme-attention", "acme").unpack(site)
    (file,) = site.glob("acme*.dist-info/entry_points.txt")
    file.write_text(f"{other}\nacme = acme_attention\n")
    assert not [text for text in leftovers() if "acme_attention" in text]


def test_look_alikes_of_letters_do_not_make_two_distributions_the_same():
    assert discovery.normalized("Acme_Kernel") == "acme-kernel"
    assert discovery.normalized("acme-\u212aernel") != "acme-kernel"
