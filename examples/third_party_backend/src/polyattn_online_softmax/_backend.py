"""What polyattn sees: abilities, options, one refusal, and the lowering of a mask to blocks."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from polyattn import (
    AttentionRequest,
    AttentionResult,
    BackendBase,
    ConfigError,
    MaskLayout,
    PreparedAttention,
    Reason,
    StructuredMask,
)
from polyattn.kernels import finished, hidden_in_blocks, shut_out
from polyattn_online_softmax._ops import online_softmax

_ABILITIES = frozenset(
    (
        *("float64", "float32", "bfloat16", "float16"),
        *("full", "causal", "window", "padded", "packed", "prefix_lm", "chunked", "active_queries"),
        *("gqa", "unequal_width", "sinks", "lse", "lse_grad", "grad", "deterministic"),
    )
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the backend.

    Attributes:
        chunk: how many queries and how many keys one step takes.
    """

    chunk: int = 256

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"options of backend 'online_softmax': chunk must be at least 1, got {self.chunk}")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The state of a prepared layout: tensors and static numbers, nothing else.

    Attributes:
        blocks: CPU int64 ``[N, 7]``, see ``MaskLayout.to_blocks``.
        per_row: whether blocks name batch rows; otherwise each holds for all of them.
        window: of the blocks; -1 for none.
        rows: ``Bool[B|1, 1, Q, 1]``, fully masked rows, or ``None`` where no block covers one.
        keys: ``Bool[B|1, 1, K, 1]``, keys that no query sees, likewise.
    """

    blocks: Tensor
    per_row: bool
    window: int
    rows: Tensor | None
    keys: Tensor | None


class OnlineSoftmaxBackend(BackendBase):
    """Online softmax over chunks of keys."""

    name = "online_softmax"
    api_version = 1
    abilities = _ABILITIES
    Options = Options

    def extra_reasons(self, layout: MaskLayout, request: AttentionRequest) -> tuple[Reason, ...]:
        """Abilities are about features by themselves; this is about a mixture: a structure without blocks."""
        if not isinstance(layout.visibility, StructuredMask) or layout.to_blocks() is not None:
            return ()
        return (
            Reason(
                code="no_blocks",
                feature="padded" if layout.visibility.kv_valid is not None else "packed",
                got=layout.describe(),
                need="a structure that to_blocks() can list: padding without holes, documents in one piece each",
                hint="build the layout from tensors on the CPU, with validate=True, outside of torch.compile",
            ),
        )

    def preference(self, layout: MaskLayout, request: AttentionRequest) -> int:
        """Only where nothing else is installed: fused kernels are faster."""
        return -10

    def plan(self, layout: MaskLayout, request: AttentionRequest) -> Plan:
        """Look at the mask once, for every layer that shares it."""
        mask, blocks = layout.visibility, layout.to_blocks()
        assert isinstance(mask, StructuredMask)
        assert blocks is not None
        assert mask.window is None or isinstance(mask.window, int)  # the abilities name no window of two sides
        rows, keys = hidden_in_blocks(layout, request)
        return Plan(blocks, layout.batch > 1, mask.window or -1, rows, keys)

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
        """Overwrite what takes no part (it may hold NaN), attend, and overwrite what came of it."""
        plan: Plan = prepared.state
        request = prepared.request
        q, k, v = shut_out(q, k, v, plan.rows, plan.keys)
        assert request.scale is not None  # the request has set its default
        output, lse = online_softmax(
            q, k, v, plan.blocks, plan.per_row, plan.window, float(request.scale), self.options.chunk
        )
        return finished(output, lse, request, rows=plan.rows, sinks=sinks)

    def describe(self, prepared: PreparedAttention) -> str:
        """How the work is cut."""
        return f"online softmax over {prepared.state.blocks.shape[0] - 1} blocks in chunks of {self.options.chunk}"
