"""What a layer's forward may be given: one validation for every kind of projection, before any matrix product."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import AttentionInputError, AttentionScope, ConfigError, MaskLayout
from polyattn.kernels import FLOATING
from polyattn.messages import shown
from polyattn_modules.cache import KVCache
from polyattn_modules.fields import given
from polyattn_modules.kind import LayerSpec
from polyattn_modules.sources import KeySource

#: Submodules of a layer that its structure decides about, and the field that does.
_PARTS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "rotary": "rope", "sinks": "sinks"}


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


def check_attribute(layer: str, spec: type[Any], name: str, value: object) -> None:
    """Refuse to set what was decided when a ``layer`` of this kind of ``spec`` was built.

    Raises:
        ConfigError: ``name`` is a field of the structure, or follows from how the layer was made.
    """
    fields = {field.name for field in dataclasses.fields(spec)}
    if name in fields and name != "sinks":  # a submodule has this name as well
        raise ConfigError(
            f"{name} of a layer stays as it was built, got {given(value)}; build another layer, "
            f"{layer}.from_spec(dataclasses.replace(layer.spec, {name}=...))"
        )
    if name == "spec":
        raise ConfigError(
            f"spec of a layer stays as it was built, got {given(value)}; build another layer, {layer}.from_spec(spec)"
        )
    if name == "backend":
        raise ConfigError(f"backend cannot be set as an attribute, got {given(value)}; use layer.set_backend(...)")
    if name == "fused_qkv":
        raise ConfigError(
            f"fused_qkv of a layer stays as it was built, got {given(value)}; build another layer, "
            f"{layer}.from_spec(layer.spec, fused_qkv=...), which loads a state dict of either form"
        )


def check_types(scope: AttentionScope, hidden: Tensor, source: KeySource) -> None:
    """Refuse arguments of other types, and two sources of keys.

    Raises:
        AttentionInputError: the first that is wrong.
    """
    if not isinstance(scope, AttentionScope):
        raise AttentionInputError(f"scope must be an AttentionScope, got {type(scope).__name__}")
    for name, x in (("hidden", hidden), ("kv_hidden", source.kv_hidden)):
        if not isinstance(x, Tensor) and (x is not None or name == "hidden"):
            raise AttentionInputError(f"{name} must be a floating tensor [B, S, hidden_size], got {type(x).__name__}")
    given_by, pair = source.name, source.pair
    if pair is not None and not (
        isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)
    ):
        raise AttentionInputError(
            f"{given_by} must be a pair of tensors (keys, values), as layer.keys_values gives it, "
            f"got {type(pair).__name__}"
        )
    if source.cache is not None and not isinstance(source.cache, KVCache):
        raise AttentionInputError(f"cache must be a KVCache, got {type(source.cache).__name__}")


def check_inputs(
    spec: LayerSpec,
    scope: AttentionScope,
    hidden: Tensor,
    positions: Tensor | None,
    source: KeySource,
    low: torch.dtype | None,
    needs_grad: bool,
) -> MaskLayout:
    """Refuse what does not fit together; one message names every fault.

    Args:
        spec: of the layer.
        scope: of the forward.
        hidden: ``[B, S, input_size]``.
        positions: Int ``[B|1, S]`` or ``[A, B|1, S]``; not looked at without a rotary spec.
        source: other keys.
        low: the autocast dtype.
        needs_grad: whether gradients will be asked for.

    Returns:
        The layout of the forward.

    Raises:
        AttentionInputError: a type, shape, dtype or device does not fit.
        LayoutError: the scope has no layout of the name that the layer gives.
    """
    kv_hidden, pair, cache = source.kv_hidden, source.pair, source.cache
    problems = _of_hidden(spec, "hidden", hidden)
    if kv_hidden is not None:
        problems += _of_hidden(spec, "kv_hidden", kv_hidden)
    if problems:
        raise AttentionInputError("; ".join(problems))
    batch, length, _ = hidden.shape
    keys = 0 if kv_hidden is None else kv_hidden.shape[1]
    if kv_hidden is not None:
        for what, got, need in (
            ("batch", kv_hidden.shape[0], batch),
            ("dtype", kv_hidden.dtype, hidden.dtype),
            ("device", kv_hidden.device, hidden.device),
        ):
            if got != need:
                problems.append(f"kv_hidden must have the {what} of hidden, {need}, got {got}")
    elif pair is not None:
        keys = pair[0].shape[2] if pair[0].dim() == 4 else -1
        for name, x, width in (("keys", pair[0], spec.head_dim), ("values", pair[1], spec.v_head_dim)):
            shape = (batch, spec.num_kv_heads, keys, width)
            if x.shape != shape or x.dtype not in (hidden.dtype, low) or x.device != hidden.device:
                fit = f"[{batch}, {spec.num_kv_heads}, K, {width}] of {hidden.dtype} on {hidden.device}"
                problems.append(
                    f"the {name} of {source.name} must be {fit}, got {list(x.shape)} of {x.dtype} on {x.device}"
                )
    elif source.positions is not None:
        problems.append(
            "kv_positions must come with kv_hidden, past or keys_values, whose positions they are, got kv_positions "
            "alone"
        )
    if cache is not None:
        if problems:
            raise AttentionInputError("; ".join(problems))
        return _of_cache(spec, scope, hidden, positions, cache, needs_grad)
    layout = scope.layout_of(spec.layout)
    if source.name is not None and scope.context_layout is not None:
        layout = scope.context_layout
    total = keys if source.keys_values is not None else keys + length
    if layout.q_len != length or layout.kv_len != total:
        problems.append(
            f"the scope's layout must have q_len={length} and kv_len={total} for these hidden states, "
            f"got q_len={layout.q_len} and kv_len={layout.kv_len}; make a scope for each forward"
        )
    if spec.rope is not None:
        axes = 0 if spec.rope.axes is None else len(spec.rope.axes.sections)
        problems += _of_positions("positions", positions, (batch, length), axes, hidden.device)
        if kv_hidden is not None or (pair is not None and source.positions is not None):
            problems += _of_positions("kv_positions", source.positions, (batch, keys), axes, hidden.device)
    if problems:
        raise AttentionInputError("; ".join(problems))
    return layout


def check_projected(spec: LayerSpec, hidden: Tensor, positions: Tensor | None) -> None:
    """Refuse hidden states and positions that keys and values cannot be made of.

    Raises:
        AttentionInputError: a type, shape or device does not fit.
    """
    if not isinstance(hidden, Tensor):
        raise AttentionInputError(f"hidden must be a floating tensor [B, S, hidden_size], got {type(hidden).__name__}")
    problems = _of_hidden(spec, "hidden", hidden)
    if not problems and spec.rope is not None:
        axes = 0 if spec.rope.axes is None else len(spec.rope.axes.sections)
        problems = _of_positions("positions", positions, (hidden.shape[0], hidden.shape[1]), axes, hidden.device)
    if problems:
        raise AttentionInputError("; ".join(problems))


def _of_hidden(spec: LayerSpec, name: str, x: Tensor) -> list[str]:
    width = spec.hidden_size if spec.input_size is None else spec.input_size
    if x.dim() == 3 and x.shape[2] == width and x.dtype in FLOATING:
        return []
    return [f"{name} must be a floating tensor [B, S, {width}], got {x.dtype} {tuple(x.shape)}"]


def _of_cache(
    spec: LayerSpec,
    scope: AttentionScope,
    hidden: Tensor,
    positions: Tensor | None,
    cache: KVCache,
    needs_grad: bool,
) -> MaskLayout:
    """The layout of a forward with a cache, which gives it, and the positions too."""
    batch, length, _ = hidden.shape
    problems = []
    if needs_grad:
        problems.append("a cache takes no gradients: call under torch.no_grad(), or train with past= or kv_hidden=")
    for name in ("num_kv_heads", "head_dim", "v_head_dim", "window"):
        got, need = getattr(cache.spec, name), getattr(spec, name)
        if got != need:
            problems.append(f"the cache must be made for the layer's spec, with {name}={need}, got {got}")
    if len(cache.lengths) != batch:
        problems.append(f"the cache must have the batch of hidden, {batch}, got {len(cache.lengths)} rows")
    layout, own = scope.layout_of(spec.layout), cache.layout(length)
    if layout is not own:
        problems.append(
            f"the scope's layout must be that of the cache, cache.layout({length}), made anew for each call, "
            f"got {layout.describe()}"
        )
    several = spec.rope is not None and spec.rope.axes is not None
    if several and positions is not None:
        axes = len(spec.rope.axes.sections) if spec.rope is not None and spec.rope.axes is not None else 0
        problems += _of_positions("positions", positions, (batch, length), axes, hidden.device)
    elif positions is not None and positions is not cache.positions(length):
        problems.append(
            f"positions must be those of the cache, cache.positions({length}), made anew for each call, or None, "
            f"got others, of shape {list(positions.shape)}"
        )
    if problems:
        raise AttentionInputError("; ".join(problems))
    return own


def check_part(spec: LayerSpec, name: str, part: object) -> None:
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
