"""Deliberately wrong backends, one fault each, with the checks of the kit that must fail for it."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import ClassVar

import torch
import torch.nn.functional as F

from polyattn import FEATURES, AttentionRequest, AttentionResult, MaskLayout, PreparedAttention, StructuredMask
from polyattn_conformance.reference import plain_attention
from polyattn_eager import EagerBackend, EagerState
from polyattn_eager._backend import Blocked


class Mutant(EagerBackend):
    """The right backend, with places where a subclass can go wrong."""

    name = "mutant"
    caught_by: ClassVar[tuple[str, ...]]

    def layout(self, layout):
        return layout

    def hidden(self, layout, request):
        return ~self.layout(layout).to_dense(request.device)

    def request(self, request):
        return request

    def result(self, result, prepared):
        return result

    def plan(self, layout, request):
        hidden = self.hidden(layout, request)
        return EagerState(hidden, Blocked.of(hidden, rows=True, keys=True))

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = self.request(prepared.request)
        changed = dataclasses.replace(prepared, request=request) if request is not prepared.request else prepared
        return self.result(super().attend(q, k, v, changed, bias=bias, sinks=sinks), prepared)


def _structured(layout, **changes):
    mask = layout.visibility
    if not isinstance(mask, StructuredMask) or all(getattr(mask, name) is None for name in changes):
        return layout
    return MaskLayout(
        layout.q_len,
        layout.kv_len,
        layout.batch,
        layout.heads,
        visibility=dataclasses.replace(mask, **changes),
        active_queries=layout.active_queries,
    )


def _fully_masked(prepared):
    return prepared.layout.rows_without_keys(prepared.request.device)


class WindowOffByOne(Mutant):
    caught_by = ("window[causal-9_queries]", "values[causal_window]")

    def layout(self, layout):
        window = getattr(layout.visibility, "window", None)
        return layout if window is None or window > 100 else _structured(layout, window=window + 1)


class WindowOnlyWhenCausal(Mutant):
    caught_by = ("window[both_ways-9_queries]", "values[full_window]")

    def layout(self, layout):
        return layout if getattr(layout.visibility, "causal", True) else _structured(layout, window=None)


class TopLeftCausal(Mutant):
    caught_by = ("values[causal_fewer_queries]", "values[causal_one_query]")

    def hidden(self, layout, request):
        mask = layout.visibility
        if isinstance(mask, StructuredMask) and mask.causal and not mask.tensors():
            return torch.ones(1, 1, layout.q_len, layout.kv_len, dtype=torch.bool).triu(1)
        return super().hidden(layout, request)


class MaskDropped(Mutant):
    caught_by = ("values[dense]", "values[block_diffusion]", "packed_is_separate[causal]")

    def hidden(self, layout, request):
        return torch.zeros_like(super().hidden(layout, request))


class MaskInverted(Mutant):
    caught_by = ("values[dense]",)

    def hidden(self, layout, request):
        return ~super().hidden(layout, request)


class DocumentsLeak(Mutant):
    caught_by = ("values[packed]", "packed_is_separate[causal]", "long_values[packed]")

    def layout(self, layout):
        return _structured(layout, q_segments=None, kv_segments=None)


class PrefixIgnored(Mutant):
    caught_by = ("values[prefix_lm]",)

    def layout(self, layout):
        return _structured(layout, prefix_lengths=None)


class ChunksIgnored(Mutant):
    caught_by = ("values[chunked]", "long_values[chunked]")

    def layout(self, layout):
        return _structured(layout, chunk_size=None)


class PaddingIgnored(Mutant):
    caught_by = ("fully_masked_rows[left_padding]", "values[padding_both_ways]")

    def layout(self, layout):
        return _structured(layout, kv_valid=None)


class ActiveQueriesIgnored(Mutant):
    caught_by = ("fully_masked_rows[inactive]",)

    def layout(self, layout):
        return dataclasses.replace(layout, active_queries=None)


class MaskSharedAcrossBatch(Mutant):
    caught_by = ("values[dense_rows]", "values[packed_rows]")

    def hidden(self, layout, request):
        return super().hidden(layout, request)[:1]


class MaskSharedAcrossHeads(Mutant):
    caught_by = ("values[dense_heads]", "fully_masked_rows[per_head]")

    def hidden(self, layout, request):
        return super().hidden(layout, request)[:, :1]


class StaleState(Mutant):
    """Prepares once per shape."""

    caught_by = ("reuse",)

    def __init__(self, options=None):
        super().__init__(options)
        self._states = {}

    def plan(self, layout, request):
        key = (layout.q_len, layout.kv_len, request)
        return self._states.setdefault(key, super().plan(layout, request))


class AnyBatchAccepted(Mutant):
    caught_by = ("batch_mismatch[one]", "batch_mismatch[two]")

    def prepare(self, layout, request):
        if layout.batch not in {1, request.batch}:
            layout = MaskLayout.full(layout.q_len, layout.kv_len)
        return super().prepare(layout, request)


class KVHeadsTiled(Mutant):
    caught_by = ("gqa[2]", "gqa[3]", "gqa[6]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = prepared.request
        order = torch.arange(request.heads).view(request.kv_heads, request.group).mT.flatten()
        back = order.argsort()
        result = super().attend(q[:, order], k, v, prepared, bias=bias, sinks=sinks)
        lse = None if result.lse is None else result.lse[:, back]
        return AttentionResult(result.output[:, back], lse)


class ScaleIgnored(Mutant):
    caught_by = ("scale[small]", "scale[zero]")

    def request(self, request):
        return dataclasses.replace(request, scale=None)


class ScaleOfValueWidth(Mutant):
    caught_by = ("width[wide_values]",)

    def request(self, request):
        return dataclasses.replace(request, scale=request.scale * (request.head_dim / request.v_head_dim) ** 0.5)


class SoftcapIgnored(Mutant):
    caught_by = ("softcap[cap_1]", "softcap[cap_5]")

    def request(self, request):
        return dataclasses.replace(request, softcap=None)


class SoftcapAfterBias(Mutant):
    caught_by = ("softcap[cap_1]", "together")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        cap = prepared.request.softcap
        if cap is None or bias is None:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        scores = torch.matmul(q, k.repeat_interleave(prepared.request.group, 1).mT) * prepared.request.scale
        moved = cap * torch.tanh((scores + bias) / cap) - cap * torch.tanh(scores / cap)
        return super().attend(q, k, v, prepared, bias=moved, sinks=sinks)


class BiasIgnored(Mutant):
    caught_by = ("bias[whole]", "bias_blocks")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        nothing = None if bias is None else bias * 0
        return super().attend(q, k, v, prepared, bias=None if bias is None else nothing.nan_to_num(), sinks=sinks)


class BiasGradientDropped(Mutant):
    caught_by = ("bias[whole]", "bias[keys]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return super().attend(q, k, v, prepared, bias=None if bias is None else bias.detach(), sinks=sinks)


class BiasGradientOfFirstQueries(Mutant):
    """Sums the gradient of a bias that queries share over the first 128 of them."""

    caught_by = ("bias[keys]", "bias[vector]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if bias is not None and (bias.dim() == 1 or bias.shape[-2] == 1):
            bias = torch.where(torch.arange(q.shape[2]).unsqueeze(-1) < 128, bias, bias.detach())
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class LargestProductAsMaximum(Mutant):
    """Subtracts the largest product before the scale, which is the smallest score where the scale is negative."""

    caught_by = ("large_scores[float32]", "large_scores[bfloat16]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        if prepared.request.scale >= 0 or not k.shape[2]:
            return result
        group = prepared.request.group
        scores = (q @ k.repeat_interleave(group, 1).mT).float() * prepared.request.scale
        spread = scores.detach().amax(-1, keepdim=True) - scores.detach().amin(-1, keepdim=True)
        overflown = torch.where(spread > 88, torch.nan, 0.0).to(result.output.dtype)
        return dataclasses.replace(result, output=result.output + overflown)


class SmallestBiasKills(Mutant):
    caught_by = ("smallest_bias[float32]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if bias is not None:
            bias = bias.masked_fill(bias <= torch.finfo(bias.dtype).min, -torch.inf)
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class SinksIgnored(Mutant):
    caught_by = ("sinks[ordinary]", "together")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return super().attend(q, k, v, prepared, bias=bias)


class BiasOfThreeDimensionsPerRow(Mutant):
    caught_by = ("bias[as_many_heads_as_rows]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if bias is not None and bias.dim() == 3 and bias.shape[0] == q.shape[0]:
            bias = bias.unsqueeze(1)
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class SinksInLSE(Mutant):
    caught_by = ("sinks[ordinary]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        if sinks is None or result.lse is None:
            return result
        return AttentionResult(result.output, torch.logaddexp(result.lse, sinks.unsqueeze(-1).to(result.lse)))


class LSEInBaseTwo(Mutant):
    caught_by = ("lse_natural[float32]", "values[full]")

    def result(self, result, prepared):
        return AttentionResult(result.output, None if result.lse is None else result.lse / 0.6931471805599453)


class LSERoundedToTheDtype(Mutant):
    caught_by = ("lse_natural[bfloat16]",)

    def result(self, result, prepared):
        lse = result.lse
        return AttentionResult(result.output, None if lse is None else lse.to(result.output.dtype).to(lse.dtype))


class LSEAlwaysThere(Mutant):
    caught_by = ("lse_when_asked",)

    def result(self, result, prepared):
        return AttentionResult(result.output, result.output.new_zeros(result.output.shape[:3]))


class LSEWithoutGradient(Mutant):
    caught_by = ("lse_gradient[full]", "values[causal]")

    def result(self, result, prepared):
        return AttentionResult(result.output, None if result.lse is None else result.lse.detach())


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


class LSEWithZeroGradient(Mutant):
    caught_by = ("lse_gradient[causal]", "lse_gradient_not_asked[of_both]", "lse_gradient_not_asked[of_lse]")

    def result(self, result, prepared):
        return AttentionResult(result.output, None if result.lse is None else _ZeroGradient.apply(result.lse))


class LSEDetachedInMixedLoss(Mutant):
    """Right when the gradient is asked for, silently detached when it is not."""

    caught_by = ("lse_gradient_not_asked[of_both]", "lse_gradient_not_asked[of_lse]")

    def result(self, result, prepared):
        if result.lse is None or prepared.request.needs_lse_grad:
            return result
        return AttentionResult(result.output, result.lse.detach())


class DeadRowsAveraged(Mutant):
    caught_by = (
        "fully_masked_rows[first]",
        "fully_masked_rows[middle]",
        "fully_masked_rows[last]",
        "fully_masked_rows[all]",
        "values[element]",
    )

    def plan(self, layout, request):
        state = super().plan(layout, request)
        return EagerState(state.hidden, dataclasses.replace(state.blocked, rows=None))


class DeadRowsZeroedByMultiplication(Mutant):
    caught_by = ("fully_masked_rows[middle]", "fully_masked_rows[left_padding]", "fully_masked_rows[inactive_padding]")

    def plan(self, layout, request):
        state = super().plan(layout, request)
        return EagerState(state.hidden, dataclasses.replace(state.blocked, rows=None, keys=None))

    def result(self, result, prepared):
        masked = _fully_masked(prepared)
        output = result.output * ~masked.unsqueeze(-1)
        return AttentionResult(output, None if result.lse is None else result.lse.masked_fill(masked, -torch.inf))


class UnseenKeysPoison(Mutant):
    caught_by = (
        "fully_masked_rows[unseen_keys]",
        "fully_masked_rows[right_padding]",
        "fully_masked_rows[padded_cache]",
    )

    def plan(self, layout, request):
        state = super().plan(layout, request)
        return EagerState(state.hidden, dataclasses.replace(state.blocked, keys=None))


class RowsKilledByBiasKeepTheirNaN(Mutant):
    """What the mask hides is overwritten; what it hides together with the bias is only hidden."""

    caught_by = ("fully_masked_rows_bias",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if bias is None:
            return super().attend(q, k, v, prepared, sinks=sinks)
        hidden = prepared.state.hidden | bias.isneginf()
        masked = hidden.all(-1)
        result = super().attend(q, k, v, prepared, bias=bias.masked_fill(masked.unsqueeze(-1), 0.0))
        output = result.output.masked_fill(masked.unsqueeze(-1), 0.0)
        return AttentionResult(output, None if result.lse is None else result.lse.masked_fill(masked, -torch.inf))


class RowsOfNaNLookDead(Mutant):
    caught_by = ("nan_stays_visible[query]", "nan_stays_visible[key]")

    def result(self, result, prepared):
        lse = result.lse
        return AttentionResult(result.output.nan_to_num(0.0), None if lse is None else lse.nan_to_num(0.0))


class NaNHiddenInItsValue(Mutant):
    caught_by = ("nan_stays_visible[value]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return super().attend(q, k, v.nan_to_num(0.0), prepared, bias=bias, sinks=sinks)


class DeadRowLSEZero(Mutant):
    caught_by = ("fully_masked_rows[first]", "fully_masked_rows[per_head]")

    def result(self, result, prepared):
        lse = result.lse
        return AttentionResult(result.output, None if lse is None else lse.masked_fill(_fully_masked(prepared), 0.0))


class DeadRowLSEInfinite(Mutant):
    caught_by = ("fully_masked_rows[last]", "empty[no_keys]")

    def result(self, result, prepared):
        lse = result.lse
        return AttentionResult(
            result.output, None if lse is None else lse.masked_fill(_fully_masked(prepared), torch.inf)
        )


class IncomingGradientOfDeadRowsSpreads(Mutant):
    """Outputs are right; a NaN that comes back into a fully masked row goes everywhere."""

    caught_by = ("fully_masked_rows[middle]", "fully_masked_rows[inactive]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        return AttentionResult(result.output + 0.0 * (q.nan_to_num().sum() + v.nan_to_num().sum()), result.lse)


class DropoutOutsideTraining(Mutant):
    caught_by = ("dropout_outside_training",)

    def request(self, request):
        return dataclasses.replace(request, training=True)


class DropoutIgnored(Mutant):
    caught_by = ("dropout[plain]", "dropout_compiled")

    def request(self, request):
        return dataclasses.replace(request, dropout_p=0.0)


class DropoutInSixteenths(Mutant):
    caught_by = ("dropout_probability[p_0.1]", "dropout_probability[p_0.3]")

    def request(self, request):
        return dataclasses.replace(request, dropout_p=int(request.dropout_p * 16) / 16)


class DropoutNotScaled(Mutant):
    caught_by = ("dropout[plain]",)

    def result(self, result, prepared):
        return AttentionResult(result.output * (1 - prepared.request.dropout), result.lse)


class DropoutOfOutput(Mutant):
    """Drops elements of the output instead of attention weights."""

    caught_by = ("dropout[plain]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = prepared.request
        calm = dataclasses.replace(prepared, request=dataclasses.replace(request, dropout_p=0.0))
        result = EagerBackend.attend(self, q, k, v, calm, bias=bias, sinks=sinks)
        return AttentionResult(F.dropout(result.output, request.dropout_p, request.training), result.lse)


class DropoutSharedAcrossHeads(Mutant):
    caught_by = ("dropout[plain]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if not prepared.request.dropout:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        single = dataclasses.replace(prepared, request=dataclasses.replace(prepared.request, heads=1, kv_heads=1))
        state, parts = torch.get_rng_state(), []
        for head in range(q.shape[1]):
            torch.set_rng_state(state)
            one = slice(head, head + 1)
            parts.append(EagerBackend.attend(self, q[:, one], k[:, one], v[:, one], single).output)
        lse = EagerBackend.attend(self, q, k, v, prepared).lse
        return AttentionResult(torch.cat(parts, 1), lse)


class SoftmaxInLowPrecision(Mutant):
    """Adds up the terms of the softmax one by one in BF16, where 256 + 1 is 256."""

    caught_by = ("accumulation[bfloat16]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = prepared.request
        if q.dtype is not torch.bfloat16 or request.group > 1:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        terms = (q @ k.mT * request.scale).masked_fill(prepared.state.hidden, -torch.inf).exp()
        total = torch.zeros_like(terms[..., 0])
        for term in terms.unbind(-1):
            total = total + term
        return AttentionResult((terms / total.unsqueeze(-1)) @ v, total.float().log() if request.needs_lse else None)


class GroupSummedInLowPrecision(Mutant):
    """Adds the gradients of the query heads of a group one by one, in their own dtype."""

    caught_by = ("accumulation[bfloat16]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = prepared.request
        wide = dataclasses.replace(prepared, request=dataclasses.replace(request, kv_heads=request.heads))
        k, v = (torch.cat([x[:, h // request.group].unsqueeze(1) for h in range(request.heads)], 1) for x in (k, v))
        return EagerBackend.attend(self, q, k, v, wide, bias=bias, sinks=sinks)


class OutputInFP32(Mutant):
    caught_by = ("dtype[bfloat16]", "autocast[float32]")

    def result(self, result, prepared):
        return AttentionResult(result.output.float(), result.lse)


class LSEInLowPrecision(Mutant):
    caught_by = ("dtype[bfloat16]",)

    def result(self, result, prepared):
        return AttentionResult(result.output, None if result.lse is None else result.lse.to(result.output.dtype))


class StridesIgnored(Mutant):
    """Reads v as if it lay sequence by sequence."""

    caught_by = ("strides[sequence_first]", "strides[width_strided]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        dense = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride()) if v.numel() else v
        return super().attend(q, k, dense, prepared, bias=bias, sinks=sinks)


class StridesOfTheFirstCall(Mutant):
    """Keeps the strides of the first v beside what it prepared, and reads each later v with them."""

    caught_by = ("reuse",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        strides = prepared.state.__dict__.setdefault("strides", v.stride())
        last = sum((size - 1) * stride for size, stride in zip(v.shape, strides, strict=True))
        seen = v.as_strided(v.shape, strides) if v.is_contiguous() and last < v.numel() else v
        return super().attend(q, k, seen, prepared, bias=bias, sinks=sinks)


class WritesIntoInputs(Mutant):
    caught_by = ("values[full]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        if not torch.compiler.is_compiling():
            q.detach().mul_(prepared.request.scale)
        return result


class WaitsForValues(Mutant):
    caught_by = ("no_waiting",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if q.isnan().any():
            q = q.nan_to_num()
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class RecompilesForEveryBatch(Mutant):
    caught_by = ("recompiles",)

    def plan(self, layout, request):
        state = super().plan(layout, request)
        object.__setattr__(state, "visible", int((~state.hidden).sum()))
        return state

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if prepared.state.visible % 2:
            q = q * 1
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class NotTheSameTwice(Mutant):
    caught_by = ("deterministic",)

    def result(self, result, prepared):
        noise = 1 + 1e-7 * torch.rand_like(result.output)
        return AttentionResult(result.output * noise, result.lse)


class SecondDerivativesZero(Mutant):
    caught_by = ("transform[double_backward]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if bias is not None or sinks is not None or not q.requires_grad or prepared.request.needs_lse:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        return AttentionResult(_OnceDifferentiable.apply(q, k, v, prepared, self))


class DropoutSharedAcrossQueries(Mutant):
    caught_by = ("dropout[plain]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request = prepared.request
        if not request.dropout:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        kept = torch.rand(*q.shape[:2], 1, k.shape[2]) >= request.dropout
        identity = torch.eye(k.shape[2], dtype=v.dtype).expand(*k.shape[:2], -1, -1)
        calm = dataclasses.replace(prepared, request=dataclasses.replace(request, dropout_p=0.0))
        weights = EagerBackend.attend(self, q, k, identity, calm, bias=bias, sinks=sinks).output
        return AttentionResult(weights * kept / (1 - request.dropout) @ v.repeat_interleave(request.group, 1))


class DropoutInTheLSE(Mutant):
    caught_by = ("dropout[plain]",)

    def result(self, result, prepared):
        lse = None if result.lse is None else result.lse + math.log(1 - prepared.request.dropout)
        return AttentionResult(result.output, lse)


class DropoutTheSameInEveryCall(Mutant):
    caught_by = ("dropout_seed",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        with torch.random.fork_rng(devices=[]):
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class TilesInRandomOrder(Mutant):
    caught_by = ("deterministic",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        hidden = prepared.state.hidden
        if k.shape[2] < 1000:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        tiles = torch.arange(k.shape[2]).split(256)
        order = torch.cat([tiles[i] for i in random.sample(range(len(tiles)), len(tiles))])
        state = EagerState(hidden[..., order], Blocked.of(hidden[..., order], rows=True, keys=True))
        moved = dataclasses.replace(prepared, state=state)
        return super().attend(q, k[:, :, order], v[:, :, order], moved, bias=bias, sinks=sinks)


class WidthCutToAMultipleOfEight(Mutant):
    caught_by = ("width[not_of_eight]", "mixture[wide]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        most = q.shape[3] // 8 * 8
        if most:
            q, k = (torch.nn.functional.pad(x[..., :most], (0, q.shape[3] - most)) for x in (q, k))
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class ResultsCachedByAddress(Mutant):
    caught_by = ("in_place",)

    def __init__(self, options=None):
        super().__init__(options)
        self._results = {}

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if torch.is_grad_enabled():
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        key = (prepared, *(None if x is None else x.data_ptr() for x in (q, k, v, bias, sinks)))
        if key not in self._results:
            self._results[key] = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        return self._results[key]


class OneOutputBuffer(Mutant):
    caught_by = ("in_place",)

    def __init__(self, options=None):
        super().__init__(options)
        self._buffers = {}

    def result(self, result, prepared):
        if torch.is_grad_enabled():
            return result
        shape = (result.output.shape, result.output.dtype)
        buffer = self._buffers.setdefault(shape, torch.empty_like(result.output))
        return AttentionResult(buffer.copy_(result.output), result.lse)


class AdvancesTheGenerator(Mutant):
    caught_by = ("no_trace",)

    def result(self, result, prepared):
        torch.rand(1)
        return result


class ChangesASetting(Mutant):
    caught_by = ("no_trace",)

    def result(self, result, prepared):
        torch.set_float32_matmul_precision("high")
        return result


class KeepsTheLastCall(Mutant):
    caught_by = ("nothing_kept",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        self._last = (q, k, v)
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class OutputIsTheValue(Mutant):
    """Where a query sees one key its output is that key's value: the same tensor."""

    caught_by = ("one_key",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        alone = v.shape == result.output.shape and k.shape[2] == 1 and not prepared.state.hidden.any()
        return AttentionResult(v, result.lse) if alone and bias is None and sinks is None else result


class FifthBatchRow(Mutant):
    caught_by = ("mixture[many_heads]",)

    def hidden(self, layout, request):
        hidden = super().hidden(layout, request)
        return torch.cat([hidden[:4], hidden[:1].expand_as(hidden[4:])]) if hidden.shape[0] > 4 else hidden


class HalfScoresCapped(Mutant):
    caught_by = ("large_scores[float16]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if q.dtype is torch.float16 and prepared.request.softcap is None:
            request = dataclasses.replace(prepared.request, softcap=60.0)
            prepared = dataclasses.replace(prepared, request=request)
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class PreferenceRaises(Mutant):
    caught_by = ("optional_methods",)

    def preference(self, layout, request):
        raise KeyError(request.dtype)


class DescribeRaises(Mutant):
    caught_by = ("optional_methods",)

    def describe(self, prepared):
        return prepared.state.name


class AnswersWithATensor(Mutant):
    caught_by = ("values[full]",)

    def result(self, result, prepared):
        return result.output


class BackwardOfTheLastForward(Mutant):
    """Keeps what the backward needs in one place for all calls."""

    caught_by = ("interleaved",)
    abilities = EagerBackend.abilities - {"second_order"}

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        self.saved = (q, k, v)
        if bias is not None or sinks is not None or prepared.request.needs_lse:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        return AttentionResult(_SavedElsewhere.apply(q, k, v, prepared, self))


class _SavedElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prepared, backend):
        ctx.prepared, ctx.backend = prepared, backend
        return EagerBackend.attend(backend, q, k, v, prepared).output

    @staticmethod
    def backward(ctx, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.backend.saved]
        with torch.enable_grad():
            output = EagerBackend.attend(ctx.backend, *leaves, ctx.prepared).output
        return (*torch.autograd.grad(output, leaves, grad), None, None)


class InvertsTheMaskInPlace(Mutant):
    caught_by = ("values[dense]",)

    def plan(self, layout, request):
        state = super().plan(layout, request)
        if isinstance(layout.visibility, torch.Tensor):
            layout.visibility.logical_not_()
        return state


class PlansByIdOfTheLayout(Mutant):
    caught_by = ("one_after_another",)

    def __init__(self, options=None):
        super().__init__(options)
        self._states = {}

    def plan(self, layout, request):
        return self._states.setdefault((id(layout), request), super().plan(layout, request))


class ChunksByIndex(Mutant):
    caught_by = ("mixture[small]",)

    def hidden(self, layout, request):
        size = getattr(layout.visibility, "chunk_size", None)
        if size is None:
            return super().hidden(layout, request)
        queries, keys = torch.arange(layout.q_len) // size, torch.arange(layout.kv_len) // size
        return super().hidden(_structured(layout, chunk_size=None), request) | (queries.unsqueeze(-1) != keys)


class SinksOfKVHeads(Mutant):
    caught_by = ("mixture[one_query]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if sinks is not None and q.shape[2] == 1:
            sinks = sinks[torch.arange(q.shape[1]) // prepared.request.group]
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class SinksAreCut(Mutant):
    caught_by = ("sinks[far_above]",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        cut = None if sinks is None else sinks.clamp(max=20.0)
        return super().attend(q, k, v, prepared, bias=bias, sinks=cut)


class CompiledWithoutSinks(Mutant):
    caught_by = ("compiled_features",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        return super().attend(q, k, v, prepared, bias=bias, sinks=None if torch.compiler.is_compiling() else sinks)


class UntraceableInference(Mutant):
    caught_by = ("compiled[causal]", "compiled_features")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        if torch.compiler.is_compiling() and not any(x.requires_grad for x in (q, k, v)):
            raise RuntimeError("an autograd function was given its context as the first argument")
        return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)


class CompiledInferenceWithoutScale(Mutant):
    caught_by = ("compiled_features",)

    def request(self, request):
        inference = torch.compiler.is_compiling() and not request.needs_grad
        return dataclasses.replace(request, scale=request.head_dim**-0.5) if inference else request


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prepared, backend):
        ctx.save_for_backward(q, k, v)
        ctx.prepared, ctx.backend = prepared, backend
        return EagerBackend.attend(backend, q, k, v, prepared).output

    @staticmethod
    def backward(ctx, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = EagerBackend.attend(ctx.backend, *leaves, ctx.prepared).output
        return (*(x.detach() for x in torch.autograd.grad(output, leaves, grad.detach())), None, None)


class AcceptsWhatItDoesNotDeclare(Mutant):
    caught_by = ("ability[softcap]", "softcap[cap_5]")
    abilities = EagerBackend.abilities - {"softcap"}

    def unsupported(self, layout, request):
        return ()


class RefusesWhatItDeclares(Mutant):
    caught_by = ("ability[window]",)

    def unsupported(self, layout, request):
        without = EagerBackend()
        without.name, without.abilities = self.name, self.abilities - {"window"}
        return without.unsupported(layout, request)


class RefusesWithoutReasons(Mutant):
    caught_by = ("ability[bias]",)
    abilities = EagerBackend.abilities - {"bias", "bias_grad"}

    def unsupported(self, layout: MaskLayout, request: AttentionRequest):
        return tuple(str(reason) for reason in super().unsupported(layout, request))


class RefusesOnlyInAttend(Mutant):
    """Says that it cannot, and prepares all the same."""

    caught_by = ("ability[sinks]", "sinks[ordinary]")
    abilities = EagerBackend.abilities - {"sinks"}

    def prepare(self, layout, request):
        return PreparedAttention(self, layout, request, self.plan(layout, request))


class LosesItselfInCopies(Mutant):
    caught_by = ("deepcopy",)

    def __deepcopy__(self, memo):
        return ScaleIgnored()


class UnequalBackwards(Mutant):
    """Frees or overwrites what a second backward needs."""

    caught_by = ("backward_twice",)

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        result = super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        if result.output.requires_grad:
            calls = []
            result.output.register_hook(lambda grad: calls.append(None) or grad * len(calls))
        return result


def _is_tree(layout):
    return getattr(layout.visibility, "kv_segment_ends", None) is not None


def _parts(layout):
    """The parts of a union as layouts; none of anything else."""
    parts = getattr(layout.visibility, "parts", ())
    sizes = (layout.q_len, layout.kv_len, layout.batch, layout.heads)
    return [MaskLayout(*sizes, visibility=mask, active_queries=active) for mask, active in parts]


class Recounting(Mutant):
    """Computes by the plain formulas, some pairs weighing more than once."""

    def counts(self, layout):
        """How often each pair counts; ``None`` where all do once."""
        raise NotImplementedError

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        request, counts = prepared.request, self.counts(prepared.layout)
        if counts is None:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        more = counts.to(q.dtype).log()
        bias = more if bias is None else bias + more
        rest = {"scale": request.scale, "softcap": request.softcap, "bias": bias, "sinks": sinks}
        output, lse = plain_attention(q, k, v, prepared.layout.to_dense(), **rest)
        return AttentionResult(output, lse if request.needs_lse else None)


class BranchSeesSibling(Mutant):
    caught_by = ("branch_is_a_row[causal]", "tree_is_a_mask[both_ways]", "values[tree]")

    def layout(self, layout):
        return (
            _structured(layout, kv_segment_ends=layout.visibility.kv_segment_ends + 1) if _is_tree(layout) else layout
        )


class AncestorCountedTwice(Recounting):
    caught_by = ("branch_is_a_row[causal]", "branches_share_gradients[causal]", "values[shared_prefix]")

    def counts(self, layout):
        if not _is_tree(layout):
            return None
        mask = layout.visibility
        return 1 + (mask.kv_segments[:, None, None] < mask.q_segments[:, None, :, None])


class TreeWindowCountsTokensOfTheRow(Mutant):
    caught_by = ("branch_is_a_row[window]", "branches_share_gradients[window]", "values[tree_window]")

    def layout(self, layout):
        at = torch.arange(layout.q_len)[None]
        own = _is_tree(layout) and layout.q_len == layout.kv_len
        return _structured(layout, q_positions=at, kv_positions=at) if own else layout


class UnionCountsSharedPairsTwice(Recounting):
    caught_by = ("union_counts_once[overlapping]", "values[union]")

    def counts(self, layout):
        parts = _parts(layout)
        return sum(part.to_dense().int() for part in parts).clamp(min=1) if parts else None


class SecondPartOfUnionDropped(Mutant):
    caught_by = ("union_counts_once[apart]", "values[union_apart]", "long_values[union]")

    def layout(self, layout):
        parts = _parts(layout)
        return parts[0] if parts else layout


class BlindRowsOfAPartHaveLSEZero(Mutant):
    """Merges the parts of a union by their LSE, which a kernel gives as 0 where a row sees nothing."""

    caught_by = ("union_counts_once[overlapping]", "values[union_in_part]", "long_values[union_in_part]")

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        layout, request = prepared.layout, prepared.request
        parts = _parts(layout)
        if not parts or bias is not None or sinks is not None:
            return super().attend(q, k, v, prepared, bias=bias, sinks=sinks)
        seen, results = torch.zeros(1, 1, layout.q_len, layout.kv_len, dtype=torch.bool), []
        for part in parts:
            own = part.to_dense() & ~seen
            seen = seen | own
            output, lse = plain_attention(q, k, v, own, scale=request.scale, softcap=request.softcap)
            results.append((output, torch.where(lse.isneginf(), 0, lse)))
        lse = torch.logsumexp(torch.stack([lse for _, lse in results]), 0)
        output = sum((part - lse).exp().unsqueeze(-1) * output.float() for output, part in results)
        return AttentionResult(output.to(q.dtype), lse if request.needs_lse else None)


class SinkTokensHiddenByTheWindow(Mutant):
    caught_by = ("sink_tokens_survive[one_row]", "values[packed_sink_tokens]", "long_values[sink_tokens]")

    def layout(self, layout):
        sinks = getattr(layout.visibility, "sink_lengths", None)
        return layout if sinks is None else _structured(layout, sink_lengths=torch.zeros_like(sinks))


class SinkTokensSeenFromOtherDocuments(Mutant):
    caught_by = ("sink_tokens_survive[documents]", "values[packed_sink_tokens]")

    def hidden(self, layout, request):
        hidden, mask = super().hidden(layout, request), layout.visibility
        if getattr(mask, "sink_lengths", None) is None or mask.kv_segments is None or mask.sink_lengths.dim() > 1:
            return hidden
        sink = (mask.kv_positions < mask.sink_lengths[:, None])[:, None, None]
        earlier = (mask.kv_segments[:, None] <= mask.q_segments[:, :, None])[:, None]
        return hidden & ~(sink & earlier)


class SinkTokensOfTheFirstDocumentForAll(Mutant):
    caught_by = ("values[sink_tokens_of_each_document]",)

    def layout(self, layout):
        lengths = getattr(layout.visibility, "sink_lengths", None)
        if lengths is None or lengths.dim() < 2:
            return layout
        return _structured(layout, sink_lengths=lengths[:, :1].expand_as(lengths))


class LeftAndRightSwapped(Mutant):
    caught_by = ("two_sided_window[both_ways]", "values[two_sided_window]", "values[packed_two_sided_window]")

    def layout(self, layout):
        window = getattr(layout.visibility, "window", None)
        return _structured(layout, window=window[::-1]) if isinstance(window, tuple) else layout


class BlocksOfBlockCausalAreCausal(Mutant):
    caught_by = ("values[block_causal]",)

    def hidden(self, layout, request):
        hidden, mask = super().hidden(layout, request), layout.visibility
        at = getattr(mask, "q_positions", None)
        level = (
            isinstance(mask, StructuredMask) and at is not None and (at.diff() == 0).any() and mask.q_segments is None
        )
        return hidden | torch.ones_like(hidden).triu(1 + layout.kv_len - layout.q_len) if level else hidden


class UnknownFieldIgnored(Mutant):
    caught_by = ("unknown_field[causal]", "unknown_field[full]", "unknown_field[window]")

    def unsupported(self, layout, request):
        return tuple(reason for reason in super().unsupported(layout, request) if reason.feature in FEATURES)

    def layout(self, layout):
        mask = layout.visibility
        if not isinstance(mask, StructuredMask):
            return layout
        known = {field.name: getattr(mask, field.name) for field in dataclasses.fields(StructuredMask)}
        return dataclasses.replace(layout, visibility=StructuredMask(**known))


MUTANTS = [kind for base in (Mutant, Recounting) for kind in base.__subclasses__() if kind is not Recounting]
