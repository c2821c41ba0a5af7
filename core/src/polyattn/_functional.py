"""One-shot attention: resolve, prepare and attend in one call."""

from __future__ import annotations

from torch import Tensor

from polyattn._backend import AttentionBackend, AttentionResult
from polyattn._boundary import check_layout_type
from polyattn._errors import AttentionInputError, LayoutError, UnsupportedAttentionError
from polyattn._layout import MaskLayout
from polyattn._request import AttentionRequest
from polyattn.messages import shown
from polyattn.select import prepare, resolve_backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: MaskLayout,
    *,
    backend: str | AttentionBackend = "auto",
    scale: float | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> AttentionResult:
    """Scaled dot-product attention under a mask layout, by any installed backend.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``; query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: ``[B, Hkv, K, Dv]``.
        layout: which keys each query may attend to; batch 1 serves any batch.
        backend: a name (``polyattn list`` shows them), ``"auto"``, or a backend object; inside a compiled function
            an object (``polyattn.backends.get(name)``), since names are looked up outside of it.
        scale: factor of the scores, ``D ** -0.5`` by default.
        dropout_p: probability of dropping an attention weight; acts only when ``training``.
        training: whether dropout acts.
        softcap: ``c`` in ``c * tanh(scores / c)``, applied after the scale.
        bias: floating, broadcastable to ``[B, Hq, Q, K]``, added after the softcap; ``-inf`` blocks a key.
        sinks: floating ``[Hq]``, one extra logit per head without a value.
        return_lse: also return the log-sum-exp; its gradient flows when q, k or the bias requires grad.

    Raises:
        AttentionInputError: tensors or scalars break the conventions.
        LayoutError: the layout does not fit the tensors.
        UnsupportedAttentionError: the named backend (or, under ``auto``, every backend) refuses; carries all reasons.
    """
    check_layout_type(layout)
    if not isinstance(return_lse, bool):
        raise AttentionInputError(f"return_lse must be True or False, got {shown(return_lse)}")
    chosen = resolve_backend(backend)
    try:
        request = AttentionRequest.of(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            scale=scale,
            dropout_p=dropout_p,
            training=training,
            softcap=softcap,
            needs_lse=return_lse,
            needs_lse_grad=None,
        )
    except AttentionInputError as error:
        # A backend that cannot run on the device at all says so before anything is said about dtypes.
        ask = getattr(chosen, "device_reasons", None)
        reasons = () if ask is None or not isinstance(q, Tensor) else tuple(ask(q.device))
        if reasons:
            raise UnsupportedAttentionError(chosen.name, reasons) from error
        raise
    if (layout.q_len, layout.kv_len) != (q.shape[2], k.shape[2]):
        swapped = (layout.q_len, layout.kv_len) == (q.shape[1], k.shape[1])
        order = "q, k and v are [B, heads, length, width]: call .transpose(1, 2) on each"
        hint = order if swapped else "make a layout for these lengths"
        raise LayoutError(
            f"layout must have q_len={q.shape[2]} and kv_len={k.shape[2]} for these q and k, "
            f"got q_len={layout.q_len} and kv_len={layout.kv_len}; {hint}"
        )
    return prepare(chosen, layout, request)(q, k, v, bias=bias, sinks=sinks)
