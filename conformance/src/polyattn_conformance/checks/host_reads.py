"""Catch operations that make the host wait for tensor values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn_conformance.failure import CheckFailed

_READS = frozenset({
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "_unique2",
    "unique_dim", "repeat_interleave.Tensor",
})  # fmt: skip


class _HostReads(TorchDispatchMode):
    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else torch.compile does nothing inside the mode, and a backend that compiles its kernel could not run.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name in _READS:
            raise CheckFailed(f"{self.where} must not read tensor values on the host, it calls {func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def forbid_host_reads(where: str) -> Iterator[None]:
    """Raise ``AssertionError`` for every operation inside that reads a value back to the host.

    On CUDA torch itself watches too. What a custom op does inside is its own affair: it cannot be seen from here.
    """
    watch = torch.cuda.is_available() and torch.cuda.is_initialized()
    before = torch.cuda.get_sync_debug_mode() if watch else 0
    if watch:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _HostReads(where):
            yield
    finally:
        if watch:
            torch.cuda.set_sync_debug_mode(before)
