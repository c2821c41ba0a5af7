"""The attention function that transformers calls in every layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import (
    AttentionBackend,
    AttentionInputError,
    AttentionRequest,
    AttentionScope,
    LayoutError,
    MaskLayout,
    PreparedAttention,
    Reason,
    StructuredMask,
    UnsupportedAttentionError,
)
from polyattn_transformers._backends import ByLayerType, loaded
from polyattn_transformers._documents import SEGMENTS, Segments
from polyattn_transformers._layout_mask import LayoutMask, with_own_window
from polyattn_transformers._packing import PackedMask, check_size

#: What models hand down to every layer and what no attention depends on: it concerns what comes before the layers or
#: after them, or stands elsewhere already, as the longest document in the offsets and the cache in the keys.
_INERT = frozenset(
    {
        "cache_position",
        "image_sizes",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "shift_labels",
        "use_cache",
        "vision_feature_layer",
        "vision_feature_select_strategy",
    }
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayoutMask | Tensor | None,
    *,
    polyattn_backend: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = False,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer by a polyattn backend (transformers' ``AttentionInterface``).

    Args:
        module: the attention layer.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, Hkv, K, D]``; KV heads are not repeated.
        value: ``[B, Hkv, K, Dv]``.
        attention_mask: what :func:`layout_mask` returned; or ``Bool[B, 1|Hq, Q, K]``, True = may attend; or a floating
            tensor of that shape, which is added to the scores; or ``None``, which leaves it to ``is_causal``.
        polyattn_backend: name of the backend, bound when the implementation is registered.
        scaling: factor of the scores, ``D ** -0.5`` by default.
        dropout: probability of dropping a weight; acts while ``module.training``.
        softcap: ``c`` in ``c * tanh(scores / c)``.
        sliding_window: ``|q - k| < sliding_window`` where the mask says nothing about a window.
        s_aux: one sink logit per query head.
        position_bias: floating, broadcastable to ``[B, Hq, Q, K]``, added to the scores.
        is_causal: of a call without a mask; by default the module's own ``is_causal``.
        position_ids: ``Int[B|1, Q]``; where they restart, documents start (see the user guide).
        output_attentions: refused when True.
        deterministic: True asks for a deterministic kernel.
        **kwargs: ``segment_ids``, ``seq_idx``, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` say where documents lie; any
            other that is set and may change numbers is an error.

    Returns:
        Output ``[B, Q, Hq, Dv]``, and no attention weights.

    Raises:
        AttentionInputError: a keyword is unknown, or tensors break the conventions.
        LayoutError: a mask of a wrong rank or dtype, or documents that contradict each other.
        UnsupportedAttentionError: attention weights are asked for, or the backend refuses; carries all reasons.
    """
    if output_attentions:
        raise UnsupportedAttentionError(
            f"polyattn_{polyattn_backend}",
            [
                Reason(
                    "no_weights",
                    "attention weights",
                    "output_attentions=True",
                    "a model that asks for no weights, which no fused kernel keeps",
                    "transformers' own attn_implementation='eager' returns them",
                )
            ],
        )
    segments: Segments = {name: kwargs.pop(name, None) for name in SEGMENTS}
    if unknown := sorted(name for name, given in kwargs.items() if name not in _INERT and _is_set(given)):
        raise AttentionInputError(
            f"{type(module).__name__} passed {', '.join(unknown)} to its attention, which polyattn does not know and "
            "will not ignore; leave it out, or choose transformers' own attn_implementation for this model"
        )
    bias = position_bias
    if isinstance(attention_mask, Tensor):
        if given := [name for name, value in segments.items() if value is not None]:
            raise LayoutError(
                f"attention_mask [B, 1, Q, K] and {', '.join(given)} both say who sees whom; give one of them"
            )
        attention_mask, bias = _from_tensor(attention_mask, query, key, bias)
        sliding_window = position_ids = None  # such a mask is the whole truth, as everywhere in transformers
    request = AttentionRequest.of(
        query,
        key,
        value,
        bias=bias,
        sinks=s_aux,
        scale=scaling,
        dropout_p=dropout,
        training=module.training,
        softcap=softcap,
        deterministic=True if deterministic else None,
    )
    chosen = loaded(polyattn_backend)
    if isinstance(chosen, ByLayerType):
        chosen = chosen.of(module)
    if isinstance(attention_mask, PackedMask):
        causal = _causality(module, is_causal, query.shape[2])
        check_size(attention_mask, query.shape[0], query.shape[2], key.shape[2])
        attention_mask = LayoutMask(
            attention_mask.layout(causal=causal),
            batch=query.shape[0],
            live=attention_mask.live,
            documents=(attention_mask.name, attention_mask.documents),
        )
    if isinstance(attention_mask, LayoutMask):
        attention_mask = _fitted(module, attention_mask, query.shape[2], key.shape[2])
        prepared = attention_mask.prepare(
            chosen, request, window=sliding_window, position_ids=position_ids, segments=segments
        )
    elif attention_mask is None:
        causal = _causality(module, is_causal, query.shape[2])
        prepared = _without_mask(chosen, request, causal, sliding_window, query, key, position_ids, segments)
    else:
        raise LayoutError(
            f"attention_mask must be a tensor or what polyattn's mask function returned, got "
            f"{type(attention_mask).__name__}"
        )
    output = prepared(query, key, value, bias=bias, sinks=s_aux).output
    return output.transpose(1, 2).contiguous(), None


def _is_set(value: object) -> bool:
    return isinstance(value, Tensor) or (value is not None and value is not False)


def _from_tensor(mask: Tensor, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[LayoutMask, Tensor | None]:
    """A mask that the caller or an older model made itself: visibility if it is boolean, a bias if it is floating."""
    if mask.dim() != 4:
        raise LayoutError(
            f"attention_mask must be [B, 1|Hq, Q, K] when a layer receives a tensor, got {list(mask.shape)}; "
            "this model hands its mask to the layers as it is, so give it one of that shape"
        )
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if mask.dtype is torch.bool:
        full = mask.expand(-1, -1, q_len, -1) if mask.shape[2] == 1 else mask
        return LayoutMask(MaskLayout.dense(full), batch=batch), bias
    if not mask.dtype.is_floating_point:
        raise LayoutError(
            f"attention_mask must be boolean (True = may attend) or floating (added to the scores) when it has four "
            f"dimensions, got {mask.dtype}; call .bool() on a mask of ones and zeros"
        )
    return LayoutMask(MaskLayout.full(q_len, kv_len), batch=batch), mask if bias is None else bias + mask


def _fitted(module: nn.Module, mask: LayoutMask, q_len: int, kv_len: int) -> LayoutMask:
    """The mask for the queries of a layer; one that only says which keys are there is the same for all queries."""
    if mask.refusal is not None:
        raise LayoutError(mask.refusal)
    layout = mask.layout
    if (layout.q_len, layout.kv_len) == (q_len, kv_len):
        return mask
    visibility = layout.visibility
    same = isinstance(visibility, StructuredMask) and visibility.given() <= {"kv_valid"}
    if layout.kv_len == kv_len and same and layout.active_queries is None and mask.documents is None:
        return mask.of_queries(q_len)
    raise LayoutError(
        f"the mask of {type(module).__name__} is for {layout.q_len} queries and {layout.kv_len} keys, but it has "
        f"{q_len} and {kv_len}; give an attention_mask [B, K] with one entry for each token, or choose "
        "transformers' own attn_implementation for a model that joins keys of its own to those of the tokens"
    )


def _causality(module: nn.Module, is_causal: bool | None, q_len: int) -> bool:
    own = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if own is None and q_len != 1:
        raise LayoutError(
            f"{type(module).__name__} passed no mask to its attention and has no attribute is_causal, so nobody knows "
            "who sees whom; pass an attention_mask to the model, or set is_causal on the module"
        )
    return bool(own)


def _without_mask(
    backend: AttentionBackend,
    request: AttentionRequest,
    causal: bool,
    window: int | None,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    segments: Segments,
) -> PreparedAttention:
    """What a layer without a mask asks for. Without documents sizes decide all of it, so equal layers share it."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if position_ids is not None or any(value is not None for value in segments.values()):
        mask = LayoutMask(_bare(causal, window, q_len, kv_len), batch=request.batch)
        layout = mask.narrow(request.batch, None, position_ids, segments)
        if layout is not mask.layout:
            return mask.scope.prepare(backend, request, layout=layout)
    if torch.compiler.is_compiling() or type(query) is not Tensor:
        return backend.prepare(_bare(causal, window, q_len, kv_len), request)
    return prepared_once(backend, request, causal, window, q_len, kv_len)  # type: ignore[arg-type]  # a backend is a value


@functools.lru_cache(maxsize=64)
def prepared_once(
    backend: AttentionBackend, request: AttentionRequest, causal: bool, window: int | None, q_len: int, kv_len: int
) -> PreparedAttention:
    """What ``backend`` prepared for a layer without a mask, kept for every equal one."""
    return AttentionScope(_bare(causal, window, q_len, kv_len)).prepare(backend, request)


def _bare(causal: bool, window: int | None, q_len: int, kv_len: int) -> MaskLayout:
    layout = MaskLayout.causal(q_len, kv_len) if causal else MaskLayout.full(q_len, kv_len)
    return with_own_window(layout, window)
