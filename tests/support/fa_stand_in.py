"""FlashAttention-2 in plain torch on the CPU, as unfriendly as the real kernels.

Two stand-ins for two packages: :func:`flash_attn` has the functions of ``flash_attn.flash_attn_interface``,
:func:`torch_varlen` those of ``torch.nn.attention.varlen``. Both accumulate in FP32 and round where the kernels round.
Both leave NaN outside every sequence (results and gradients) and in queries beyond ``max_seqlen_q``, give fully masked
rows and rows of NaN the LSE ``+inf``, take a side of ``max_seqlen_k`` or more for unbounded and an unbounded one beside
a bounded one for ``max_seqlen_k``, compute ``rowsum(dO * O)`` from the ``O`` they are given, and refuse FP32, int64
offsets, odd or wide heads, empty batches and a last stride other than 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn_fa2 import providers


@dataclasses.dataclass
class Calls:
    """What the kernels were called with, in order: dictionaries of arguments by name."""

    forward: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    backward: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class _Rule(NamedTuple):
    """The settings of a call."""

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float = 0.0
    dropout: float = 0.0


class _Sequence(NamedTuple):
    """One sequence: ``[H, Q, D]`` and what the backward needs."""

    scores_grad: Tensor
    weights: Tensor
    lse: Tensor
    live: Tensor
    kept: Tensor


def _check(*tensors: Tensor, heads: tuple[int, int]) -> None:
    q = tensors[0]
    assert all(x.dtype in {torch.float16, torch.bfloat16} for x in tensors), "only support fp16 and bf16 data type"
    assert len({x.dtype for x in tensors}) == 1, "query, key and value must have the same dtype"
    assert all(x.stride(-1) == 1 for x in tensors), "input tensor must have contiguous last dimension"
    assert all(x.shape[-1] == q.shape[-1] for x in tensors), "all tensors must have the same head size"
    assert q.shape[-1] % 8 == 0, "head_size should be a multiple of 8"
    assert q.shape[-1] <= 256, "only supports head dimension at most 256"
    assert heads[0] % heads[1] == 0, "number of heads in key/value must divide number of heads in query"


def _check_offsets(*offsets: Tensor, ends: tuple[int, int]) -> None:
    for offset, end in zip(offsets, ends, strict=True):
        assert offset.dtype is torch.int32, "cu_seqlens must have dtype int32"
        assert offset.is_contiguous(), "cu_seqlens must be contiguous"
        assert offset.dim() == 1, "cu_seqlens must have shape (batch_size + 1)"
        assert offset.numel() > 1, "batch size must be positive"
        assert int(offset[-1]) <= end, "an illegal memory access was encountered"
    assert offsets[0].numel() == offsets[1].numel(), "cu_seqlens must have shape (batch_size + 1)"


def _check_lengths(*lengths: object) -> None:
    assert all(type(x) is int for x in lengths), "max_seqlen must be int, not a tensor"


def _visible(queries: int, keys: int, rule: _Rule, max_q: int, max_k: int) -> Tensor:
    left, right, causal = rule.left, rule.right, rule.causal and max_q > 1
    right = 0 if causal else right
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if left >= 0 or right >= 0:  # one side alone: the other one reaches over max_k keys, not over all
        left, right = (max_k if side < 0 else side for side in (left, right))
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= distance >= -right
    return visible


def _attend(q: Tensor, k: Tensor, rule: _Rule, visible: Tensor, lse: Tensor | None, kept: Tensor) -> _Sequence:
    scores = q.float() @ k.float().mT * rule.scale
    scores_grad = torch.ones_like(scores)
    if rule.softcap > 0:
        capped = torch.tanh(scores / rule.softcap)
        scores, scores_grad = rule.softcap * capped, 1 - capped.square()
    scores = torch.where(visible, scores, -torch.inf)
    live = visible.any(-1)
    if lse is None:
        lse = torch.where(live, torch.logsumexp(scores, -1), torch.inf).nan_to_num(torch.inf, torch.inf)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return _Sequence(scores_grad, weights, lse, live, kept)


def _forward(q: Tensor, k: Tensor, v: Tensor, rule: _Rule, visible: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    at = _attend(q, k, rule, visible, None, kept)
    peak = torch.where(visible, torch.log(at.weights), -torch.inf).amax(-1, keepdim=True) if k.shape[1] else 0.0
    peak = torch.where(at.live.unsqueeze(-1), peak, 0.0)
    unnormalised = (at.weights * torch.exp(-peak)).to(q.dtype).float()  # 1 at the largest, as the kernel rounds it
    output = (unnormalised * kept) @ v.float() * torch.exp(peak) / (1 - rule.dropout)
    return torch.where(at.live.unsqueeze(-1), output, 0.0).to(q.dtype), at.lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    rule: _Rule,
    visible: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    at, low = _attend(q, k, rule, visible, lse, kept), q.dtype
    keep = kept / (1 - rule.dropout)
    delta = (grad.float() * output.float()).sum(-1, keepdim=True)
    dweights = grad.float() @ v.float().mT
    dscores = at.weights * (dweights * keep - delta) * at.scores_grad
    dscores = torch.where(visible, dscores, 0.0).to(low).float()
    dv = (at.weights * keep).to(low).float().mT @ grad.float()
    return dscores @ k.float() * rule.scale, dscores.mT @ q.float() * rule.scale, dv


class _Run(NamedTuple):
    """A call over sequences, tensors ``[tokens, H, D]``."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    rule: _Rule
    seed: int

    def sequences(self, heads: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows of queries and of keys, what is visible, and what the dropout keeps."""
        generator = torch.Generator().manual_seed(self.seed)
        ends = zip(self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist(), strict=True)
        (q0, k0), *others = ends
        for q1, k1 in others:
            queries, keys = q1 - q0, k1 - k0
            visible = _visible(queries, keys, self.rule, self.max_seqlen_q, self.max_seqlen_k)[: self.max_seqlen_q]
            drawn = torch.rand(heads, len(visible), keys, generator=generator)
            yield slice(q0, q0 + len(visible)), slice(k0, k1), visible, (drawn >= self.rule.dropout).float()
            q0, k0 = q1, k1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[tokens, H, D]`` and LSE ``[H, tokens]``."""
        group = q.shape[1] // k.shape[1]
        output, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
        for rows, keys, visible, kept in self.sequences(q.shape[1]):
            one = (_heads_first(x, n) for x, n in ((q[rows], 1), (k[keys], group), (v[keys], group)))
            result, lse[:, rows] = _forward(*one, self.rule, visible, kept)
            output[rows] = result.transpose(0, 1)
        return output, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients; those of the query heads of a group are rounded before they are added up."""
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.full((len(x), heads, x.shape[2]), torch.nan, dtype=q.dtype) for x in (q, k, v))
        for rows, keys, visible, kept in self.sequences(heads):
            one = [_heads_first(x, n) for x, n in ((grad[rows], 1), (q[rows], 1), (k[keys], group), (v[keys], group))]
            grads = _backward(*one, _heads_first(output[rows], 1), lse[:, rows], self.rule, visible, kept)
            for target, at, value in ((dq, rows, grads[0]), (dk, keys, grads[1]), (dv, keys, grads[2])):
                target[at] = value.transpose(0, 1).to(q.dtype)
        dk, dv = (x.unflatten(1, (k.shape[1], group)).float().sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv


def _heads_first(x: Tensor, group: int) -> Tensor:
    return x.transpose(0, 1).repeat_interleave(group, 0)


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.flatten(0, 1) for x in tensors)


def _equal_offsets(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32) * length


def flash_attn(calls: Calls) -> Any:
    """A module like ``flash_attn.flash_attn_interface`` 2.8, which writes down its calls."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        calls.forward.append(locals().copy())
        _check(q, k, v, heads=(q.shape[1], k.shape[1]))
        _check_offsets(cu_seqlens_q, cu_seqlens_k, ends=(len(q), len(k)))
        _check_lengths(max_seqlen_q, max_seqlen_k)
        assert not (softcap > 0 and dropout_p > 0), "Softcapping does not support dropout for now"
        assert not return_softmax, "a quadratic tensor"
        rule = _Rule(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
        seed = int(torch.randint(2**31, ())) if dropout_p > 0 else 0
        run = _Run(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rule, seed)
        output, lse = run.forward(q, k, v)
        return output, lse, q.new_empty(0), torch.tensor([seed, 0])

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        calls.backward.append(locals().copy())
        _check(q, k, v, out, dout, heads=(q.shape[1], k.shape[1]))
        _check_offsets(cu_seqlens_q, cu_seqlens_k, ends=(len(q), len(k)))
        assert softmax_lse.is_contiguous()
        assert softmax_lse.dtype is torch.float32
        rule = _Rule(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
        run = _Run(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rule, int(rng_state[0]))
        for target, value in zip((dq, dk, dv), run.backward(dout, q, k, v, out, softmax_lse), strict=True):
            target.copy_(value)

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        (batch, queries), keys = q.shape[:2], k.shape[1]
        assert batch > 0, "batch size must be positive"
        output, lse, *others = _flash_attn_varlen_forward(
            *_flat(q, k, v), _equal_offsets(batch, queries), _equal_offsets(batch, keys), queries, keys, dropout_p,
            softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
        )  # fmt: skip
        calls.forward[-1] |= {"q": q, "k": k, "v": v, "cu_seqlens_q": None, "cu_seqlens_k": None}
        return output.view(q.shape), lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous(), *others

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        (batch, queries), keys = q.shape[:2], k.shape[1]
        flat = _flat(dout, q, k, v, out)
        grads = [torch.empty_like(x) for x in flat[1:4]]
        _flash_attn_varlen_backward(
            *flat, softmax_lse.transpose(0, 1).flatten(1).contiguous(), *grads, _equal_offsets(batch, queries),
            _equal_offsets(batch, keys), queries, keys, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic, rng_state,
        )  # fmt: skip
        calls.backward[-1] |= {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": None, "cu_seqlens_k": None}
        for target, value in zip((dq, dk, dv), grads, strict=True):
            target.copy_(value.view(target.shape))

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
    ):  # fmt: skip
        calls.forward.append(locals().copy())
        _check(q, k_cache, v_cache, heads=(q.shape[2], k_cache.shape[2]))
        assert cache_seqlens.dtype is torch.int32, "cache_seqlens must have dtype int32"
        assert cache_seqlens.shape == q.shape[:1]
        if block_table is not None:
            assert block_table.dtype is torch.int32, "block_table must have dtype torch.int32"
            assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
            k_cache, v_cache = (x[block_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
        rule, queries = _Rule(softmax_scale, causal, *window_size, softcap), q.shape[1]
        rows = []
        for one, keys, values, length in zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True):
            run = _Run(*(torch.tensor([0, n], dtype=torch.int32) for n in (queries, length)), queries, length, rule, 0)
            rows.append(run.forward(one, keys[:length], values[:length]))
        output, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return (output, lse) if return_softmax_lse else output

    functions = {name: value for name, value in locals().items() if "flash_attn" in name}
    return types.SimpleNamespace(**functions)


class AuxRequest(NamedTuple):
    """As torch has it."""

    lse: bool = False


def torch_varlen(calls: Calls) -> Any:
    """A module like ``torch.nn.attention.varlen`` of torch 2.14, which writes down its calls."""

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False,
    ):  # fmt: skip
        calls.forward.append(locals().copy())
        _check(query, key, value, heads=(query.shape[1], key.shape[1]))
        _check_offsets(cu_seq_q, cu_seq_k, ends=(len(query), len(key)))
        _check_lengths(max_q, max_k)
        assert enable_gqa or query.shape[1] == key.shape[1], (
            "Expect query and key/value to have the same number of heads"
        )
        run = _Run(cu_seq_q, cu_seq_k, max_q, max_k, _Rule(scale, window_size == (-1, 0), *window_size), 0)
        output, lse = run.forward(query, key, value)
        return (output, lse) if return_aux is not None and return_aux.lse else output

    def _varlen_attn_backward(
        grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None,
        window_size=None,
    ):  # fmt: skip
        calls.backward.append(locals().copy())
        _check(query, key, value, out, grad_out, heads=(query.shape[1], key.shape[1]))
        _check_offsets(cu_seq_q, cu_seq_k, ends=(len(query), len(key)))
        assert rng_state.dtype is torch.uint64
        run = _Run(cu_seq_q, cu_seq_k, max_q, max_k, _Rule(scale, is_causal, *window_size), 0)
        return run.backward(grad_out, query, key, value, out, lse)

    return types.SimpleNamespace(
        varlen_attn=varlen_attn, _varlen_attn_backward=_varlen_attn_backward, AuxRequest=AuxRequest
    )


class FlashAttnStandIn(providers.FlashAttn):
    """The provider ``flash_attn`` with the stand-in for its kernels."""

    devices = ("cpu",)

    def __init__(self) -> None:
        self.calls = Calls()
        self.kernels = flash_attn(self.calls)

    def load(self) -> Any:
        return self.kernels

    def installed(self) -> bool:
        return True

    def version(self) -> str:
        return "2.8.3"


class TorchVarlenStandIn(providers.TorchVarlen):
    """The provider ``torch_varlen`` with the stand-in for its kernels."""

    devices = ("cpu",)

    def __init__(self) -> None:
        self.calls = Calls()
        self.kernels = torch_varlen(self.calls)

    def load(self) -> Any:
        return self.kernels


@contextlib.contextmanager
def stand_in(provider: str = "flash_attn") -> Iterator[Calls]:
    """Run ``fa`` on the CPU with a stand-in for the kernels of ``provider``; gives what they are called with."""
    standing_in = {"flash_attn": FlashAttnStandIn, "torch_varlen": TorchVarlenStandIn}[provider]()
    with providers.override(provider, standing_in):
        yield standing_in.calls
