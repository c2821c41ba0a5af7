"""What each form of FlexAttention can do, and why not the rest."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys

import torch

from polyattn import AttentionRequest, MaskLayout, Reason
from polyattn_flex._options import FlexOptions

COMPILED_CPU = frozenset(
    (
        *("float32", "bfloat16", "float16", "full", "causal", "window", "padded", "packed", "prefix_lm", "chunked"),
        *("tree", "sink_tokens", "two_sided_window", "union", "positions", "dense", "mask_mod", "per_head_mask"),
        "kv_lengths",
        "selected",
        *("active_queries", "gqa", "unequal_width", "bias", "softcap", "deterministic"),
    )
)
COMPILED_CUDA = COMPILED_CPU | {"grad", "bias_grad", "lse", "lse_grad", "sinks"}
UNCOMPILED = COMPILED_CUDA | {"float64"}

#: The installed torch where its gradient of a bias is not to be trusted.
_OLD_TORCH = None if torch.__version__ >= "2.14" else str(torch.__version__)

_INFERENCE_ONLY = "the compiled CPU kernel is inference only"
_NO_LSE = "the compiled CPU kernel returns no LSE"
_ON_CPU = {
    "grad": _INFERENCE_ONLY,
    "bias_grad": _INFERENCE_ONLY,
    "lse_grad": _INFERENCE_ONLY,
    "lse": _NO_LSE,
    "sinks": f"{_NO_LSE}, which sinks are applied with",
}
_UNCOMPILED = "backend_options {compiled: false} runs it uncompiled, slowly and in memory quadratic in the length"


def on_cpu(device: torch.device) -> bool:
    """Whether the compiled kernel of ``device`` is the one for the CPU: inference only, no LSE, run as an operator."""
    return device.type == "cpu"


def of_device(device: torch.device, *, compiled: bool) -> tuple[Reason, ...]:
    """Why nothing runs on ``device``: its kind, or its compiler."""
    if device.type not in {"cpu", "cuda"}:
        return (Reason("device", "device", str(device), "a CPU or a CUDA device", "move q, k and v there"),)
    if device.type == "cuda" and not torch.cuda.is_available():
        got = f"{device} without a GPU that torch can use"
        return (Reason("no_gpu", "device", got, "a CUDA GPU", "run on a machine with one, or on the CPU"),)
    if (
        not compiled or torch.compiler.is_compiling()
    ):  # whoever traces has a compiler, and cannot trace a search for one
        return ()
    return _of_cpu() if on_cpu(device) else _of_cuda(device)


@functools.cache
def _of_cpu() -> tuple[Reason, ...]:
    reasons = []
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform == "darwin" or "AVX" not in capability:
        got = f"a CPU with {capability} on {sys.platform}"
        reasons.append(Reason("cpu", "kernel", got, "AVX2 or AVX512 on Linux or Windows", _UNCOMPILED))
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")
    if shutil.which(compiler) is None:
        need = "the C++ compiler that torch.compile uses"
        hint = f"install g++ or set CXX; or {_UNCOMPILED}"
        reasons.append(Reason("no_compiler", "kernel", f"no {compiler} on the path", need, hint))
    return tuple(reasons)


@functools.cache
def _of_cuda(device: torch.device) -> tuple[Reason, ...]:
    reasons = []
    if importlib.util.find_spec("triton") is None:
        hint = f"pip install triton; or {_UNCOMPILED}"
        need = "triton, which compiles the kernel"
        reasons.append(Reason("no_triton", "kernel", "no installed package triton", need, hint))
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 7:
        got = f"compute capability {major}.{minor} of {device}"
        reasons.append(Reason("compute_capability", "device", got, "7.0 or higher", _UNCOMPILED))
    return tuple(reasons)


def hint(feature: str, device: torch.device) -> str:
    """Which other form has a feature that the compiled kernel of ``device`` lacks."""
    if on_cpu(device) and feature in _ON_CPU:
        return f"use a CUDA device, since {_ON_CPU[feature]}; or {_UNCOMPILED}"
    if feature == "float64":
        return f"cast q, k and v to float32, bfloat16 or float16; or {_UNCOMPILED}"
    return ""


def of_options(options: FlexOptions, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
    """Options and features that exclude each other on this device."""
    reasons = []
    if options.compiled and on_cpu(request.device):
        chosen = [name for name in ("decode", "kernel_options") if getattr(options, name)]
        if chosen:
            got = f"{' and '.join(chosen)} on {request.device}"
            need = "a CUDA device, whose kernels they choose"
            reasons.append(Reason("cuda_options", "options", got, need, "leave them out of backend_options"))
    elif options.decode and layout.q_len >= 128:
        got = f"decode with {layout.q_len} queries"
        hint = "leave decode out of backend_options"
        reasons.append(Reason("decode", "options", got, "fewer than 128 queries", hint))
    if options.compiled and request.needs_bias_grad and _OLD_TORCH is not None:
        got = f"the gradient of a bias with torch {_OLD_TORCH}, whose compiled kernel may give zeros for it"
        reasons.append(
            Reason("bias_grad_torch", "bias_grad", got, "torch 2.14 or newer", "the backend 'eager' is exact")
        )
    if options.compiled and request.deterministic and request.needs_bias_grad:
        got = "the gradient of a bias under deterministic algorithms"
        need = "a bias without gradient: its gradient is summed in the order in which programs finish"
        reasons.append(Reason("bias_grad_deterministic", "deterministic", got, need, "the backend 'eager' is exact"))
    return tuple(reasons)
