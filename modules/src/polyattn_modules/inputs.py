"""What a layer's forward may be given: one validation for every kind of projection, before any matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyattn import AttentionInputError, AttentionScope, ConfigError
from polyattn.kernels import FLOATING
from polyattn.messages import shown
from polyattn_modules.fields import FIELDS, given
from polyattn_modules.spec import AttentionSpec

#: Submodules of a layer that its structure decides about, and the field that does.
_PARTS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "rotary": "rope", "sinks": "sinks"}
#: Attributes that would say something else than the layer does, were they set. ``sinks`` is a submodule as well.
_FIXED = FIELDS.keys() - {"sinks"}


def check_making(fused_qkv: object, device: Any, dtype: object) -> None:
    """Refuse what a layer cannot be made with.

    Raises:
        ConfigError: one message with every fault.
    """
    problems = []
    if not isinstance(fused_qkv, bool):
        problems.append(f"fused_qkv must be True (one matrix for q, k and v) or False (three), got {given(fused_qkv)}")
    if dtype is not None and dtype not in FLOATING:
        problems.append(f"dtype must be one of {', '.join(map(str, FLOATING))}, or None, got {shown(dtype)}")
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            said = str(error).splitlines()[0]
            problems.append(f"device must be a torch.device, its name or None, got {shown(device)}: {said}")
    if problems:
        raise ConfigError("; ".join(problems))


def check_attribute(name: str, value: object) -> None:
    """Refuse to set what was decided when the layer was built.

    Raises:
        ConfigError: ``name`` is a field of the structure, or follows from how the layer was made.
    """
    if name in _FIXED:
        raise ConfigError(
            f"{name} of a layer stays as it was built, got {given(value)}; build another layer, "
            f"GroupedQueryAttention.from_spec(dataclasses.replace(layer.spec, {name}=...))"
        )
    if name == "spec":
        raise ConfigError(
            f"spec of a layer stays as it was built, got {given(value)}; build another layer, "
            "GroupedQueryAttention.from_spec(spec)"
        )
    if name == "backend":
        raise ConfigError(f"backend cannot be set as an attribute, got {given(value)}; use layer.set_backend(...)")
    if name == "fused_qkv":
        raise ConfigError(
            f"fused_qkv of a layer stays as it was built, got {given(value)}; build another layer, "
            "GroupedQueryAttention.from_spec(layer.spec, fused_qkv=...), which loads a state dict of either form"
        )


def check_types(scope: AttentionScope, hidden: Tensor, kv_hidden: Tensor | None) -> None:
    """Refuse arguments of other types.

    Raises:
        AttentionInputError: the first that is wrong.
    """
    if not isinstance(scope, AttentionScope):
        raise AttentionInputError(f"scope must be an AttentionScope, got {type(scope).__name__}")
    if not isinstance(hidden, Tensor) or not (kv_hidden is None or isinstance(kv_hidden, Tensor)):
        name, x = ("kv_hidden", kv_hidden) if isinstance(hidden, Tensor) else ("hidden", hidden)
        raise AttentionInputError(f"{name} must be a floating tensor [B, S, hidden_size], got {type(x).__name__}")


def check_inputs(
    spec: AttentionSpec,
    scope: AttentionScope,
    hidden: Tensor,
    positions: Tensor | None,
    kv_hidden: Tensor | None,
    kv_positions: Tensor | None,
) -> None:
    """Refuse what does not fit together; one message names every fault.

    Args:
        spec: of the layer.
        scope: of the forward.
        hidden: ``[B, S, hidden_size]``.
        positions: Int ``[B|1, S]`` or ``[A, B|1, S]``; not looked at without a rotary spec.
        kv_hidden: ``[B, C, hidden_size]`` or ``None``.
        kv_positions: like ``positions`` with C; must be ``None`` without ``kv_hidden``.

    Raises:
        AttentionInputError: a type, shape, dtype or device does not fit.
    """
    width = spec.hidden_size
    problems = [
        f"{name} must be a floating tensor [B, S, {width}], got {x.dtype} {tuple(x.shape)}"
        for name, x in (("hidden", hidden), ("kv_hidden", kv_hidden))
        if x is not None and (x.dim() != 3 or x.shape[2] != width or x.dtype not in FLOATING)
    ]
    if problems:
        raise AttentionInputError("; ".join(problems))
    batch, length, _ = hidden.shape
    context = 0 if kv_hidden is None else kv_hidden.shape[1]
    if kv_hidden is not None:
        for what, got, need in (
            ("batch", kv_hidden.shape[0], batch),
            ("dtype", kv_hidden.dtype, hidden.dtype),
            ("device", kv_hidden.device, hidden.device),
        ):
            if got != need:
                problems.append(f"kv_hidden must have the {what} of hidden, {need}, got {got}")
    elif kv_positions is not None:
        problems.append("kv_positions must come with kv_hidden, whose positions they are, got kv_positions alone")
    layout = scope.layout if kv_hidden is None or scope.context_layout is None else scope.context_layout
    if layout.q_len != length or layout.kv_len != context + length:
        problems.append(
            f"the scope's layout must have q_len={length} and kv_len={context + length} for these hidden states, "
            f"got q_len={layout.q_len} and kv_len={layout.kv_len}; make a scope for each forward"
        )
    if spec.rope is not None:
        axes = 0 if spec.rope.axes is None else len(spec.rope.axes.sections)
        problems += _of_positions("positions", positions, (batch, length), axes, hidden.device)
        if kv_hidden is not None:
            problems += _of_positions("kv_positions", kv_positions, (batch, context), axes, hidden.device)
    if problems:
        raise AttentionInputError("; ".join(problems))


def check_part(spec: AttentionSpec, name: str, part: object) -> None:
    """Refuse a submodule that the structure knows nothing of and that would stay unused.

    Args:
        spec: of the layer.
        name: of the attribute.
        part: what is to have that name; ``None`` takes a submodule out.

    Raises:
        AttentionInputError: a norm, rotary module or sinks for a layer without, or one of another kind.
    """
    field = _PARTS.get(name)
    if field is None or part is None:
        return
    if not getattr(spec, field):
        raise AttentionInputError(
            f"{name} must be None in a layer that was built without, got {type(part).__name__}; "
            f"build the layer with {field}= instead of adding the module to it"
        )
    if name == "rotary" and not hasattr(part, "sharing_key"):
        raise AttentionInputError(
            f"rotary must be a RotaryEmbedding, one of a subclass, or None for no rotation, got {type(part).__name__}"
        )
    if not isinstance(part, nn.Module):
        raise AttentionInputError(f"{name} must be a module, or None to take it out, got {type(part).__name__}")


def check_dtype(hidden: Tensor, projection: nn.Module) -> None:
    """Refuse hidden states that the projections cannot multiply; autocast must be off when this is called.

    Args:
        hidden: the hidden states.
        projection: the first one. Anything but a plain linear map (an adapter, a quantised or parametrised layer)
            knows itself what it can do, and is not looked at.

    Raises:
        AttentionInputError: the dtypes differ.
    """
    weight = projection._parameters["weight"] if type(projection) is nn.Linear else None  # noqa: SLF001
    if weight is not None and weight.dtype is not hidden.dtype and weight.dtype in FLOATING:
        raise AttentionInputError(
            f"hidden must have the dtype of the projections, {weight.dtype}, got {hidden.dtype}; "
            "cast one of them, or run under torch.autocast"
        )


def _of_positions(
    name: str, positions: Tensor | None, sizes: tuple[int, int], axes: int, device: torch.device
) -> list[str]:
    batch, length = sizes
    need = f"an integer tensor [B|1, {length}]" + (f" or [{axes}, B|1, {length}]" if axes else "")
    if not isinstance(positions, Tensor):
        return [f"{name} must be {need}, got {type(positions).__name__}"]
    kind, shape = positions.dtype, positions.shape
    if kind.is_floating_point or kind.is_complex or kind is torch.bool:
        return [f"{name} must be {need}, got {kind}"]
    fits = len(shape) == 2 or (len(shape) == 3 and shape[0] == axes)
    if not fits or shape[-1] != length or shape[-2] not in (1, batch):
        return [f"{name} must be {need} with B={batch}, got {tuple(shape)}"]
    if positions.device != device:
        return [f"{name} must be on the device of hidden, {device}, got {positions.device}"]
    return []
