"""Where the kernels come from: a small table of providers by name, and the rule that picks one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from polyattn import Reason
from polyattn_fa2.providers.base import NOT_INSTALLED, Forward, Grads, KernelCall, Provider
from polyattn_fa2.providers.flash_attn import FlashAttn
from polyattn_fa2.providers.torch_varlen import TorchVarlen

__all__ = ["FlashAttn", "Forward", "Grads", "KernelCall", "Provider", "TorchVarlen", "choose", "get", "override"]

_PROVIDERS: dict[str, Provider] = {"flash_attn": FlashAttn(), "torch_varlen": TorchVarlen()}
#: Providers that were found to run, by what was asked; a failure is looked into again.
_FOUND: dict[tuple[str, torch.device], Provider] = {}


def get(name: str) -> Provider:
    """The provider of that name."""
    return _PROVIDERS[name]


@contextlib.contextmanager
def override(name: str, provider: Provider) -> Iterator[None]:
    """Another provider under a known name, for a test."""
    before = _PROVIDERS[name]
    _PROVIDERS[name] = provider
    _FOUND.clear()
    try:
        yield
    finally:
        _PROVIDERS[name] = before
        _FOUND.clear()


def choose(name: str, device: torch.device) -> tuple[Provider, tuple[Reason, ...]]:
    """The provider for ``device``, and why it cannot run there.

    Args:
        name: of a provider, or ``"auto"``: ``flash_attn``, or ``torch_varlen`` where ``flash_attn`` is not installed.
            One that is installed and broken is not passed over in silence.
        device: of q, k and v.
    """
    found = _FOUND.get((name, device))
    if found is not None:
        return found, ()
    provider, reasons = _look(name, device)
    if not reasons:
        _FOUND[name, device] = provider
    return provider, reasons


def _look(name: str, device: torch.device) -> tuple[Provider, tuple[Reason, ...]]:
    first = get("flash_attn" if name == "auto" else name)
    reasons = first.reasons(device)
    if name != "auto" or NOT_INSTALLED not in {reason.code for reason in reasons}:
        return first, reasons
    second = get("torch_varlen")
    others = second.reasons(device)
    if not others:
        return second, ()
    return first, tuple(dict.fromkeys((*reasons, *others)))
