"""Grouped-query attention: projections around prepared attention.

Shape letters: B batch, S query length, C context length, K = C + S keys, H query heads, G KV heads, D head width, V
value width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from polyattn import (
    AttentionBackend,
    AttentionResult,
    AttentionScope,
    RopeSpec,
    RotaryEmbedding,
    RotaryTables,
    apply_rotary,
)
from polyattn.registry import AUTO
from polyattn.rope import rotate_channels, rotate_heads
from polyattn.select import resolve_backend
from polyattn_modules.base_layer import AttentionLayer
from polyattn_modules.cache import KVCache
from polyattn_modules.dtensors import check_tensors, entering, leaving
from polyattn_modules.fields import FIELDS, QKNorm, structure_of
from polyattn_modules.inputs import check_dtype, check_making, check_projected
from polyattn_modules.kind import LayerKind
from polyattn_modules.norm import RMSNorm
from polyattn_modules.parallel import check_parallel, share_out
from polyattn_modules.projections import keys_and_values, load_either_form, queries
from polyattn_modules.reading import read_scope
from polyattn_modules.sinks import HeadSinks
from polyattn_modules.sources import NOTHING, KeySource, Pair
from polyattn_modules.spec import AttentionSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GroupedQueryAttention(AttentionLayer[AttentionSpec]):
    """Multi-head, grouped-query or multi-query attention on any backend.

    Args:
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: KV heads; query head h reads KV head ``h // (num_heads // num_kv_heads)``.
        head_dim: width of queries and keys per head; ``None`` means ``hidden_size / num_heads``, which must divide.
        fused_qkv: whether q, k and v come from one matrix. A state dict of either form loads into either.
        backend: name or object; resolved once, here. The package must be installed now; its kernel (``flash_attn`` for
            ``fa``) when the device is known, see below.
        backend_options: options of that backend.
        device, dtype: of the parameters.
        v_head_dim, rope, qk_norm, window, dropout, bias, output_bias, softcap, sinks, scale, input_size, layout,
            output_gate, value_norm, shared_keys_values, query_scale: the fields of :class:`AttentionSpec`.
            ``v_head_dim`` is ``head_dim`` where it is not given.

    Raises:
        ConfigError: the structure contradicts itself; every fault in one message. Or ``fused_qkv``, ``device`` or
            ``dtype`` is not valid.
        UnsupportedAttentionError: the backend cannot do what the layer needs, as far as that is known now. What depends
            on the device, a kernel that is absent there included, is known when ``device`` is given, or the parameters
            lie on an accelerator. A layer built on the CPU may still move, and on ``meta`` it surely does; then
            :meth:`fill` or the first forward refuses, before any matrix product.
    """

    READER = "hf_attention"

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
        window: int | tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        input_size: int | None = None,
        layout: str | None = None,
        output_gate: Literal["head", "channel"] | None = None,
        value_norm: Mapping[str, Any] | None = None,
        shared_keys_values: bool = False,
        query_scale: Mapping[str, Any] | None = None,
        fused_qkv: bool = False,
        backend: str | AttentionBackend = AUTO,
        backend_options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        structure = {name: value for name, value in locals().items() if name in FIELDS}
        super().__init__()
        check_making(fused_qkv, device, dtype)
        spec = AttentionSpec.of(structure)
        kind = LayerKind(resolve_backend(backend, backend_options), spec)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        width, inputs = spec.head_dim, hidden_size if spec.input_size is None else spec.input_size
        self._widths = widths = (num_heads * width, num_kv_heads * width, num_kv_heads * spec.v_head_dim)
        if fused_qkv:
            self.qkv_proj = nn.Linear(inputs, sum(widths), bias=spec.bias, **made)
        else:
            for name, size in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True):
                setattr(self, name, nn.Linear(inputs, size, bias=spec.bias, **made))
        self.o_proj = nn.Linear(num_heads * spec.v_head_dim, hidden_size, bias=spec.output_bias, **made)
        self.q_norm = _make_norm(spec, num_heads, made)
        self.k_norm = _make_norm(spec, num_kv_heads, made)
        self.rotary = None if spec.rope is None else RotaryEmbedding(spec.rope)
        self.sinks = HeadSinks(num_heads, **made) if spec.sinks else None
        self.fused_qkv = fused_qkv
        self.register_load_state_dict_pre_hook(load_either_form)  # type: ignore[no-untyped-call]
        self.kind = self._able(kind, placed=device is not None)

    @classmethod
    def from_spec(cls, spec: AttentionSpec, **rest: Any) -> GroupedQueryAttention:
        """Build the layer that ``spec`` describes.

        Args:
            spec: the structure.
            rest: ``fused_qkv``, ``backend``, ``backend_options``, ``device``, ``dtype``.
        """
        return cls(**structure_of(spec), **rest)

    def parallelize(self, mesh: DeviceMesh) -> GroupedQueryAttention:
        """Share the heads out to the ranks of ``mesh`` (tensor parallelism); the layer changes in place.

        The parameters become DTensors, as the mesh's first rank has them: q, k and v by columns, ``o_proj`` by rows,
        sinks by heads, norm weights whole on each rank with gradients summed over the ranks. A fused projection becomes
        three, since each rank needs its own part of each; a state dict of either form still loads. Build the
        optimizer, and call ``fully_shard``, afterwards.

        All ranks see all tokens: the hidden states are the same plain tensor on every rank, or a DTensor on ``mesh``
        with placements ``[Replicate()]`` or ``[Shard(1)]`` (sequence parallelism, as ``SequenceParallel`` norms give
        it); the output is placed as they were. Keys and values that are given or kept, the bias and the LSE are of this
        rank's heads: make a cache by ``KVCache(layer.local_spec, ...)``.

        Args:
            mesh: of one dimension.

        Returns:
            The layer.

        Raises:
            ConfigError: heads do not divide, the layer has dropout, or it is not as it was built; every fault in one
                message, and nothing was changed.
        """
        check_parallel(self, mesh)
        kind = self._able(LayerKind(self.backend, self.spec, mesh), placed=False)
        share_out(self, mesh)
        self.kind = kind
        return self

    @property
    def local_spec(self) -> AttentionSpec:
        """The structure of this rank's heads; :attr:`spec` where the layer is not parallelised."""
        spec = self.kind.local
        assert isinstance(spec, AttentionSpec)
        return spec

    def fill(
        self,
        scope: AttentionScope,
        hidden: Tensor,
        positions: Tensor | None,
        kv_hidden: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        past: Pair | None = None,
        keys_values: Pair | None = None,
        kv_positions: Tensor | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        """Put into ``scope`` what :meth:`forward` with the same arguments will read from it.

        Only shape, dtype, device and ``requires_grad`` of the hidden states count, so the model's first ones serve all
        layers.
        """
        source = KeySource(kv_hidden, past, keys_values, cache, kv_positions)
        read_scope(self, self.kind, scope, hidden, positions, source, attention_bias, return_lse)

    def forward(
        self,
        hidden: Tensor,
        scope: AttentionScope,
        positions: Tensor | None,
        kv_hidden: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        past: Pair | None = None,
        keys_values: Pair | None = None,
        kv_positions: Tensor | None = None,
        attention_bias: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | AttentionResult:
        """Attend.

        Args:
            hidden: ``[B, S, hidden_size]``, or ``[B, S, input_size]`` where the spec says one.
            scope: the forward's scope; its layout (that of the spec's name where it has several) has ``q_len == S``,
                and ``kv_len == S``, ``C + S`` with C keys before them, or the number of keys that are given instead.
            positions: Int ``[B|1, S]``, or ``[A, B|1, S]`` for multi-axis rotary specs; ``None`` will do without rope,
                and with a cache, which has them.
            kv_hidden: ``[B, C, input_size]``, a second hidden state whose keys and values come before the layer's own.
            cache: of this layer. It takes the new keys and gives those of all tokens; the scope's layout is
                ``cache.layout(S)``. Only without gradients.
            past: ``(k, v)``, ``[B, G, C, D]`` and ``[B, G, C, V]``, that come before the layer's own and are not
                projected again; see :meth:`keys_values`. Differentiable.
            keys_values: ``(k, v)`` instead of the layer's own, which are not computed. At most one of ``kv_hidden``,
                ``cache``, ``past`` and ``keys_values``.
            kv_positions: positions of these keys, shaped like ``positions`` with C. Required for ``kv_hidden`` with
                rope; and by a window, where the layout does not say where keys stand.
            attention_bias: floating, broadcastable to ``[B, H, S, K]``.
            return_lse: return ``AttentionResult(output, lse)`` with the projected output instead of the output alone.

        Returns:
            ``[B, S, hidden_size]``.

        Raises:
            AttentionInputError: a shape, dtype or device does not fit, or two sources of keys are given; raised before
                any matrix product.
            LayoutError, UnsupportedAttentionError: see :meth:`AttentionBackend.prepare`; likewise.
        """
        kind = self.kind
        alone = kv_hidden is None and cache is None and past is None and keys_values is None and kv_positions is None
        source = NOTHING if alone else KeySource(kv_hidden, past, keys_values, cache, kv_positions)
        prepared, tables, context_tables, factors, low = read_scope(
            self, kind, scope, hidden, positions, source, attention_bias, return_lse
        )
        mesh, given = kind.mesh, hidden
        if mesh is not None:
            hidden = entering(hidden, mesh)
            kv_hidden = None if kv_hidden is None else entering(kv_hidden, mesh)
        parts: dict[str, Any] = self._modules  # asked directly: Module.__getattr__ takes several times as long
        first = parts["qkv_proj" if self.fused_qkv else "q_proj"]
        q_norm, k_norm, rotary = parts.get("q_norm"), parts.get("k_norm"), parts.get("rotary")
        spec, early, late = kind.spec, kind.early, kind.late
        width, v_width = spec.head_dim, spec.v_head_dim
        try:
            if keys_values is not None:
                q = queries(first, hidden, self._widths) if self.fused_qkv else first(hidden)
                k, v = keys_values
            elif self.fused_qkv:
                q, k, v = first(hidden).split(self._widths, -1)
            else:
                q, k, v = first(hidden), parts["k_proj"](hidden), parts["v_proj"](hidden)
        except RuntimeError:
            if low is None:
                check_dtype(hidden, first)
            raise
        if keys_values is not None:
            q = self._ready(_by_head(q, width), q_norm, tables)
        else:
            batch, length, _ = hidden.shape
            q = q.view(batch, length, q.shape[2] // width, width)
            k = k.view(batch, length, k.shape[2] // width, width)
            v = v.view(batch, length, v.shape[2] // v_width, v_width).transpose(1, 2)
            if early is not None:
                q, k = _normed(q, q_norm, early), _normed(k, k_norm, early)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            if factors is not None and q.device == k.device == hidden.device:
                q, k = rotate_channels(q, *factors), rotate_channels(k, *factors)
            elif tables is not None and rotary is not None:
                q, k = apply_rotary(q, k, tables, interleaved=rotary.spec.interleaved)
            if late is not None:
                q, k = _normed_by_head(q, q_norm, late), _normed_by_head(k, k_norm, late)
            if kv_hidden is not None:
                past = self._project_keys(kv_hidden, context_tables)
            if past is not None:
                k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            elif cache is not None:
                if low is not None:
                    k, v = k.to(low), v.to(low)
                k, v = cache.append(k, v)
        sinks = parts.get("sinks")
        result = prepared(q, k, v, bias=attention_bias, sinks=None if sinks is None else sinks.logits())
        output: Tensor = parts["o_proj"](result.output.transpose(1, 2).flatten(2))
        if mesh is not None:
            output = leaving(output, given)
        return AttentionResult(output, result.lse) if return_lse else output

    def keys_values(self, hidden: Tensor, positions: Tensor | None, *, scope: AttentionScope | None = None) -> Pair:
        """The layer's keys and values of these hidden states, normed and rotated, for ``past=`` or ``keys_values=``.

        Args:
            hidden: ``[B, S, hidden_size]``, or ``[B, S, input_size]`` where the spec says one.
            positions: Int ``[B|1, S]``, or ``[A, B|1, S]`` for multi-axis rotary specs; ``None`` will do without rope.
            scope: shares rotary tables among layers, and has the length that some rotary rules depend on.

        Returns:
            ``[B, G, S, D]`` and ``[B, G, S, V]``; differentiable.

        Raises:
            AttentionInputError: a shape, dtype or device does not fit.
        """
        mesh = self.kind.mesh
        check_tensors(mesh, hidden, positions, NOTHING, None)
        check_projected(self.spec, hidden, positions)
        hidden = hidden if mesh is None else entering(hidden, mesh)
        rotary, tables = self.rotary, None
        if rotary is not None and positions is not None:
            tables = rotary(positions) if scope is None else scope.rotary(rotary, positions)
        return self._project_keys(hidden, tables)

    def _project_keys(self, hidden: Tensor, tables: RotaryTables | None) -> Pair:
        """Keys and values ``[B, G, S, width]`` of hidden states, without their queries."""
        parts: dict[str, Any] = self._modules
        if self.fused_qkv:
            k, v = keys_and_values(self.qkv_proj, hidden, self._widths)
        else:
            k, v = parts["k_proj"](hidden), parts["v_proj"](hidden)
        k = self._ready(_by_head(k, self.spec.head_dim), parts.get("k_norm"), tables)
        return k, _by_head(v, self.spec.v_head_dim)

    def _ready(self, x: Tensor, norm: nn.Module | None, tables: RotaryTables | None) -> Tensor:
        """Queries or keys ``[B, H, S, D]``, normed and rotated."""
        early, late, rotary = self.kind.early, self.kind.late, self.rotary
        if early is not None:
            x = _normed_by_head(x, norm, early)
        if tables is not None and rotary is not None:
            x = rotate_heads(x, tables, interleaved=rotary.spec.interleaved)
        return x if late is None else _normed_by_head(x, norm, late)


def _make_norm(spec: AttentionSpec, heads: int, made: dict[str, Any]) -> RMSNorm | None:
    norm = spec.qk_norm
    if norm is None:
        return None
    width = spec.head_dim * (heads if norm.scope == "projection" else 1)
    return RMSNorm(width, eps=norm.eps, weighted=norm.weighted, **made)


def _by_head(x: Tensor, width: int) -> Tensor:
    """``[B, S, H * width]`` as ``[B, H, S, width]``."""
    return x.view(*x.shape[:2], x.shape[2] // width, width).transpose(1, 2)


def _normed_by_head(x: Tensor, norm: nn.Module | None, how: QKNorm) -> Tensor:
    """Queries or keys ``[B, H, S, D]``, normalised for each head or over all of them."""
    return _normed(x.transpose(1, 2), norm, how).transpose(1, 2)


def _normed(x: Tensor, norm: nn.Module | None, how: QKNorm) -> Tensor:
    """``[B, S, H, D]``, likewise; as it is where the norm was taken out of the layer."""
    if norm is None:
        return x
    normed: Tensor = norm(x) if how.scope == "head" else norm(x.flatten(2)).view(x.shape)
    return normed
