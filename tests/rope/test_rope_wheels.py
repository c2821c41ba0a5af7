"""From built wheels: core and any one variant list exactly that one, it works, and another is refused with its cure."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bare_environment import bare_environment

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "switch": "long"},
    "proportional": {"partial_rotary_factor": 0.5},
}
pytestmark = pytest.mark.slow

CODE = """
import sys, torch, polyattn
variant, other, parameters = sys.argv[1], sys.argv[2], eval(sys.argv[3])
found = [(info.name, info.dist) for info in polyattn.rope_variants.infos()]
assert found == [(variant, f"polyattn-rope-{variant}")], found
for module in (polyattn, sys.modules[type(polyattn.rope_variants.get(variant)).__module__]):
    assert module.__file__.startswith(tuple(sys.argv[4:])), module.__file__
fields = dict(theta=10000.0, head_dim=8, rotary_dim=8, interleaved=False, max_position=64, original_max_position=16)
spec = polyattn.RopeSpec(variant=variant, parameters=parameters, **fields)
tables = polyattn.RotaryEmbedding(spec)(torch.arange(4)[None])
q, _ = polyattn.apply_rotary(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), tables, interleaved=False)
assert q.isfinite().all()
try:
    polyattn.RopeSpec(variant=other, parameters={}, **fields)
except polyattn.UnknownRopeVariantError as error:
    print(error)
"""


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpacked(source, folder):
    """The contents of a freshly built wheel, as pip lays them out."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "dist", cwd=source)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A Python with the third-party packages of this one and core from its wheel."""
    binaries = bare_environment(tmp_path_factory.mktemp("environment"))
    core = unpacked(ROOT / "core", tmp_path_factory.mktemp("core"))
    return binaries / "python", core


@pytest.mark.parametrize(
    "variant", [name if name == "yarn" else pytest.param(name, marks=pytest.mark.nightly) for name in VARIANTS]
)
def test_core_and_one_variant_are_enough(environment, tmp_path, variant):
    python, core = environment
    site = unpacked(ROOT / "plugins" / "rope" / variant, tmp_path)
    assert (site / f"polyattn_rope_{variant}" / "py.typed").exists()
    assert list(site.glob("*.dist-info/licenses/LICENSE"))
    both = {"PYTHONPATH": f"{core}:{site}", "PATH": ""}
    other = "linear" if variant == "default" else "default"
    said = run(python, "-c", CODE, variant, other, repr(VARIANTS[variant]), core, site, env=both)
    assert f"pip install polyattn-rope-{other}" in said
