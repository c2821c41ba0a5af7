"""Grouped-query attention: projections around prepared attention.

Shape letters: B batch, S query length, C context length, K = C + S keys, H query heads, G KV heads, D head width, V
value width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyattn._backend import AttentionBackend, AttentionResult, PreparedAttention
from polyattn._errors import AttentionInputError, ConfigError, UnsupportedAttentionError
from polyattn._layout import MaskLayout
from polyattn._modules.norm import RMSNorm
from polyattn._modules.spec import AttentionSpec, QKNorm
from polyattn._request import AttentionRequest
from polyattn._rope import RopeSpec, RotaryEmbedding, rotate_heads
from polyattn._scope import AttentionScope
from polyattn._select import AUTO, resolve_backend
from polyattn._tensors import autocast_dtype

#: Refusals that are certain when a layer is built, whatever the forward brings.
_STATIC_FEATURES = frozenset({"gqa", "unequal_width", "softcap", "sinks", "window", "dropout", "device", "kernel"})


class GroupedQueryAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention on any backend.

    Args:
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: KV heads; query head h reads KV head ``h // (num_heads // num_kv_heads)``.
        head_dim: width of queries and keys per head; ``None`` means ``hidden_size / num_heads``, which must divide.
        v_head_dim: width of values per head; ``None`` means ``head_dim``.
        rope: the rotary spec, or ``None``.
        qk_norm: the norm of queries and keys, or ``None``.
        window: keys that a query sees, itself included; narrows the layout's own window.
        dropout: of attention weights, in training.
        bias: whether the projections of q, k and v have biases.
        output_bias: whether the output projection has one.
        softcap: ``c`` in ``c * tanh(scores / c)``.
        sinks: whether each query head learns a sink logit.
        scale: factor of the scores, ``head_dim ** -0.5`` by default.
        backend: name or object; resolved once, here.
        backend_options: options of that backend.
        device, dtype: of the parameters.

    Raises:
        ConfigError: the structure contradicts itself; every fault in one message.
        UnsupportedAttentionError: the backend cannot do what the layer needs, as far as that is known now.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        *,
        v_head_dim: int | None = None,
        rope: RopeSpec | None = None,
        qk_norm: QKNorm | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        backend: str | AttentionBackend = AUTO,
        backend_options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size must be a multiple of num_heads when head_dim is not given, "
                    f"got hidden_size={hidden_size} and num_heads={num_heads}; give head_dim"
                )
            head_dim = hidden_size // num_heads
        self.spec = spec = AttentionSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            rope=rope,
            qk_norm=qk_norm,
            window=window,
            dropout=dropout,
            bias=bias,
            output_bias=output_bias,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
        )
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * spec.v_head_dim, bias=bias, **made)
        self.o_proj = nn.Linear(num_heads * spec.v_head_dim, hidden_size, bias=output_bias, **made)
        self.q_norm = self._make_norm(num_heads, made)
        self.k_norm = self._make_norm(num_kv_heads, made)
        self.rotary = None if rope is None else RotaryEmbedding(rope)
        self.register_parameter("sinks", nn.Parameter(torch.empty(num_heads, **made)) if sinks else None)
        self.sinks: nn.Parameter | None
        self.backend: AttentionBackend
        self.set_backend(backend, backend_options)
        self.reset_parameters()

    @classmethod
    def from_spec(cls, spec: AttentionSpec, **rest: Any) -> GroupedQueryAttention:
        """Build the layer that ``spec`` describes.

        Args:
            spec: the structure.
            rest: ``backend``, ``backend_options``, ``device``, ``dtype``.
        """
        fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
        return cls(**fields, **rest)

    def set_backend(self, backend: str | AttentionBackend, options: Mapping[str, Any] | None = None) -> None:
        """Use another backend from now on.

        Raises:
            UnsupportedAttentionError: it cannot do what the layer needs; the old backend stays.
        """
        resolved = resolve_backend(backend, options)
        reasons = self._static_refusals(resolved)
        if reasons:
            raise UnsupportedAttentionError(resolved.name, reasons)
        self.backend = resolved

    def reset_parameters(self) -> None:
        """Draw every parameter afresh: torch's own rule for the projections, one for norm weights, zero for sinks."""
        for module in self.children():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def prefill(
        self,
        scope: AttentionScope,
        hidden: Tensor,
        positions: Tensor,
        kv_hidden: Tensor | None = None,
        *,
        kv_positions: Tensor | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        """Put into ``scope`` what :meth:`forward` with the same arguments will read from it."""
        self._check(hidden, positions, kv_hidden, kv_positions, scope)
        self._prepared(scope, hidden, kv_hidden, attention_bias, return_lse)
        if self.rotary is not None:
            scope.rotary(self.rotary, positions)
            if kv_positions is not None:
                scope.rotary(self.rotary, kv_positions)

    def forward(
        self,
        hidden: Tensor,
        scope: AttentionScope,
        positions: Tensor,
        kv_hidden: Tensor | None = None,
        *,
        kv_positions: Tensor | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | AttentionResult:
        """Attend.

        Args:
            hidden: ``[B, S, hidden_size]``.
            scope: the forward's scope; its layout has ``q_len == S``, and ``kv_len == S`` or, with context, ``C + S``.
            positions: Int ``[B|1, S]``, or ``[A, B|1, S]`` for multi-axis rotary specs.
            kv_hidden: ``[B, C, hidden_size]``, a second hidden state whose keys and values come before the layer's own.
            kv_positions: positions of the context keys, shaped like ``positions`` with C; required with rope.
            attention_bias: floating, broadcastable to ``[B, H, S, K]``.
            return_lse: return ``AttentionResult(output, lse)`` with the projected output instead of the output alone.

        Returns:
            ``[B, S, hidden_size]``.

        Raises:
            AttentionInputError: a shape does not fit; raised before any matrix product.
            LayoutError, UnsupportedAttentionError: see :meth:`AttentionBackend.prepare`.
        """
        self._check(hidden, positions, kv_hidden, kv_positions, scope)
        prepared = self._prepared(scope, hidden, kv_hidden, attention_bias, return_lse)
        spec = self.spec
        q = self._heads(self.q_proj(hidden), spec.num_heads, self.q_norm)
        k = self._heads(self.k_proj(hidden), spec.num_kv_heads, self.k_norm)
        v = self.v_proj(hidden).unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2)
        q, k = self._rotate(q, scope, positions), self._rotate(k, scope, positions)
        if kv_hidden is not None:
            context = self._heads(self.k_proj(kv_hidden), spec.num_kv_heads, self.k_norm)
            if kv_positions is not None:
                context = self._rotate(context, scope, kv_positions)
            k = torch.cat([self._after(context, self.k_norm), self._after(k, self.k_norm)], dim=2)
            context_v = self.v_proj(kv_hidden).unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2)
            v = torch.cat([context_v, v], dim=2)
        else:
            k = self._after(k, self.k_norm)
        q = self._after(q, self.q_norm)
        result = prepared(q, k, v, bias=attention_bias, sinks=self.sinks)
        output: Tensor = self.o_proj(result.output.transpose(1, 2).flatten(2))
        return AttentionResult(output, result.lse) if return_lse else output

    def extra_repr(self) -> str:
        return f"backend={self.backend.name!r}, window={self.spec.window}"

    def _make_norm(self, heads: int, made: dict[str, Any]) -> RMSNorm | None:
        norm = self.spec.qk_norm
        if norm is None:
            return None
        width = self.spec.head_dim * (heads if norm.scope == "projection" else 1)
        return RMSNorm(width, eps=norm.eps, weighted=norm.weighted, **made)

    def _heads(self, x: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        """``[B, S, H * D]`` to ``[B, H, S, D]``, normalised when the norm comes before the rotation."""
        shape = (*x.shape[:2], heads, x.shape[2] // heads)
        if norm is None or self.spec.qk_norm is None or self.spec.qk_norm.position == "after":
            return x.view(shape).transpose(1, 2)
        x = norm(x).view(shape) if norm.width == x.shape[2] else norm(x.view(shape))
        return x.transpose(1, 2)

    def _after(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """``[B, H, S, D]``, normalised when the norm comes after the rotation."""
        if norm is None or self.spec.qk_norm is None or self.spec.qk_norm.position == "before":
            return x
        if norm.width == x.shape[3]:
            normed: Tensor = norm(x)
            return normed
        by_position = x.transpose(1, 2)
        whole: Tensor = norm(by_position.flatten(2))
        return whole.view(by_position.shape).transpose(1, 2)

    def _rotate(self, x: Tensor, scope: AttentionScope, positions: Tensor) -> Tensor:
        if self.rotary is None:
            return x
        return rotate_heads(x, scope.rotary(self.rotary, positions), interleaved=self.rotary.spec.interleaved)

    def _prepared(
        self,
        scope: AttentionScope,
        hidden: Tensor,
        kv_hidden: Tensor | None,
        attention_bias: Tensor | None,
        return_lse: bool,
    ) -> PreparedAttention:
        grad = torch.is_grad_enabled()
        bias_grad = grad and attention_bias is not None and attention_bias.requires_grad
        needs_grad = bias_grad or (
            grad
            and (
                hidden.requires_grad
                or (kv_hidden is not None and kv_hidden.requires_grad)
                or any(parameter.requires_grad for parameter in self.parameters())
            )
        )
        request = self._request(
            batch=hidden.shape[0],
            dtype=autocast_dtype(hidden.device) or hidden.dtype,
            device=hidden.device,
            training=self.training,
            has_bias=attention_bias is not None,
            needs_grad=needs_grad,
            needs_bias_grad=bias_grad,
            needs_lse=return_lse,
            needs_lse_grad=return_lse and needs_grad,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        layout = scope.context_layout if kv_hidden is not None else None
        return scope.prepare(self.backend, request, layout=layout, window=self.spec.window)

    def _request(self, **call: Any) -> AttentionRequest:
        spec = self.spec
        return AttentionRequest(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            scale=spec.scale,
            dropout_p=spec.dropout,
            softcap=spec.softcap,
            has_sinks=spec.sinks,
            **call,
        )

    def _static_refusals(self, backend: AttentionBackend) -> tuple[Any, ...]:
        weight = self.q_proj.weight
        request = self._request(batch=1, dtype=weight.dtype, device=weight.device, training=True)
        reasons = backend.unsupported(MaskLayout.causal(1, window=self.spec.window), request)
        on_device = weight.device.type != "meta"  # a meta parameter will move to a device that is not known yet
        return tuple(
            r for r in reasons if r.feature in _STATIC_FEATURES and (on_device or r.feature not in ("device", "kernel"))
        )

    def _check(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_hidden: Tensor | None,
        kv_positions: Tensor | None,
        scope: AttentionScope,
    ) -> None:
        width = self.spec.hidden_size
        if not isinstance(scope, AttentionScope):
            raise AttentionInputError(f"scope must be an AttentionScope, got {type(scope).__name__}")
        problems = []
        for name, x in (("hidden", hidden), ("kv_hidden", kv_hidden)):
            if x is not None and (x.dim() != 3 or x.shape[2] != width):
                problems.append(f"{name} must be [B, S, {width}], got {tuple(x.shape)}")
        if problems:
            raise AttentionInputError("; ".join(problems))
        batch, length = hidden.shape[:2]
        context = 0 if kv_hidden is None else kv_hidden.shape[1]
        if kv_hidden is not None and kv_hidden.shape[0] != batch:
            problems.append(f"kv_hidden must have the batch of hidden, {batch}, got {kv_hidden.shape[0]}")
        layout = scope.layout if kv_hidden is None or scope.context_layout is None else scope.context_layout
        if (layout.q_len, layout.kv_len) != (length, context + length):
            problems.append(
                f"the scope's layout must have q_len={length} and kv_len={context + length} for these hidden states, "
                f"got q_len={layout.q_len} and kv_len={layout.kv_len}"
            )
        if self.rotary is not None:
            problems += _position_problems("positions", positions, batch, length)
            if kv_hidden is not None:
                problems += _position_problems("kv_positions", kv_positions, batch, context)
        if problems:
            raise AttentionInputError("; ".join(problems))


def _position_problems(name: str, positions: Tensor | None, batch: int, length: int) -> list[str]:
    if not isinstance(positions, Tensor):
        return [f"{name} must be an integer tensor [B|1, {length}], got {type(positions).__name__}"]
    if positions.dtype.is_floating_point or positions.dtype.is_complex or positions.dtype is torch.bool:
        return [f"{name} must be an integer tensor, got {positions.dtype}"]
    shape = tuple(positions.shape)
    if len(shape) not in (2, 3) or shape[-1] != length or shape[-2] not in (1, batch):
        return [f"{name} must be [B|1, {length}] or [A, B|1, {length}] with B={batch}, got {shape}"]
    return []
