"""What a kernel provider is: a package that brings FlashAttention-2 kernels, and what it can and cannot do.

Nothing here imports the package before it is asked whether it can run.
"""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.util
import sys
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polyattn import AttentionRequest, Reason

#: Widest head that the kernels take, and the number that a width must be a multiple of.
MAX_WIDTH, WIDTH_STEP = 256, 8
#: Compute capability of the oldest GPU with kernels (Ampere).
MIN_CAPABILITY = (8, 0)
#: What the backend can do with the kernels of flash_attn.
ABILITIES = frozenset(
    (
        *("bfloat16", "float16", "full", "causal", "window", "padded", "packed", "prefix_lm", "chunked", "positions"),
        *("tree", "sink_tokens", "two_sided_window", "union", "kv_lengths"),
        *("active_queries", "gqa", "unequal_width", "softcap", "sinks", "lse", "lse_grad", "grad", "dropout"),
        "deterministic",
    )
)
NOT_INSTALLED = "kernel_not_installed"
FLASH_ATTN_INSTALL = "pip install --no-build-isolation 'polyattn-fa2[flash-attn]'"

Forward = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


class KernelCall(NamedTuple):
    """Everything but q, k and v of one kernel call.

    A *fixed* call has tensors ``[B, S, H, D]`` and no offsets. A call over *sequences* has tensors ``[tokens, H, D]``,
    in which sequence ``i`` is rows ``offsets[i] .. offsets[i + 1] - 1``. Query i of a sequence of Q queries and K keys
    stands at position ``i + K - Q`` among the keys.

    Attributes:
        scale: of the scores.
        window_size: how many keys before and after its position a query sees; -1: all.
        softcap: 0 means none.
        dropout: probability of dropping a weight.
        deterministic: whether the backward must be.
        cu_seqlens_q: int32 ``[N + 1]`` on the device, or ``None`` in a fixed call.
        cu_seqlens_k: likewise.
        max_seqlen_q: the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys.
    """

    scale: float
    window_size: tuple[int, int]
    softcap: float
    dropout: float
    deterministic: bool
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after its position."""
        return self.window_size[1] == 0


class Provider(abc.ABC):
    """One source of kernels. Subclass it to add another, or to stand in for one in a test.

    Attributes:
        name: as in ``Options.provider``.
        package: what is imported, for messages.
        module: the module with the kernels.
        needs: the versions that work, for messages.
        install: what to do when it is absent.
        devices: device types that the kernels run on.
        fixed: whether it also takes fixed calls.
        abilities: what the backend can do with these kernels, all of it named, out of :data:`ABILITIES`.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]
    needs: ClassVar[str]
    install: ClassVar[str]
    devices: tuple[str, ...] = ("cuda",)
    fixed: ClassVar[bool] = False
    abilities: ClassVar[frozenset[str]] = ABILITIES

    def load(self) -> Any:
        """The module with the kernels, imported when it is first needed."""
        importlib.import_module(self.package)
        return importlib.import_module(self.module)

    def installed(self) -> bool:
        """Whether the package is there; does not import it."""
        return sys.modules.get(self.package) is not None or _on_path(self.package, tuple(sys.path))

    def reasons(self, device: torch.device) -> tuple[Reason, ...]:
        """Why nothing can run on ``device``; empty when it can.

        The kernels are not imported for a device that they do not run on.
        """
        if device.type not in self.devices:
            wanted = " or ".join(self.devices)
            hint = f"move q, k and v to {wanted}, or use another backend"
            unfit = Reason("device_type", "device", str(device), f"a {wanted} device", hint)
            return (unfit,) if self.installed() else (unfit, self._not_installed())
        return (*_gpu_reasons(device), *self._kernel_reasons())

    def limits(self, request: AttentionRequest, *, deterministic: bool) -> tuple[Reason, ...]:
        """Why a request is refused although the kernels run and have every feature of it."""
        return ()

    @abc.abstractmethod
    def version_problem(self, module: Any) -> str:
        """What is wrong with the version of a module that imported; empty when nothing is."""

    @abc.abstractmethod
    def title(self) -> str:
        """Name and version."""

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Forward:
        """Output, FP32 natural-log LSE (``[B, Hq, Q]`` or ``[Hq, tokens]``), and the dropout's state, int64 ``[2]``."""

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, Q, Hq, D]`` and LSE ``[B, Hq, Q]`` over the first ``lengths`` (int32 ``[B]``) keys of each row.

        For providers with the ability ``kv_lengths``. q is ``[B, Q, Hq, D]``; k and v are ``[B, K, Hkv, D]``, of any
        strides but the last; with a block table (int32 ``[B, N]``) they are ``[pages, page, Hkv, D]``. The last query
        of a row stands at its last key. Inference only.
        """
        raise NotImplementedError(f"{self.name} has no kernel with key lengths of rows")

    @abc.abstractmethod
    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        lse: Tensor,
        rng_state: Tensor,
        call: KernelCall,
    ) -> Grads:
        """Gradients into q, k and v; the kernel forms ``rowsum(grad * output)`` from the tensors that it is given."""

    def _kernel_reasons(self) -> tuple[Reason, ...]:
        try:
            problem = self.version_problem(self.load())
        except Exception as error:  # noqa: BLE001 - whatever an import raises is told to the user as it is
            if isinstance(error, ModuleNotFoundError) and error.name == self.package:
                return (self._not_installed(),)
            return (
                Reason(
                    "kernel_broken",
                    "kernel",
                    f"{self.package}, whose import raises {type(error).__name__}: {error}",
                    f"{self.needs} that imports",
                    "reinstall it for the installed torch and CUDA, or set the option provider to another one",
                ),
            )
        if problem:
            return (Reason("kernel_version", "kernel", problem, self.needs, self.install),)
        return ()

    def _not_installed(self) -> Reason:
        return Reason(NOT_INSTALLED, "kernel", f"no installed package {self.package}", self.needs, self.install)


@functools.cache
def _on_path(package: str, path: tuple[str, ...]) -> bool:
    # Remembered: it searches the whole path, for every question of whoever asks all backends.
    return importlib.util.find_spec(package) is not None


def _gpu_reasons(device: torch.device) -> tuple[Reason, ...]:
    if device.type != "cuda":
        return ()
    if not torch.cuda.is_available():
        hint = "check the driver and that torch was installed with CUDA (torch.cuda.is_available() is False)"
        return (Reason("no_gpu", "device", f"{device} without a GPU that torch can use", "a CUDA GPU", hint),)
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        got = f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
        return (
            Reason(
                "compute_capability", "device", got, "compute capability 8.0 (Ampere) or newer", "use another backend"
            ),
        )
    return ()
