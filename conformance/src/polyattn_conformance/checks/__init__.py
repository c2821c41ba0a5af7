"""The checks of the conformance kit, one module a theme."""

from __future__ import annotations

from polyattn_conformance.checks import (
    dropout,
    execution,
    features,
    lse,
    mixtures,
    nonfinite,
    protocol,
    rows,
    state,
    transforms,
    trees,
    unknown,
    values,
)
from polyattn_conformance.checks.registry import Check, checks_of

#: Every check, in the order in which a reader wants to see them fail.
CHECKS: list[Check] = [
    check
    for theme in (
        protocol,
        unknown,
        values,
        rows,
        trees,
        nonfinite,
        lse,
        features,
        mixtures,
        dropout,
        execution,
        state,
        transforms,
    )
    for check in checks_of(theme.__name__)
]

__all__ = ["CHECKS", "Check"]
