"""The example of a stranger's backend: its algorithm, its refusals, and that it installs and passes the kit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyattn
from polyattn import AttentionRequest, ConfigError, MaskLayout, UnsupportedAttentionError

# It is not a part of the workspace, so it is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "third_party_backend" / "src"))

from polyattn_online_softmax import OnlineSoftmaxBackend, _algorithm

FOLDER = Path(__file__).parents[2] / "examples" / "third_party_backend"
LAYOUTS = {
    "full": MaskLayout.full(70, 50),
    "causal": MaskLayout.causal(70),
    "more keys": MaskLayout.causal(30, 70),
    "more queries": MaskLayout.causal(70, 30),
    "window": MaskLayout.causal(70, window=9),
    "window both ways": MaskLayout.packed([70], causal=False, window=20),
    "documents": MaskLayout.packed([13, 40, 17]),
    "rows of documents": MaskLayout.packed([[50, 20], [1, 69]], window=16),
    "padding": MaskLayout.padded(torch.arange(70) < torch.tensor([[20], [70]])),
    "prefix": MaskLayout.prefix_lm(33, 70),
    "chunks": MaskLayout.chunked(16, 70),
    "inactive": MaskLayout.causal(70, active_queries=torch.arange(70)[None] % 3 > 0),
}


def results(backend, layout, dtype=torch.float64):
    """Output, LSE and the gradients of a loss on both."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, layout.q_len, 8), (2, layout.kv_len, 8), (2, layout.kv_len, 5))
    leaves = [torch.randn(2, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]
    sinks = torch.randn(4, generator=generator, dtype=dtype).requires_grad_()
    request = AttentionRequest.of(*leaves, sinks=sinks, needs_lse=True, needs_lse_grad=True)
    result = backend.prepare(layout, request)(*leaves, sinks=sinks)
    loss = result.output.square().sum() + result.lse.clamp_min(-1e3).cos().sum()
    return [result.output, result.lse, *torch.autograd.grad(loss, [*leaves, sinks])]


@pytest.mark.parametrize("chunk", [3, 32, 256])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_chunk_gives_the_numbers_of_eager(name, chunk):
    backend = OnlineSoftmaxBackend().configure({"chunk": chunk})
    for mine, right in zip(
        results(backend, LAYOUTS[name]), results(polyattn.backends.get("eager"), LAYOUTS[name]), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("layout", [MaskLayout.full, MaskLayout.causal])
def test_no_tensor_is_larger_than_the_inputs_forward_and_backward(layout):
    q, k, v = torch.randn(3, 1, 2, 512, 8)
    rest = (layout(512).to_blocks(), False, -1, 0.3, 32)
    with Largest() as largest:
        output, lse = _algorithm.forward(q, k, v, *rest)
        _algorithm.backward(output, lse, q, k, v, output, lse, *rest)
    assert largest.elements == q.numel()


def test_work_follows_the_structure():
    documents = MaskLayout.packed([64] * 8, causal=False).to_blocks()
    window = MaskLayout.causal(512, window=32).to_blocks()
    pairs = {
        name: sum((step.stop - step.start) * (step.key_stop - step.key_start) for step in _algorithm.steps(*table))
        for name, table in {"documents": (documents, False, -1, 32), "window": (window, False, 32, 32)}.items()
    }
    assert pairs["documents"] == 8 * 64 * 64
    assert pairs["window"] < 512 * 64


def refusal(layout, **fields):
    q = torch.zeros(1, 2, layout.q_len, 8)
    k = torch.zeros(1, 2, layout.kv_len, 8)
    with pytest.raises(UnsupportedAttentionError) as caught:
        polyattn.attention(q, k, k, layout, backend=OnlineSoftmaxBackend(), **fields)
    return caught.value


def test_what_it_lacks_is_refused_by_name_with_those_who_can():
    polyattn.backends.get("eager")  # only what is loaded is asked
    error = refusal(MaskLayout.dense(torch.ones(4, 4, dtype=torch.bool)), softcap=2.0)
    assert [reason.feature for reason in error.reasons] == ["dense", "softcap"]
    assert "eager" in error.alternatives


def test_a_structure_without_blocks_is_refused_with_what_to_do():
    error = refusal(MaskLayout.padded(torch.tensor([[True, False, True]])))
    assert [(reason.code, reason.feature) for reason in error.reasons] == [("no_blocks", "padded")]
    assert "padding without holes" in str(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"chunks": 4}, "unknown option 'chunks'"),
        ({"chunk": 2.0}, "int"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        OnlineSoftmaxBackend().configure(options)


def test_auto_takes_it_last():
    with polyattn.backends.override("online_softmax", OnlineSoftmaxBackend()):
        q = torch.zeros(1, 2, 4, 8)
        decision = polyattn.explain(MaskLayout.causal(4), AttentionRequest.of(q, q, q))
    assert decision.candidates["online_softmax"] == ()
    assert decision.chosen != "online_softmax"


def test_it_uses_the_public_names_only():
    for path in (FOLDER / "src").rglob("*.py"):
        assert "polyattn._" not in path.read_text(encoding="utf-8"), path


@pytest.fixture(scope="module")
def target(build_wheel, pip_install, tmp_path_factory):
    """A clean folder into which it was installed from its wheel."""
    return pip_install(tmp_path_factory.mktemp("target"), build_wheel(FOLDER))


def test_it_installs_and_is_chosen_with_its_options_in_a_config(target, run_python):
    code = """
import polyattn
config = polyattn.AttentionConfig.from_dict({"attn_backend": "online_softmax", "backend_options": {"chunk": 64}})
print(config.layer(0).backend.options.chunk, polyattn.backends.info("online_softmax").dist)
"""
    assert run_python(code, path=[target]).stdout.split() == ["64", "polyattn-online-softmax"]


@pytest.mark.slow
@pytest.mark.parametrize(("only", "least"), [("values*", 20), pytest.param("*", 150, marks=pytest.mark.nightly)])
def test_it_passes_the_kit_as_an_author_runs_it(target, run_python, only, least):
    command = ["-m", "polyattn", "check", "online_softmax", "--only", only, "--json"]
    done = run_python(command, path=[target], timeout=300)
    counts = json.loads(done.stdout)["counts"]
    assert counts["failed"] == counts["expected failure"] == 0
    assert counts["pass"] > least


@pytest.mark.slow
def test_its_own_tests_pass(target, run_python):
    tests = [
        FOLDER,
        "-c",
        FOLDER / "pyproject.toml",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "SmallChunks and fully_masked_rows",
    ]
    assert " passed" in run_python(["-m", "pytest", *tests], path=[target], timeout=300).stdout
