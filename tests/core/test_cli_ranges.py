"""``polyattn doctor`` names what is installed outside the ranges that the distributions declare."""

from __future__ import annotations

import json

import pytest

from polyattn_cli.ranges import outside


def install(site, name, version, *needs):
    """Write the metadata of a distribution, and nothing else of it."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (folder / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: a word of the description"]))
    return folder


def test_doctor_names_a_torch_and_a_transformers_outside_the_declared_ranges(run_python, tmp_path):
    install(tmp_path / "site", "torch", "2.8.0")
    install(tmp_path / "site", "transformers", "9.0.0")
    done = run_python(
        ["-m", "polyattn", "doctor", "--json"],
        path=[tmp_path / "site"],
        env={"POLYATTN_ALLOW": "polyattn-eager"},
        status=1,
    )
    old, new = sorted(json.loads(done.stdout)["problems"])
    assert old.startswith("torch 2.8.0 is outside the range >=")
    assert "that polyattn 0.1.0, polyattn-cli 0.1.0, polyattn-conformance 0.1.0 and " in old
    assert "; run: pip install 'torch>=" in old
    assert new.startswith("transformers 9.0.0 is outside the range >=")
    assert "that polyattn-transformers 0.1.0 declares; run: pip install 'transformers>=" in new


@pytest.mark.parametrize("version", ["2.4", "3.0", "3.1+local", "2.5a1"])
def test_the_range_of_a_plugin_is_named_with_its_owner_and_what_to_run(version, site):
    install(site, "acme-kernels", version)
    install(site, "acme-attention", "1.0", "polyattn>=0.1", "Acme_Kernels<3,>=2.5")
    text = (
        f"acme-kernels {version} is outside the range >=2.5,<3 that acme-attention 1.0 declares; "
        "run: pip install 'acme-kernels>=2.5,<3'"
    )
    assert outside() == ([text], [])


def test_only_what_holds_here_is_asked_of_those_who_need_polyattn(site):
    install(site, "acme-kernels", "3.1+local")
    install(site, "acme-attention", "1.0", "polyattn", "acme-kernels>=3", "acme-kernels<1; extra == 'old'", "absent")
    install(site, "acme-attention-of-others", "1.0", "acme-kernels<1; python_version < '3'", "polyattn")
    install(site, "stranger", "1.0", "acme-kernels<1")
    assert outside() == ([], [])


def test_metadata_whose_ranges_cannot_be_read_is_named_and_hides_no_other(site):
    folder = install(site, "acme-attention", "1.0", "polyattn", "acme kernels and more")
    install(site, "acme-kernels", "1.0")
    install(site, "zenith-attention", "1.0", "polyattn", "acme-kernels>=2")
    (found,), (unreadable,) = outside()
    assert unreadable.startswith(f"{folder}: InvalidRequirement: ")
    assert found.startswith("acme-kernels 1.0 is outside the range >=2 that zenith-attention 1.0 declares")
