"""One YAML file for one run.

What concerns attention (``attn_backend``, ``rope``, ...) is polyattn's to read and check; the rest is read here, as
strictly: an unknown key, a wrong type or a value out of range is an error that names the key, and one error lists all.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polyattn import AttentionConfig, ConfigError, PolyattnError, read_yaml

Section = TypeVar("Section")
LARGEST = 2**31  # what a size or a count stays below unless a smaller bound is given


def setting(*, least: float, below: float = LARGEST, default: Any = dataclasses.MISSING) -> Any:
    """A number of a section, with the range that it must lie in."""
    return dataclasses.field(default=default, metadata={"least": least, "below": below})


def choice(*choices: str) -> Any:
    """One of a few words, the first one by default."""
    return dataclasses.field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder."""

    layers: int = setting(least=1)
    hidden_size: int = setting(least=1)
    num_heads: int = setting(least=1)
    num_kv_heads: int = setting(least=1)
    head_dim: int = setting(least=1)
    mlp_size: int = setting(least=1)
    dropout: float = setting(least=0.0, below=1.0, default=0.0)


@dataclass(frozen=True)
class DataConfig:
    """Shape of a batch: ``rows`` rows of ``row_length`` bytes."""

    rows: int = setting(least=1)
    row_length: int = setting(least=2)


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with a linear warm-up over ``warmup`` steps and the gradient norm clipped at ``clip``."""

    learning_rate: float = setting(least=0.0)
    weight_decay: float = setting(least=0.0, default=0.0)
    warmup: int = setting(least=1, default=1)
    clip: float = setting(least=1e-6, default=1.0)


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run; under ``autocast`` weights stay FP32 and layers compute in that dtype."""

    attention: AttentionConfig
    model: ModelConfig
    data: DataConfig
    optimiser: OptimiserConfig
    steps: int = setting(least=1)
    seed: int = setting(least=0, below=2**63, default=0)
    checkpoint_every: int = setting(least=1, default=50)
    device: str = choice("cpu", "cuda")
    autocast: str = choice("off", "bfloat16", "float16")


def load(path: Path, *, attn_backend: str | None = None, steps: int | None = None) -> RunConfig:
    """Read a run from a YAML file; what is given beside the path replaces what the file says.

    Raises:
        ConfigError: the file is missing, does not hold a YAML mapping, or says something that cannot be run.
    """
    content = read_yaml(path)
    given = {"attn_backend": attn_backend, "steps": steps}
    content |= {key: value for key, value in given.items() if value is not None}

    shared = {field.name for field in dataclasses.fields(ModelConfig)}
    attention_keys = [field.name for field in dataclasses.fields(AttentionConfig) if field.init]
    attention_keys = [name for name in attention_keys if name not in shared]
    attention = {key: content.pop(key) for key in attention_keys if key in content}
    build = functools.partial(_attention, attention, content.get("model"))
    return _section(RunConfig, content, "", attention_keys, attention=build)


def _attention(own: dict[str, Any], model: object) -> AttentionConfig:
    """The attention config, with what it needs of the section ``model`` unless something is wrong with that."""
    try:
        sizes = dataclasses.asdict(_section(ModelConfig, model, ""))
    except ConfigError:
        return AttentionConfig.from_dict(own)
    layers, _ = sizes.pop("layers"), sizes.pop("mlp_size")
    attention = AttentionConfig.from_dict(own | sizes)
    width = sizes["hidden_size"]
    problems = [
        f"groups[{index}].hidden_size must be that of the model, {width}, got {_shown(group['hidden_size'])}; "
        "leave it out"
        for index, group in enumerate(own.get("groups", ()))
        if group.get("hidden_size", width) != width
    ]
    try:
        attention.check_layers(layers)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return attention


def _section(
    kind: type[Section], content: Any, where: str, also_known: Sequence[str] = (), **built: Callable[[], Any]
) -> Section:
    """Build a dataclass from a mapping; ``built`` makes the fields that do not stand in the mapping."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in built}  # type: ignore[arg-type]
    if not isinstance(content, dict):
        raise ConfigError(f"{where.rstrip('.')} must be a mapping of {', '.join(fields)}, got {_shown(content)}")
    known = [*also_known, *fields]
    problems = [f"{where}{key} is unknown{_closest(key, known)}" for key in content if key not in fields]
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for name, field in fields.items():
        if name not in content:
            if field.default is dataclasses.MISSING:
                problems.append(f"{where}{name} is missing")
        elif dataclasses.is_dataclass(hints[name]):
            section = typing.cast("type[Any]", hints[name])
            built[name] = functools.partial(_section, section, content[name], f"{where}{name}.")
        else:
            values[name] = content[name]
            problems += _wrong(f"{where}{name}", content[name], hints[name], **field.metadata)
    for name, build in built.items():
        try:
            values[name] = build()
        except PolyattnError as error:
            faults = error.faults if isinstance(error, ConfigError) else ()
            problems += map(str, faults or (error,))
    if problems:
        raise ConfigError("; ".join(problems))
    return kind(**values)


def _closest(key: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(key), known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _wrong(
    name: str,
    value: object,
    kind: type,
    *,
    least: float = -math.inf,
    below: float = LARGEST,
    choices: Sequence[str] = (),
) -> list[str]:
    if choices:
        return [] if value in choices else [f"{name} must be one of {', '.join(choices)}, got {_shown(value)}"]
    what = "a whole number" if kind is int else "a number"
    accepted = int if kind is int else (int, float)
    beyond = isinstance(value, accepted) and value >= below
    upper = f" and below {below}" if below < LARGEST or beyond else ""
    if isinstance(value, accepted) and not isinstance(value, bool) and least <= value < below:
        return []
    hint = ""
    if isinstance(value, str) and "e" in value.lower():
        hint = "; write 1.0e-3 or 1.0e+3, since YAML reads 1e-3 and 1.0e3 as text"
    return [f"{name} must be {what} of at least {least:g}{upper}, got {_shown(value)}{hint}"]


def _shown(value: object) -> str:
    """A value from the file, short however much it contains."""
    return reprlib.repr(value)[:200]
