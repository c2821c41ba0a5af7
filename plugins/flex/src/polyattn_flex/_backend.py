"""Preparing block masks, refusing what the device's kernel cannot do, and calling it."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from polyattn import (
    AttentionRequest,
    AttentionResult,
    BackendBase,
    MaskLayout,
    PreparedAttention,
    Reason,
)
from polyattn.kernels import accumulation_dtype, finished, fully_masked_rows, shut_out, unseen_keys
from polyattn_flex import _reasons
from polyattn_flex._block_mask import of_intervals
from polyattn_flex._blocks import TILE, Blocks, from_rows
from polyattn_flex._options import FlexOptions

#: The matrix instructions of the CUDA kernels take no narrower operand.
_LEAST_WIDTH = 16


@dataclasses.dataclass(frozen=True, eq=False)
class FlexPlan:
    """The state of a prepared layout; empty where a size is zero.

    Attributes:
        blocks: the tiles that the kernel visits; ``None`` where nothing is compiled.
        ranges: what the kernel evaluates in partial tiles: of each run of keys that a query sees the first and the one
            after its last, ``Int32[B|1, Q]`` each;
        dense: or, where a query's keys are not a few runs, ``Bool[B|1, H|1, Q, K]``; or neither, and it is the layout's
            own function.
        rows: ``Bool[B|1, H|1, Q, 1]``, fully masked rows, where gradients have to be kept from them.
        keys: ``Bool[B|1, Hkv|1, K, 1]``, keys that no query sees, or ``None`` when there are none.
    """

    blocks: Blocks | None = None
    ranges: tuple[Tensor, ...] | None = None
    dense: Tensor | None = None
    rows: Tensor | None = None
    keys: Tensor | None = None


class FlexBackend(BackendBase):
    """torch's FlexAttention under block masks that come from the structure of the layout.

    Attributes:
        abilities: what is honoured on the best device of this machine; :meth:`abilities_on` asks about one.
    """

    name = "flex_attention"
    Options = FlexOptions
    options: FlexOptions

    def __init__(self, options: FlexOptions | None = None) -> None:
        super().__init__(options)
        self.abilities = self.abilities_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def abilities_on(self, device: torch.device) -> frozenset[str]:
        """What is honoured on ``device``."""
        if not self.options.compiled:
            return _reasons.UNCOMPILED
        return _reasons.COMPILED_CPU if _reasons.on_cpu(device) else _reasons.COMPILED_CUDA

    def device_reasons(self, device: torch.device) -> tuple[Reason, ...]:
        """The kind of device, and what its compiler needs."""
        return _reasons.of_device(device, compiled=self.options.compiled)

    def hint(self, feature: str, device: torch.device) -> str:
        """Which other form of FlexAttention has the feature."""
        return _reasons.hint(feature, device) if self.options.compiled else ""

    def extra_reasons(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Options and features that exclude each other."""
        return _reasons.of_options(self.options, layout, request)

    def preference(self, layout: MaskLayout, request: AttentionRequest) -> int:
        """On CUDA above lowerings in plain operations; on the CPU last, since each new size is seconds of compiling."""
        return 60 if self.options.compiled and not _reasons.on_cpu(request.device) else -10

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> FlexPlan:
        """Find the tiles, from the structure where there is one."""
        device, backward = request.device, request.needs_grad
        if 0 in (request.batch, layout.q_len, layout.kv_len):
            return FlexPlan()
        rows, keys = fully_masked_rows(layout, request) if backward else None, unseen_keys(layout, request)
        if not self.options.compiled:
            if not torch.compiler.is_compiling():  # Dynamo cannot trace a warning
                _warn_uncompiled()
            return FlexPlan(dense=layout.to_dense(device), rows=rows, keys=keys)
        found = of_intervals(layout, device, backward=backward)
        if found is not None:
            return FlexPlan(found[0], ranges=found[1], rows=rows, keys=keys)
        if not _reasons.on_cpu(device) and not isinstance(layout.visibility, Tensor) and not request.has_bias:
            read = functools.partial(layout.dense_rows, device=device)
            return FlexPlan(from_rows(read, layout.q_len, backward=backward), rows=rows, keys=keys)
        # The CPU kernel runs as an operator, which takes tensors and no function; the level of a biased row needs them.
        dense = layout.to_dense(device)
        blocks = from_rows(lambda start, stop: dense[:, :, start:stop], layout.q_len, backward=backward)
        return FlexPlan(blocks, dense=dense, rows=rows, keys=keys)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: PreparedAttention,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionResult:
        """Run the kernel, and keep from it what nobody may see."""
        plan: FlexPlan = prepared.state
        request = prepared.request
        if plan.blocks is None and plan.dense is None:
            return _empty(q, k, v, request, bias, sinks)
        rows = plan.rows
        q, k, v = shut_out(q, k, v, rows, plan.keys)
        if bias is not None:
            bias = bias.to(accumulation_dtype(q.dtype)).reshape((1,) * (4 - bias.dim()) + bias.shape)
        # A bias may block what the mask leaves of a row; only the LSE knows.
        want_lse = request.needs_lse or request.has_sinks or (bias is not None and request.needs_grad)
        output, lse = self._run(q, k, v, prepared, bias, lse=want_lse)
        if bias is not None and request.needs_grad:
            assert lse is not None
            rows = lse.detach().isneginf().unsqueeze(-1)
        return finished(output, lse, request, rows=rows, sinks=sinks)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: PreparedAttention, bias: Tensor | None, *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        from polyattn_flex import _kernels, _ops

        plan: FlexPlan = prepared.state
        request, options = prepared.request, self.options
        scale, softcap = request.scale, request.softcap
        assert scale is not None
        if plan.blocks is None:
            assert plan.dense is not None
            result: tuple[Tensor, Tensor] = _kernels.evaluated(q, k, v, plan.dense, bias, scale, softcap)
            return result
        mask = plan.dense if plan.ranges is None else plan.ranges
        if _reasons.on_cpu(q.device):
            assert mask is not None
            limit, dynamic = options.compile_limit, options.dynamic
            arguments = (q, k, v, plan.blocks, mask, bias)
            return _ops.infer(*arguments, scale=scale, softcap=softcap, limit=limit, dynamic=dynamic), None
        output, found = _kernels.compiled(
            _widened(q),
            _widened(k),
            _widened(v),
            plan.blocks,
            prepared.layout.to_mask_mod() if mask is None else mask,
            bias,
            scale=scale,
            softcap=softcap,
            lse=lse,
            limit=options.compile_limit,
            dynamic=options.dynamic,
            kernel_options={"BACKEND": self._cuda_kernel, **options.kernel_options},
        )
        return output[..., : v.shape[3]], found

    @property
    def _cuda_kernel(self) -> str:
        # Left to itself torch takes another kernel below 128 queries.
        return "TRITON_DECODE" if self.options.decode else "TRITON"

    def describe(self, prepared: PreparedAttention) -> str:
        """Which kernel runs over how many tiles; reads the block table."""
        plan: FlexPlan = prepared.state
        if plan.blocks is None and plan.dense is None:
            return "nothing to compute"
        if plan.blocks is None:
            return "uncompiled (option compiled=False): evaluated densely, quadratic memory"
        kernel = "CPU" if _reasons.on_cpu(prepared.request.device) else self._cuda_kernel
        full, partial = int(plan.blocks.full_count.sum()), int(plan.blocks.partial_count.sum())
        many = plan.ranges is not None and len(plan.ranges) > 2
        runs = f", up to {len(plan.ranges or ()) // 2} runs of keys for a query" if many else ""
        tiles = f"{full} full and {partial} partial tiles of {TILE} x {TILE}"
        return f"compiled flex_attention, kernel {kernel}, {tiles}{runs}"


def _widened(x: Tensor) -> Tensor:
    return F.pad(x, (0, _LEAST_WIDTH - x.shape[3])) if x.shape[3] < _LEAST_WIDTH else x


def _empty(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, bias: Tensor | None, sinks: Tensor | None
) -> AttentionResult:
    """Zeros and ``-inf`` that depend on all that is given, with zero gradients."""
    given = (x for x in (q, k, v, bias, sinks) if x is not None)
    nothing = torch.stack([x.flatten()[:0].sum().to(q.dtype) for x in given]).sum()
    output = nothing.expand(*q.shape[:3], v.shape[3]).contiguous()
    if not request.needs_lse:
        return AttentionResult(output)
    lse = (nothing - torch.inf).to(accumulation_dtype(q.dtype))
    return AttentionResult(output, lse.expand(q.shape[:3]).contiguous())


@functools.cache
def _warn_uncompiled() -> None:
    warnings.warn(
        "backend 'flex_attention' with compiled=False evaluates attention densely, in memory quadratic in the length; "
        "leave the option out to run the compiled kernel",
        stacklevel=2,
    )
