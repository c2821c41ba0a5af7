"""Why a backend refuses, in words that programs can read."""

from __future__ import annotations

import dataclasses

DTYPES = ("float64", "float32", "bfloat16", "float16")
#: What a backend may declare in ``abilities`` and what ``Reason.feature`` names.
FEATURES = (
    *DTYPES,
    "full",
    "causal",
    "window",
    "padded",
    "packed",
    "prefix_lm",
    "chunked",
    "tree",
    "sink_tokens",
    "two_sided_window",
    "union",
    "positions",
    "kv_lengths",
    "selected",
    "dense",
    "mask_mod",
    "per_head_mask",
    "active_queries",
    "gqa",
    "unequal_width",
    "bias",
    "bias_grad",
    "softcap",
    "sinks",
    "lse",
    "lse_grad",
    "grad",
    "dropout",
    "deterministic",
    "second_order",
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One machine-readable reason for a refusal.

    Attributes:
        code: stable identifier, ``snake_case``, for programs (``"no_lse_grad"``).
        feature: what was asked for: one of :data:`FEATURES`, or ``"device"``, ``"kernel"``, ``"options"``.
        got: the value that was asked for.
        need: what the backend needs instead.
        hint: what to do about it; may be empty.
    """

    code: str
    feature: str
    got: str
    need: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.feature}: got {self.got}, need {self.need}"
        return f"{text}; {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, str]:
        """The reason as a JSON object."""
        return dataclasses.asdict(self)
