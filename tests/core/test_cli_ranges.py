"""``polyattn doctor`` names what is installed outside the ranges that the distributions declare."""

from __future__ import annotations

import json

import pytest


def metadata(site, name, version, *needs, encoding="utf-8"):
    """The metadata of an installed distribution, and nothing else of it."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (folder / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: a word of the description"]), encoding)
    return site


@pytest.fixture
def problems(run_python):
    """``problems(site)``: what ``polyattn doctor --json`` with ``site`` first on ``sys.path`` finds wrong."""

    def ask(site, status):
        done = run_python(
            ["-m", "polyattn", "doctor", "--json"],
            path=[site],
            env={"POLYATTN_ALLOW": "polyattn-eager"},
            status=status,
        )
        return json.loads(done.stdout)["problems"]

    return ask


@pytest.mark.parametrize(("package", "version"), [("torch", "2.8.0"), ("torch", "9.0.0a0"), ("transformers", "4.57.6")])
def test_doctor_names_a_torch_or_transformers_outside_the_declared_range(package, version, problems, tmp_path):
    (text,) = problems(metadata(tmp_path / "site", package, version), 1)
    assert text.startswith(f"{package} {version} is outside the range >=")
    assert f"; run: pip install '{package}>=" in text
    assert "polyattn" in text


def test_doctor_tells_which_range_of_a_plugin_is_missed_and_how_to_mend_it(problems, tmp_path):
    site = metadata(tmp_path / "site", "acme-kernels", "3.1")
    metadata(site, "acme-attention", "1.0", "polyattn>=0.1", "Acme_Kernels<3,>=2.5")
    assert problems(site, 1) == [
        "acme-kernels 3.1 is outside the range >=2.5,<3 that acme-attention 1.0 declares; "
        "run: pip install 'acme-kernels>=2.5,<3'"
    ]


def test_doctor_asks_only_for_what_holds_here(problems, tmp_path):
    site = metadata(tmp_path / "site", "acme-kernels", "3.1+local")
    metadata(site, "acme-attention", "1.0", "polyattn", "acme-kernels>=3", "acme-kernels<1; extra == 'old'", "absent")
    metadata(site, "acme-attention-of-others", "1.0", "acme-kernels<1; python_version < '3'", "polyattn")
    metadata(site, "stranger", "1.0", "acme-kernels<1")
    assert problems(site, 0) == []


def test_doctor_names_metadata_whose_ranges_cannot_be_read(problems, tmp_path):
    site = metadata(tmp_path / "site", "acme-attention", "1.0", "polyattn", "acme kernels and more")
    (text,) = problems(site, 0)
    assert text.startswith(f"{site / 'acme-attention-1.0.dist-info'}: InvalidRequirement: ")
