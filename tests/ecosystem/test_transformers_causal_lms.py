"""Every causal language model class of transformers equals eager attention on the bridge, or is refused."""

import importlib.util
from pathlib import Path

import pytest
import transformers

import polyattn_transformers
from causal_lms import CLASSES, Unbuildable, sweep

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models.py")
models_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_page)
VERSION, ROWS = models_page.recorded(models_page.PAGE.read_text(encoding="utf-8"))

# What modules of transformers warn of when they are imported is theirs.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

#: Classes that are wrong still, and why. Strict: who mends one takes it away and writes the page again.
KNOWN: dict[str, str] = {}


@pytest.fixture(autouse=True, scope="module")
def quiet_and_registered():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # tiny numbers look like mistakes to it
    polyattn_transformers.register()
    yield
    transformers.logging.set_verbosity(level)


def outcomes_of(name, *arguments):
    try:
        return sweep(name, *arguments)
    except Unbuildable as reason:
        return reason


def failures(outcomes):
    return {} if isinstance(outcomes, Unbuildable) else {case: one for case, one in outcomes.items() if one.failed}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=KNOWN[name])] if name in KNOWN else [])
        for name in CLASSES
    ],
)
def test_a_class_equals_eager_attention_or_is_refused_and_the_page_says_so(name):
    outcomes = outcomes_of(name)
    assert failures(outcomes) == {}
    if not isinstance(outcomes, Unbuildable) and outcomes["configured"].verdict == "equal":
        assert outcomes["padded"].verdict == "equal", "what can never run is refused when it is configured"
    if transformers.__version__ == VERSION:
        assert models_page.row(name, outcomes, str) == ROWS[name], "write the page again: python tools/models.py"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:backend 'flex_attention' with compiled=False")
@pytest.mark.parametrize(("backend", "options"), [("eager", {}), ("sdpa", {}), ("flex_attention", {"compiled": False})])
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in KNOWN])
def test_a_class_equals_eager_attention_or_is_refused_on_every_backend(name, backend, options):
    assert failures(outcomes_of(name, backend, options)) == {}


def test_the_page_lists_every_class_of_its_version():
    assert VERSION
    assert transformers.__version__ != VERSION or set(ROWS) == set(CLASSES)
