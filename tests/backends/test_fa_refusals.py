"""What fa refuses, with the reason and the way out, and that nothing is computed before."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from fa_stand_in import FlashAttnStandIn, TorchVarlenStandIn, stand_in
from polyattn import (
    AttentionRequest,
    ConfigError,
    MaskLayout,
    StructuredMask,
    UnsupportedAttentionError,
    attention,
    backends,
    explain,
)
from polyattn_fa2 import FlashBackend, FlashOptions, providers

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def request(**changes):
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    return AttentionRequest(**{**sizes, "dtype": torch.bfloat16, "device": CPU, **changes})


def reasons(layout=None, options=None, **changes):
    backend = FlashBackend(options)
    layout = layout or MaskLayout.causal(4)
    asked = request(**changes)
    found = backend.unsupported(layout, asked)
    if found:
        with pytest.raises(UnsupportedAttentionError, match="backend 'fa' cannot do this attention") as refusal:
            backend.prepare(layout, asked)
        assert refusal.value.reasons == found
    return {reason.code: str(reason) for reason in found}


class Importing(providers.FlashAttn):
    """The provider as it is, on a machine whose CPU passes for a GPU."""

    devices = ("cpu",)


@pytest.fixture
def flash_attn_package(site, monkeypatch):
    """``flash_attn_package(code, version)``: install a package ``flash_attn`` whose kernels module runs ``code``."""

    def install(code, version="2.8.3"):
        folder = site / "flash_attn"
        folder.mkdir()
        (folder / "__init__.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
        (folder / "flash_attn_interface.py").write_text(textwrap.dedent(code), encoding="utf-8")

    with providers.override("flash_attn", Importing()):
        yield install


# Devices


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("autocast", [None, "cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'", "ignore:CUDA is not available")
def test_cpu_and_meta_tensors_are_refused_by_name_before_anything_is_cast(device, autocast, monkeypatch):
    q = torch.zeros(1, 2, 4, 8, device=device)

    def forbidden(*args, **kwargs):
        raise AssertionError("something was cast before the refusal")

    monkeypatch.setattr(torch.Tensor, "to", forbidden)
    with (
        torch.autocast(autocast or "cpu", dtype=torch.bfloat16, enabled=autocast is not None),
        pytest.raises(UnsupportedAttentionError) as refusal,
    ):
        attention(q, q, q, MaskLayout.causal(4), backend="fa")
    first = refusal.value.reasons[0]
    assert (first.code, first.feature) == ("device_type", "device")
    assert str(first) == f"device: got {device}, need a cuda device; move q, k and v to cuda, or use another backend"


def test_mixed_dtypes_on_the_cpu_are_refused_for_the_device():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedAttentionError, match="need a cuda device"):
        attention(q, q.double(), q, MaskLayout.causal(4), backend="fa")


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reasons(device=CUDA)["no_gpu"] == (
        "device: got cuda:0 without a GPU that torch can use, need a CUDA GPU; check the driver and that torch was "
        "installed with CUDA (torch.cuda.is_available() is False)"
    )


def test_an_old_gpu_is_refused_with_its_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert reasons(device=CUDA)["compute_capability"] == (
        "device: got Tesla T4, compute capability 7.5, need compute capability 8.0 (Ampere) or newer; "
        "use another backend"
    )


# Kernels


def test_a_kernel_that_is_not_installed_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with providers.override("flash_attn", Importing()):
        found = reasons(options=FlashOptions(provider="flash_attn"))
    assert found == {
        "kernel_not_installed": "kernel: got no installed package flash_attn, need flash_attn >= 2.7, < 3; "
        "pip install --no-build-isolation 'polyattn-fa2[flash-attn]'"
    }


@pytest.mark.parametrize(
    "code, text",
    [
        ("raise ImportError('undefined symbol: _ZN3c105Error')", "ImportError: undefined symbol: _ZN3c105Error"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("raise RuntimeError('no kernel image')", "RuntimeError: no kernel image"),
        ("import flash_attn_2_cuda", "ModuleNotFoundError: No module named 'flash_attn_2_cuda'"),
    ],
)
@pytest.mark.parametrize("provider", ["auto", "flash_attn"])
def test_a_kernel_that_does_not_import_is_broken_not_absent_and_is_not_passed_over(
    flash_attn_package, code, text, provider
):
    flash_attn_package(code)
    assert reasons(options=FlashOptions(provider=provider)) == {
        "kernel_broken": f"kernel: got flash_attn, whose import raises {text}, need flash_attn >= 2.7, < 3 that "
        "imports; reinstall it for the installed torch and CUDA, or set the option provider to another one"
    }


@pytest.mark.parametrize("version", ["2.6.3", "1.0.9", "3.0.0", "unknown"])
def test_another_version_of_the_kernel_is_refused_by_number(flash_attn_package, version):
    flash_attn_package("", version)
    assert reasons() == {
        "kernel_version": f"kernel: got flash_attn {version}, need flash_attn >= 2.7, < 3; "
        "pip install --no-build-isolation 'polyattn-fa2[flash-attn]'"
    }


def test_a_kernel_without_a_function_that_is_called_is_refused(flash_attn_package):
    flash_attn_package("_flash_attn_forward = _flash_attn_varlen_forward = _flash_attn_backward = print")
    assert "flash_attn 2.8.3 without _flash_attn_varlen_backward" in reasons()["kernel_version"]


@pytest.mark.parametrize("version", ["2.7.0", "2.8.3.post1", "2.8.3+cu12torch2.9"])
def test_the_versions_that_work_are_taken(flash_attn_package, version):
    flash_attn_package(" = ".join(providers.flash_attn.FUNCTIONS) + " = print", version)
    assert reasons() == {}


def test_a_kernel_is_not_imported_for_a_device_that_it_cannot_run_on(flash_attn_package):
    flash_attn_package("raise AssertionError('imported')")
    assert list(reasons(device=torch.device("meta"))) == ["device_type"]


def test_loading_the_plugin_imports_no_kernel(run_python):
    run_python(
        "import sys, polyattn\n"
        "polyattn.backends.get('fa')\n"
        "assert not {'flash_attn', 'torch.nn.attention.varlen'} & set(sys.modules)"
    )


def test_torch_takes_over_where_the_package_is_not_installed_and_only_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with providers.override("flash_attn", Importing()), stand_in("torch_varlen"):
        prepared = FlashBackend().prepare(MaskLayout.causal(4), request())
        assert prepared.state.settings.provider == "torch_varlen"
        with pytest.raises(UnsupportedAttentionError, match="no installed package flash_attn"):
            FlashBackend(FlashOptions("flash_attn")).prepare(MaskLayout.causal(4), request())


def test_where_neither_runs_both_say_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)

    class Old(TorchVarlenStandIn):
        def load(self):
            module = super().load()
            module.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None
            return module

    with providers.override("flash_attn", Importing()), providers.override("torch_varlen", Old()):
        found = reasons()
    assert list(found) == ["kernel_not_installed", "kernel_version"]
    assert "whose varlen_attn lacks scale, window_size, enable_gqa, return_aux" in found["kernel_version"]


# Requests


@pytest.fixture
def kernels():
    with stand_in("flash_attn") as calls:
        yield calls
    assert calls.forward == [], "something was computed before the refusal"


def test_fp32_outside_autocast_is_refused_with_both_ways_out(kernels):
    text = reasons(dtype=torch.float32)["no_float32"]
    assert "float32: got float32" in text
    assert "cast q, k and v to bfloat16 or float16, or call under torch.autocast('cuda')" in text


def test_fp64_is_refused_although_autocast_leaves_it(kernels):
    assert "autocast leaves FP64 as it is" in reasons(dtype=torch.float64)["no_float64"]


@pytest.mark.parametrize("widths", [(257, 8), (8, 264)])
def test_heads_wider_than_256_are_refused(kernels, widths):
    assert reasons(head_dim=widths[0], v_head_dim=widths[1]) == {
        "head_width": f"kernel: got D={widths[0]}, Dv={widths[1]}, need head widths of at most 256; use another backend"
    }


def test_a_gradient_through_the_lse_needs_one_free_column(kernels):
    train = {"needs_grad": True, "head_dim": 256}
    assert reasons(v_head_dim=255, needs_lse=True, needs_lse_grad=True, **train) == {}
    for feature, asked in (("lse_grad", {"needs_lse": True, "needs_lse_grad": True}), ("sinks", {"has_sinks": True})):
        found = reasons(v_head_dim=256, **asked, **train)
        assert found["head_width_lse_grad"].startswith(
            f"{feature}: got D=256, Dv=256, need value widths of at most 255"
        )
    assert reasons(v_head_dim=256, head_dim=256, has_sinks=True) == {}


@pytest.mark.parametrize(
    "layout, code, hint",
    [
        (MaskLayout.dense(torch.ones(4, 4).bool()), "no_dense", "describe the mask by its structure"),
        (MaskLayout.from_mod(lambda b, h, i, j: i >= j, q_len=4, kv_len=4), "no_mask_mod", "describe the mask by its"),
        (MaskLayout.dense(torch.ones(1, 2, 4, 4).bool()), "no_per_head_mask", "use one mask for all heads"),
    ],
    ids=["dense", "mask_mod", "per_head"],
)
def test_masks_without_structure_are_refused(kernels, layout, code, hint):
    assert hint in reasons(layout)[code]


HOLES = torch.tensor([[True, False, True, True]])


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.padded(HOLES),
        MaskLayout.padded(HOLES, window=2),
        MaskLayout.padded(HOLES, window=2, causal=False),
        MaskLayout(4, 4, 1, 1, visibility=StructuredMask(
            causal=True, q_positions=torch.arange(4)[None], kv_positions=torch.tensor([[0, 2, 1, 3]]))),
    ],
    ids=["causal", "causal_window", "window", "scattered"],
)  # fmt: skip
def test_a_few_holes_between_keys_are_several_runs(kernels, layout):
    assert "not_sequences" not in reasons(layout)


@pytest.mark.parametrize(
    "layout, feature",
    [
        (MaskLayout.padded((torch.arange(200) % 2 == 0)[None]), "padded"),
        (MaskLayout(400, 400, visibility=StructuredMask(
            causal=True, q_positions=torch.arange(400).flip(0)[None], kv_positions=torch.arange(400).flip(0)[None])),
         "positions"),
    ],
    ids=["holes", "scattered"],
)  # fmt: skip
def test_many_runs_of_keys_are_refused(kernels, layout, feature):
    text = reasons(layout)["not_sequences"]
    assert text.startswith(f"{feature}: got ")
    assert "taking keys out from between others would change the distances" in text


def test_a_bias_is_refused(kernels):
    assert "the kernels add nothing to the scores" in reasons(has_bias=True)["no_bias"]


def test_dropout_under_a_softcap_is_refused_and_each_alone_is_not(kernels):
    assert reasons(softcap=2.0, dropout_p=0.1, training=True) == {
        "softcap_with_dropout": "dropout: got dropout_p 0.1 together with softcap 2.0, need one of the two; "
        "use the backend 'eager' for both"
    }
    assert reasons(softcap=2.0, dropout_p=0.1) == reasons(dropout_p=0.1, training=True) == {}


def test_all_that_is_wrong_is_said_at_once(kernels):
    found = reasons(MaskLayout.dense(torch.ones(4, 4).bool()), dtype=torch.float32, has_bias=True, head_dim=300)
    assert list(found) == ["no_dense", "no_float32", "no_bias", "head_width"]


@pytest.mark.parametrize(
    "feature, asked", [("dropout", {"dropout_p": 0.1, "training": True}), ("softcap", {"softcap": 2.0})]
)
def test_what_torch_lacks_is_refused_with_the_provider_that_has_it(feature, asked):
    with stand_in("torch_varlen"):
        found = reasons(options=FlashOptions("torch_varlen"), **asked)
    assert list(found) == [f"no_{feature}"]
    (text,) = found.values()
    assert text.startswith(f"{feature}: got {feature}")
    assert text.endswith(
        "use the provider flash_attn (pip install --no-build-isolation 'polyattn-fa2[flash-attn]'), or another backend"
    )


def test_torch_is_deterministic_only_when_all_of_torch_is(monkeypatch):
    options = FlashOptions("torch_varlen", deterministic=True)
    with stand_in("torch_varlen"):
        assert "torch_varlen_not_deterministic" in reasons(options=options, needs_grad=True)
        assert reasons(options=options) == {}
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert reasons(options=options, needs_grad=True) == {}


# Options and explain


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'provider' must be one of 'auto', 'flash_attn', 'torch_varlen', got 'fa3'"):
        backends.resolve("fa", {"provider": "fa3"})


def test_explain_says_why_fa_cannot_run_here():
    found = explain(MaskLayout.causal(4), request()).candidates["fa"]
    assert found[0].code == "device_type"


def test_auto_prefers_fa_where_it_runs():
    with stand_in("flash_attn"):
        assert explain(MaskLayout.causal(4), request()).chosen == "fa"


def test_a_stand_in_takes_its_place_only_while_it_is_asked_to():
    before = providers.get("flash_attn")
    with providers.override("flash_attn", FlashAttnStandIn()):
        assert providers.get("flash_attn") is not before
    assert providers.get("flash_attn") is before
