"""Ways to be installed, and ways to be half installed: what is there is found, and nothing else is harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
import zipapp
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ATTEND = """
import torch, polyattn
q = torch.zeros(1, 2, 4, 8)
layout = polyattn.MaskLayout.causal(4)
print(polyattn.attention(q, q, q, layout, backend="eager").output.shape == q.shape)
print(polyattn.backends.info("eager").source)
print(polyattn.__file__)
"""


@pytest.fixture(scope="module")
def target(build_wheel, pip_install, tmp_path_factory):
    """A folder into which ``pip install --target`` put core, one backend, the command line and the readers."""
    folders = ("core", "plugins/eager", "cli", "conformance", "integrations/readers")
    return pip_install(tmp_path_factory.mktemp("target"), *(build_wheel(ROOT / folder) for folder in folders))


def test_pip_install_target(target, run_python):
    works, source, code = run_python(ATTEND, path=[target]).stdout.splitlines()
    assert works == "True"
    assert Path(source) == target / "polyattn_eager-0.1.0.dist-info" / "entry_points.txt"
    assert Path(code) == target / "polyattn" / "__init__.py"


def test_a_zipapp_carries_core_plugins_and_their_data(target, tmp_path, run_python):
    (target / "zipped_app.py").write_text(
        f"def main():\n    exec({ATTEND!r})\n"
        "    from polyattn_readers.model_classes import classes\n"
        "    print('adjacent' in classes())\n"
    )
    zipapp.create_archive(target, tmp_path / "app.pyz", main="zipped_app:main")
    (target / "zipped_app.py").unlink()
    works, source, code, data = run_python([tmp_path / "app.pyz"]).stdout.splitlines()
    assert works == data == "True"
    assert source == f"{tmp_path}/app.pyz/polyattn_eager-0.1.0.dist-info/entry_points.txt"
    assert code == f"{tmp_path}/app.pyz/polyattn/__init__.py"


def test_new_in_a_zip_says_that_it_needs_a_folder(target, tmp_path, run_python):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in target.glob("polyattn*/**/*.py"):
            archive.write(path, path.relative_to(target))
    done = run_python(["-m", "polyattn", "new", "mine"], path=[tmp_path / "all.zip"], status=2)
    assert "run it from an installed polyattn, not from a zip" in done.stderr
    assert not (tmp_path / "polyattn-mine").exists()


@pytest.fixture
def environment(tmp_path):
    """The interpreter of a new environment that sees, editable installs included, all that this one sees."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def test_an_editable_install_is_found_and_doctor_shows_its_source(environment, tmp_path, make_dist):
    source = tmp_path / "acme"
    make_dist.backend("acme-attention", "acme").unpack(source / "src")
    (source / "pyproject.toml").write_text("""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "acme-attention"
version = "1.0"
entry-points."polyattn.backends".acme = "acme_attention:Backend"
[tool.hatch.build]
dev-mode-dirs = ["src"]
only-include = ["src/acme_attention.py"]
sources = ["src"]
""")

    def run(*arguments, env=None):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "POLYATTN"))}
        command = [environment, "-m", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean | (env or {}), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "--disable-pip-version-check", "--editable", str(source))
    report = json.loads(run("polyattn", "doctor", "--json", env={"POLYATTN_ALLOW": "acme-attention"}))
    (acme,) = [entry for entry in report["backends"] if entry["name"] == "acme"]
    assert acme["status"] == "loaded"
    assert Path(acme["code"]) == source / "src" / "acme_attention.py"
    assert Path(acme["source"]).is_relative_to(environment.parent.parent)


def test_without_any_metadata_a_program_registers_by_module_and_attribute(tmp_path, run_python, make_dist):
    with zipfile.ZipFile(tmp_path / "bare.zip", "w") as archive:
        for source in ("core/src", "modules/src"):
            for path in (ROOT / source).rglob("*.py"):
                archive.write(path, path.relative_to(ROOT / source))
        archive.writestr("acme_attention.py", make_dist.backend("acme-attention", "acme").modules["acme_attention.py"])
    code = """
import sys, polyattn
assert "acme" not in polyattn.backends.names()
polyattn.backends.register("acme", "acme_attention:Backend")
assert polyattn.backends.names() == ("acme",) and "acme_attention" not in sys.modules
config = polyattn.AttentionConfig.from_dict({"attn_backend": "acme"})
print(polyattn.backends.info("acme").status, config.layer(0).backend.name, polyattn.__file__)
"""
    # Whatever else is installed stays out of it, as in an application that froze modules without their metadata.
    hidden = (
        "import importlib_metadata\n"
        "importlib_metadata.MetadataPathFinder.find_distributions = staticmethod(lambda _: iter(()))\n"
    )
    said = run_python(hidden + code, path=[tmp_path / "bare.zip"]).stdout.split()
    assert said == ["registered", "acme", f"{tmp_path}/bare.zip/polyattn/__init__.py"]


def egg_info_beside_dist_info(dist, folder):
    dist.unpack(folder)
    dist.unpack(folder, info="acme_attention.egg-info")
    return [folder]


def twice_on_the_path(dist, folder):
    return [dist.unpack(folder / "a"), dist.unpack(folder / "b"), folder / "a"]


def beside_an_empty_dist_info(dist, folder):
    dist.unpack(folder)
    (folder / "hollow-1.0.dist-info").mkdir()
    (folder / "acme_attention-0.9.dist-info").mkdir()
    return [folder]


def beside_what_pip_left_behind(dist, folder):
    dist.unpack(folder)
    dist.unpack(folder, info="~cme_attention-0.9.dist-info")
    return [folder]


def without_its_main_file(dist, folder):
    dist.unpack(folder)
    (folder / f"{dist.stem}.dist-info" / "METADATA").unlink()
    return [folder]


def beside_unreadable_metadata(dist, folder):
    bad = folder / "bad-1.0.dist-info"
    bad.mkdir(parents=True)
    (bad / "entry_points.txt").write_bytes(b"[polyattn.backends]\n\xff\xfe = x\n")
    return [dist.unpack(folder)]


def beside_a_folder_that_is_not_there(dist, folder):
    (folder / "file").parent.mkdir(parents=True)
    (folder / "file").write_text("no folder")
    return [folder / "nowhere", folder / "file", dist.unpack(folder / "site")]


def in_a_zip(dist, folder):
    folder.mkdir()
    with zipfile.ZipFile(folder / "plugins.zip", "w") as archive:
        for name, text in dist.files().items():
            archive.writestr(name, text)
    return [folder / "plugins.zip"]


def in_a_path_with_blanks_and_umlauts(dist, folder):
    return [dist.unpack(folder / "Eigene Dateien" / "größer")]


@pytest.mark.parametrize(
    "install",
    [
        egg_info_beside_dist_info,
        twice_on_the_path,
        beside_an_empty_dist_info,
        beside_what_pip_left_behind,
        without_its_main_file,
        beside_unreadable_metadata,
        beside_a_folder_that_is_not_there,
        in_a_zip,
        in_a_path_with_blanks_and_umlauts,
    ],
)
def test_a_plugin_is_one_plugin_that_works(install, tmp_path, run_python, make_dist):
    path = install(make_dist.backend("acme-attention", "acme"), tmp_path / "site")
    done = run_python(["-m", "polyattn", "list", "--json"], path=path)
    listed = json.loads(done.stdout)["backends"]
    assert [entry["status"] for entry in listed if entry["name"] == "acme"] == ["available"]
    assert {"eager", "sdpa"} <= {entry["name"] for entry in listed}
    code = """
from polyattn import backends
from polyattn_cli.doctor import _code
print(backends.get("acme").name, backends.info("acme").status, _code("acme_attention"), sep="\\n")
"""
    name, status, where = run_python(code, path=path).stdout.splitlines()
    assert (name, status) == ("acme", "loaded")
    assert any(where == f"{folder}{os.sep}acme_attention.py" for folder in path)


APP = """
import sys

import polyattn
from polyattn_cli import main

if len(sys.argv) > 1:
    main()
print(polyattn.backends.names(), polyattn.backends.get("acme").name, getattr(sys, "frozen", False))
"""


@pytest.mark.nightly
def test_an_application_frozen_by_pyinstaller_finds_the_plugins_it_was_frozen_with(
    build_wheel, pip_install, make_dist, tmp_path, run_python
):
    pytest.importorskip("PyInstaller", reason="PyInstaller is not installed: pip install pyinstaller")
    acme = make_dist.backend("acme-attention", "acme").wheel(tmp_path)
    other = make_dist.backend("other-attention", "other").wheel(tmp_path)
    wheels = [build_wheel(ROOT / folder) for folder in ("core", "cli", "conformance")]
    site = pip_install(tmp_path / "site", *wheels, acme, other)
    (tmp_path / "app.py").write_text(APP)
    left_out = [f"--exclude-module={name}" for name in ("torch", "matplotlib", "numpy", "PIL")]
    # Torch alone would take minutes and gigabytes; nothing that is asked of the application here needs it.
    run_python(
        ["-m", "PyInstaller", "--onedir", "--log-level=ERROR", *left_out, "app.py"],
        path=[site],
        env={"POLYATTN_ALLOW": "acme-attention", "PYINSTALLER_CONFIG_DIR": str(tmp_path / "cache")},
        timeout=300,
    )
    app = tmp_path / "dist" / "app" / "app"

    def frozen(*arguments):
        return subprocess.run([app, *arguments], capture_output=True, text=True, check=True, env={}).stdout

    assert frozen().split() == ["('acme',)", "acme", "True"]
    (acme,) = json.loads(frozen("list", "--json"))["backends"]
    assert (acme["dist"], acme["version"]) == ("acme-attention", "1.0")
    assert Path(acme["source"]).is_relative_to(app.parent)
    assert frozen("--help").startswith("Usage: polyattn")
