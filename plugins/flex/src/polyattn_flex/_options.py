"""What can be configured about FlexAttention."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping

from polyattn import ConfigError

_TILES = {"BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"}
_TUNING = _TILES | {"num_warps", "num_stages", "PRESCALE_QK", "WRITE_DQ", "USE_TMA"}


@dataclasses.dataclass(frozen=True)
class FlexOptions:
    """Options of the backend ``flex_attention``.

    Attributes:
        compiled: run the compiled kernel. False evaluates the same functions densely: slow and in memory quadratic in
            the length, but with LSE and gradients on the CPU too.
        decode: run the decode kernel, which splits the keys among programs; CUDA, fewer than 128 queries.
        dynamic: compile for all lengths at once, not for each: two or three kernels serve data of any lengths. On two
            CPU cores they take 1.0 to 1.1 times the time of a kernel made for one length, and up to 2 times under a
            window of 128. Where an outer ``torch.compile`` takes the kernel in, on CUDA, that one decides.
        compile_limit: how many kernels may be compiled in the process, one for each set of sizes, dtypes, strides and
            constants; beyond it a call raises.
        kernel_options: tuning of the CUDA kernels, as ``kernel_options`` of torch's ``flex_attention`` names it, with
            an optional prefix ``fwd_`` or ``bwd_``. What decides *which* kernel runs or what it may assume about the
            mask is not among them: the backend says that itself.
    """

    compiled: bool = True
    decode: bool = False
    dynamic: bool = False
    compile_limit: int = 256
    kernel_options: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        problems = []
        if self.compile_limit < 1:
            problems.append(f"compile_limit must be at least 1, got {self.compile_limit}")
        names = {name: str(name).removeprefix("fwd_").removeprefix("bwd_") for name in self.kernel_options}
        foreign = [name for name, plain in names.items() if plain not in _TUNING]
        if foreign:
            problems.append(
                f"kernel_options must be among {', '.join(sorted(_TUNING))}, got {', '.join(map(str, foreign))}"
            )
        wrong = [
            f"{name}={reprlib.repr(value)[:80]}"
            for name, value in self.kernel_options.items()
            if not isinstance(value, int)
        ]
        if wrong:
            problems.append(f"kernel_options must be integers or booleans, got {', '.join(wrong)}")
        if not self.compiled and (self.decode or self.dynamic or self.kernel_options):
            need = "decode, dynamic and kernel_options are about a compiled kernel"
            problems.append(f"{need}, got compiled=False; leave them out")
        if problems:
            raise ConfigError(f"options of backend 'flex_attention': {'; '.join(problems)}")
        object.__setattr__(self, "kernel_options", dict(self.kernel_options))
