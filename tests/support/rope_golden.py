"""The recorded rotary numbers of other packages: specs, arrays and samples of each case."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import torch

from polyattn import RopeSpec, rope_variants
from polyattn.rope import RopeFrequencies

DATA = Path(__file__).parents[1] / "data" / "rope"
CASES = sorted({path.stem for path in DATA.glob("*.json")} - {"configs", "legacy_bf16"})
MULTI_AXIS = [name for name in CASES if name.startswith("mrope")]
#: Where SGLang does not honour what the dictionary says, so that another package is the model.
NOT_SGLANG = {
    "yarn_f4_o8192_d64_b10000_attnfactor125": "tf",
    "longrope_d64_o8192_m32768_attnfactor": "tf",
    "proportional_d128_p025_f8_b1000000": "tf",
}
#: torch's cos and sin have these bits on such CPUs only.
SAME_BITS = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}

_VARIANTS = {"dynamic_alpha": "dynamic", "mrope": "default", "mrope_yarn": "yarn"}
_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "short_mscale", "long_mscale"),
    "proportional": ("partial_rotary_factor", "factor"),
}
_LAYOUTS = {"chunked": "contiguous", "interleaved": "interleaved", "glm": "glm", "ernie": "ernie", "bailing": "ernie"}


class Case:
    """One recorded case."""

    def __init__(self, name):
        self.name = name
        self.about = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        self.params = self.about["params"]
        self.model = NOT_SGLANG.get(name, "sg")
        with np.load(DATA / f"{name}.npz") as stored:
            self._stored = dict(stored)

    def __contains__(self, array):
        return array in self.about["arrays"]

    def __getitem__(self, array):
        return torch.from_numpy(self._stored[self.about["arrays"][array]["key"]])

    def ours(self, what):
        """The array of the package that is the model."""
        return self[f"{self.model}.{what}"]

    def spec(self, *, interleaved=False, **parameters):
        given = self.params
        variant = _VARIANTS.get(given["rope_type"], given["rope_type"])
        parameters |= {key: given[key] for key in _PARAMETERS[variant] if key in given}
        if variant == "longrope":
            parameters.setdefault("switch", "length")
        axes = None
        if "mrope_section" in given:
            layout, sections = given["mrope_layout"].split()[0].rstrip(":"), given["mrope_section"]
            if layout == "ernie":  # listed as height, width, time
                sections = [sections[-1], *sections[:-1]]
            axes = {"sections": sections, "layout": _LAYOUTS[layout]}
        return RopeSpec(
            variant=variant,
            theta=given["base"],
            head_dim=given["head_dim"],
            rotary_dim=given["head_dim"] if variant == "proportional" else given["rotary_dim"],
            interleaved=interleaved,
            max_position=given["max_position"],
            original_max_position=given.get("original_max_position"),
            parameters=parameters,
            axes=axes,
        )

    @property
    def sides(self):
        """Suffix of the arrays and length of the sequence, for each set of frequencies that the case has."""
        if self.params["rope_type"] != "longrope":
            return {"": None}
        original = self.params["original_max_position"]
        return {"_short": original, "_long": original + 1}

    @contextlib.contextmanager
    def recorded_frequencies(self):
        """Within it the variant of the case returns the recorded frequencies, bit for bit."""
        rule = rope_variants.get(self.spec().variant)
        stored = {length: self.inv_freq(side) for side, length in self.sides.items()}

        class Recorded:
            name, api_version = rule.name, rule.api_version
            validate = staticmethod(rule.validate)

            def __getattr__(self, name):
                return getattr(rule, name)

            def frequencies(self, spec, *, device, length=None):
                real = rule.frequencies(spec, device=device, length=length)
                return RopeFrequencies(stored[length], real.attention_scaling, real.position_scaling)

        with rope_variants.override(rule.name, Recorded()):
            yield

    def inv_freq(self, side=""):
        name = f"{self.model}.inv_freq{side}"
        return self[name if name in self else f"{name}_unscaled"]

    def table_positions(self, side=""):
        return torch.tensor([self.about["tables"][f"{self.model}.cos{side}"]["positions"]])

    def sample_positions(self, side=""):
        return torch.tensor(self.about["sample"][f"positions{side}"])

    def q(self, dtype="f32"):
        return _inputs(f"q_D{self.params['head_dim']}_{dtype}")

    def k(self, dtype="f32"):
        return _inputs(f"k_D{self.params['head_dim']}_{dtype}")


def _inputs(key):
    with np.load(DATA / "inputs.npz") as stored:
        found = torch.from_numpy(stored[key])
    return found.bfloat16() if key.endswith("bf16") else found


def ulps(got, want):
    """The largest distance in units in the last place."""
    return (got.view(torch.int32).long() - want.view(torch.int32).long()).abs().max().item()
