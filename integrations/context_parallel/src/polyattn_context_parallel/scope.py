"""The scope that makes layers attend to tokens of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyattn import (
    AttentionBackend,
    AttentionRequest,
    AttentionScope,
    MaskLayout,
    PreparedAttention,
    RotaryEmbedding,
    RotaryTables,
    StructuredMask,
)
from polyattn_context_parallel.attention import CHECKS, METHODS, ContextParallelAttention, check_choice
from polyattn_context_parallel.errors import ContextParallelError
from polyattn_context_parallel.shard import Shard


class ContextParallelScope(AttentionScope):
    """An :class:`~polyattn.AttentionScope` of layers that hold this rank's tokens; nothing else changes.

    Args:
        shard: who holds which tokens, and the masks of the whole sequences.
        method: ``"auto"``, ``"gather"``, ``"ulysses"`` or ``"ring"``.
        length: of the whole sequences, by default the layout's.
        check: ``"once"``: the ranks agree on each new kind of attention before anything is sent; ``"always"``: at each
            call; ``"never"``.
        timeout: seconds until a rank that has not come is given up.

    Raises:
        ContextParallelError: an argument is none of these.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        method: str = "auto",
        length: int | None = None,
        check: str = "once",
        timeout: float = 30.0,
    ) -> None:
        check_choice("method", method, ("auto", *METHODS))
        check_choice("check", check, CHECKS)
        super().__init__(shard.local_layout(), length=shard.layout.q_len if length is None else length)
        self.shard, self.method, self.check, self.timeout = shard, method, check, timeout

    def prepare(
        self,
        backend: str | AttentionBackend,
        request: AttentionRequest,
        *,
        layout: MaskLayout | None = None,
        window: Any = None,
        positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> PreparedAttention:
        """See :meth:`AttentionScope.prepare`; ``layout`` may be one of ``shard.layouts``.

        Raises:
            ContextParallelError: another layout; a window over a layout that does not say where its tokens stand.
        """
        whole = self.shard.layout if layout is None or layout is self.layout else layout
        if all(whole is not known for known in self.shard.layouts.values()):
            raise ContextParallelError(
                "layout is none of the shard's, so nobody knows which of its tokens lie on which rank; name it there: "
                "Shard.of({'full': a, 'sliding': b}, mesh)"
            )
        if window is not None and not _is_placed(whole):
            raise ContextParallelError(
                f"window={window} needs a layout that says where its tokens stand, and this rank knows the positions "
                "of its own only; put the window into the layout: layout.with_window(...)"
            )
        return super().prepare(backend, request, layout=whole, window=window)

    def build(self, backend: AttentionBackend, layout: MaskLayout, request: AttentionRequest) -> PreparedAttention:
        """Attention over all ranks; all of them come here together."""
        prepared: Any = ContextParallelAttention(
            backend, self.shard, layout, request, method=self.method, check=self.check, timeout=self.timeout
        )
        return prepared  # type: ignore[no-any-return]

    def rotary(self, embedding: RotaryEmbedding, positions: Tensor, *, length: int | None = None) -> RotaryTables:
        """See :meth:`AttentionScope.rotary`.

        Raises:
            ContextParallelError: the positions did not come from ``shard.take``.
        """
        if not self.shard.took(positions):
            raise ContextParallelError(
                f"positions must be shard.take(positions of the whole sequences), got another tensor of shape "
                f"{list(positions.shape)}; positions that start anew on each rank would turn its tokens wrongly"
            )
        return super().rotary(embedding, positions, length=length)


def _is_placed(layout: MaskLayout) -> bool:
    """Whether a window can be measured over the layout alone."""
    mask = layout.visibility
    masks = [part.mask for part in mask.parts] if hasattr(mask, "parts") else [mask]
    return layout.q_positions is not None or all(
        isinstance(one, StructuredMask) and (one.positional or one.q_positions is not None) for one in masks
    )
