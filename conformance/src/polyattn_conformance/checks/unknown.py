"""What a backend does with a rule of a mask that it has never heard of."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from polyattn import LayoutError, MaskLayout, StructuredMask, UnsupportedAttentionError
from polyattn_conformance.bounds import assert_within, expected_results
from polyattn_conformance.case import INFER, evaluate
from polyattn_conformance.checks.registry import check
from polyattn_conformance.failure import require
from polyattn_conformance.trial import Trial

_LENGTH = 9


@dataclasses.dataclass(frozen=True, eq=False)
class _Strided(StructuredMask):
    """A mask with a field, and so a word, that nobody knows: only distances that ``stride`` divides are seen."""

    stride: int | None = None

    def visible(self, q: Tensor, k: Tensor, **rest: Any) -> Tensor:
        """The formula with one condition more."""
        seen, near = super().visible(q, k, **rest), (q - k) % (self.stride or 1) == 0
        return near if seen is None else seen & near


def _nothing(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx + kv_idx < 0


def _layout(**fields: Any) -> MaskLayout:
    """A layout as a later polyattn would make it; this one refuses the class in the constructor."""
    layout = MaskLayout.from_mod(_nothing, q_len=_LENGTH, kv_len=_LENGTH)  # of which the host knows nothing
    object.__setattr__(layout, "visibility", _Strided(**fields, stride=2))
    return layout


@check({"causal": {"causal": True}, "full": {}, "window": {"causal": True, "window": 4}})
def unknown_field(trial: Trial, fields: dict[str, Any]) -> None:
    """A mask with an unknown field and word is refused or right; it is never computed without the field."""
    case = trial.case(_layout(**fields), heads=2)
    request = case.request(INFER)
    reasons = trial.backend.unsupported(case.layout, request)
    try:
        prepared = trial.backend.prepare(case.layout, request)
    except (UnsupportedAttentionError, LayoutError):
        trial.honoured += 1
        return
    require(not reasons, f"unsupported gives reasons, yet prepare accepts: {'; '.join(map(str, reasons))}")
    assert_within(evaluate(prepared, case, INFER), expected_results(case, INFER))
    trial.honoured += 1
