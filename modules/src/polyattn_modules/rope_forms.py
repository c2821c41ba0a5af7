"""The forms in which a config writes a rope: canonical, as transformers has it, or short."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyattn import ConfigError, RopeConfigError, RopeSpec
from polyattn.messages import is_float32, listed, shown
from polyattn.rope import CANONICAL_ONLY, UNBOUNDED
from polyattn_modules.spec import head_width

#: Keys that say which of the full forms a mapping with a ``rope_theta`` has.
_FULL = ("schema_version", "model_type", "convention")


@dataclasses.dataclass(frozen=True)
class ShortRope:
    """``{rope_theta: 10000.0}``: the default variant on the whole head, channels paired by halves, no longest sequence.

    Attributes:
        theta: base of the frequencies.
    """

    theta: Any

    def spec(self, layer: Mapping[str, Any]) -> RopeSpec:
        """The rope in full, for a layer of these sizes.

        Raises:
            ConfigError: the sizes do not give the width of a head.
            RopeConfigError: ``theta`` or the width is wrong.
        """
        head_dim = layer["head_dim"]
        if head_dim is None:
            if layer["hidden_size"] is None or layer["num_heads"] is None:
                raise ConfigError(
                    "rope_theta alone must stand beside the width of a head (head_dim, or hidden_size and num_heads), "
                    "got no such sizes; a rope without sizes has the canonical form, RopeSpec.to_dict()"
                )
            head_dim = head_width(layer["hidden_size"], layer["num_heads"])
        if isinstance(head_dim, int) and head_dim % 2:
            raise RopeConfigError(f"head_dim must be even where the whole head rotates, got {head_dim}")
        return RopeSpec(
            variant="default",
            theta=self.theta,
            head_dim=head_dim,
            rotary_dim=head_dim,
            interleaved=False,
            max_position=UNBOUNDED,
            original_max_position=None,
            parameters={},
        )


def read_rope(value: Any) -> RopeSpec | ShortRope | None:
    """Read a rope in any of the forms.

    Raises:
        ConfigError: it is not a mapping.
        RopeConfigError: it has none of the forms, or a fault of the one that it has.
    """
    if value is None or isinstance(value, RopeSpec):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping or null, got {type(value).__name__}")
    if not value:
        raise RopeConfigError(
            "must be null for no rotation, or a mapping with rope_theta or one of the full forms, got an empty mapping"
        )
    if "rope_theta" in value and not any(name in value for name in _FULL):
        further = [name for name in value if name != "rope_theta"]
        if further:
            raise RopeConfigError(
                "rope_theta alone is the short form (variant default, the whole head rotates, halves in pairs) and "
                f"must stand alone, got also {listed(further)}; whatever else is to be said needs the canonical form "
                f"(schema_version: {RopeSpec.SCHEMA_VERSION}, variant, theta, ...: RopeSpec.to_dict()) or the "
                "transformers form (model_type, head_dim, max_position_embeddings, rope_parameters: RopeSpec.to_hf())"
            )
        theta = value["rope_theta"]
        if not is_float32(theta) or theta <= 1:
            raise RopeConfigError(f"rope_theta must be a finite float32 number greater than 1, got {shown(theta)}")
        return ShortRope(theta)
    if "schema_version" in value:
        return RopeSpec.from_dict(dict(value))
    canonical = [name for name in CANONICAL_ONLY if name in value and "model_type" not in value]
    if canonical:
        raise RopeConfigError(
            f"schema_version is missing beside {listed(canonical)}, got the keys {listed(value)}; "
            f"the canonical form says schema_version: {RopeSpec.SCHEMA_VERSION}, and the transformers form, which has "
            "none, has rope_type and rope_theta in rope_parameters instead"
        )
    config = dict(value)
    return RopeSpec.from_hf(config, convention=config.pop("convention", "serving"))
