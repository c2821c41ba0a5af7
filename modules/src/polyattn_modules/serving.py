"""What serving engines can read: the reasons against a spec, known before a model is trained for nothing.

Built in are the draft models of SGLang. Their norm of queries and keys is per head, weighted and before the rotation:

* ``sglang_dflash`` always has it, so a spec without a norm is refused; it rotates whole heads; layers may have windows.
* ``sglang_eagle`` also has drafts without a norm, so such a spec is served; no windows. The first layer of EAGLE-3
  reads twice the hidden width.

Installed packages add targets, and reasons to those above, by the hook ``polyattn_check_servable``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from polyattn import ConfigError, Reason
from polyattn.messages import shown
from polyattn.registry import hooks
from polyattn_modules.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where the built-in targets differ.

    Attributes:
        needs_norm: whether queries and keys are always normalised.
        windows: whether a layer may have a window.
        partial_rotary: whether a part of each head may stay unrotated.
        double_input: whether the first layer may read twice the hidden width.
    """

    needs_norm: bool
    windows: bool
    partial_rotary: bool
    double_input: bool


TARGETS = {
    "sglang_dflash": _Target(needs_norm=True, windows=True, partial_rotary=False, double_input=False),
    "sglang_eagle": _Target(needs_norm=False, windows=False, partial_rotary=True, double_input=True),
}
_HINT = "train without a serving_target, or as the target computes"


def check_servable(spec: AttentionSpec, target: str) -> tuple[Reason, ...]:
    """Why the serving engine ``target`` cannot serve layers of ``spec``; empty when it can.

    Args:
        spec: the structure.
        target: ``sglang_dflash``, ``sglang_eagle``, or one that an installed hook knows.

    Returns:
        One reason for each thing that the target would compute otherwise.

    Raises:
        ConfigError: nobody knows the target, or ``spec`` is not an :class:`AttentionSpec`.
    """
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"spec must be an AttentionSpec, got {type(spec).__name__}; a layer has one as layer.spec, and "
            "AttentionSpec.from_hf reads one from a transformers configuration"
        )
    if not isinstance(target, str):
        raise ConfigError(
            f"serving_target must be the name of a target, such as {', '.join(TARGETS)}, got {shown(target)}"
        )
    reasons: list[Reason] = []
    known = target in TARGETS
    if known:
        reasons += _of_norm(spec, target)
        reasons += _of_rope(spec, target)
        reasons += _of_the_rest(spec, target)
    if hooks.installed("polyattn_check_servable"):
        for answer in hooks.call("polyattn_check_servable", spec=spec, target=target):
            known = True
            if not isinstance(answer, (tuple, list)) or not all(isinstance(reason, Reason) for reason in answer):
                raise ConfigError(
                    f"the hook polyattn_check_servable must return a tuple of Reason, or None, got {shown(answer)}"
                )
            reasons += answer
    if not known:
        raise ConfigError(
            f"serving_target must be one of {', '.join(TARGETS)} or known to an installed hook "
            f"polyattn_check_servable, got {shown(target)}"
        )
    return tuple(reasons)


def require_servable(spec: AttentionSpec, target: str) -> None:
    """Refuse a spec that ``target`` cannot serve.

    Raises:
        ConfigError: with every reason, or nobody knows the target.
    """
    reasons = check_servable(spec, target)
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise ConfigError(f"serving_target '{target}' cannot serve this attention:\n{lines}")


def _of_norm(spec: AttentionSpec, target: str) -> Iterator[Reason]:
    norm = spec.qk_norm
    if norm is None:
        if TARGETS[target].needs_norm:
            yield Reason("no_norm", "qk_norm", "no norm", "a norm of queries and keys, which it always applies", _HINT)
        return
    if norm.position == "after":
        yield Reason("norm_after_rope", "qk_norm", "a norm after the rotation", "one before it", _HINT)
    if norm.scope == "projection":
        yield Reason("norm_over_projection", "qk_norm", "a norm over the whole projection", "one per head", _HINT)
    if not norm.weighted:
        yield Reason("norm_without_weight", "qk_norm", "a norm without weight", "a weighted one", _HINT)


def _of_rope(spec: AttentionSpec, target: str) -> Iterator[Reason]:
    rope = spec.rope
    if rope is None:
        yield Reason("no_rope", "rope", "no rotary embedding", "one, which it always applies", _HINT)
        return
    if rope.interleaved:
        yield Reason(
            "pairing",
            "rope",
            "adjacent channels in pairs (interleaved)",
            "halves in pairs; the draft's configuration does not carry the pairing in every version",
            "reorder the channels of q_proj and k_proj, or train with halves",
        )
    if rope.axes is not None:
        yield Reason("axes", "rope", "positions with several axes", "one position per token", _HINT)
    if rope.rotary_dim != rope.head_dim and not TARGETS[target].partial_rotary:
        got = f"{rope.rotary_dim} of {rope.head_dim} channels rotated"
        yield Reason("partial_rotary", "rope", got, "whole heads rotated", _HINT)


def _of_the_rest(spec: AttentionSpec, target: str) -> Iterator[Reason]:
    if spec.window is not None and not TARGETS[target].windows:
        yield Reason("window", "window", f"window {spec.window}", "no window", _HINT)
    elif isinstance(spec.window, tuple):
        got, need = f"window {spec.window}", "one number, which its configuration can write"
        yield Reason("two_sided_window", "two_sided_window", got, need, _HINT)
    if spec.softcap is not None:
        yield Reason("softcap", "softcap", f"softcap {spec.softcap}", "no softcap", _HINT)
    if spec.sinks:
        yield Reason("sinks", "sinks", "sinks", "no sinks", _HINT)
    if spec.scale is not None and spec.scale != spec.head_dim**-0.5:
        yield Reason("scale", "scale", f"scale {spec.scale}", f"head_dim ** -0.5 = {spec.head_dim**-0.5}", _HINT)
    widths = (None, spec.hidden_size, *((2 * spec.hidden_size,) if TARGETS[target].double_input else ()))
    if spec.input_size not in widths:
        need = "the hidden width" + (" or twice that" if TARGETS[target].double_input else "")
        yield Reason("input_size", "input_size", f"an input of width {spec.input_size}", need, _HINT)
    if spec.v_head_dim != spec.head_dim:
        got = f"values of width {spec.v_head_dim} beside keys of width {spec.head_dim}"
        yield Reason("value_width", "unequal_width", got, "one width", _HINT)
    if spec.bias != spec.output_bias:
        got = f"bias={spec.bias} and output_bias={spec.output_bias}"
        yield Reason("one_bias", "bias", got, "biases in all four projections or in none", _HINT)
