"""Every causal language model class of transformers on the bridge, beside transformers' own eager attention.

A class is built from a tiny configuration with weights large enough for attention to matter, and asked for a padded
batch, packed documents and a few tokens from a cache. What comes out is one :class:`Outcome` a case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import polyattn_transformers
from polyattn import PolyattnError
from tiny_configs import tiny_config

CLASSES = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower))
TOKENS = 12
#: Their patches pool padding on the left into tokens, with transformers' eager attention too.
NO_LEFT_PADDING = frozenset({"BltForCausalLM"})
STEPS = (9, 1, 1, 1)  # a prompt, then token by token
LENGTHS = (4, 8)  # documents; the second is longer than every window, and no border is one of a chunk
BOUND = 1e-4  # of the largest logit: rounding in single precision, a hundred times less than any mistake

_BORDERS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
_DOCUMENTS = torch.tensor([[index for index, length in enumerate(LENGTHS) for _ in range(length)]])
_POSITIONS = torch.tensor([[position for length in LENGTHS for position in range(length)]])
#: How a caller may say where documents lie.
DESCRIPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "packed": lambda: polyattn_transformers.packed(LENGTHS),
    "positions": lambda: {"position_ids": _POSITIONS},
    "positions and a mask of ones": lambda: {
        "position_ids": _POSITIONS,
        "attention_mask": torch.ones(1, TOKENS).long(),
    },
    "positions and segment_ids": lambda: {"position_ids": _POSITIONS, "segment_ids": _DOCUMENTS},
    "positions and cu_seq_lens": lambda: {
        "position_ids": _POSITIONS,
        "cu_seq_lens_q": _BORDERS,
        "cu_seq_lens_k": _BORDERS,
    },
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        verdict: "equal", "refused", "none" (the model has no such case), or a failure: "WRONG" or "CRASH".
        text: the reason of all but "equal".
        error: the largest difference of a logit, relative to the largest logit.
    """

    verdict: str
    text: str = ""
    error: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this must not happen."""
        return self.verdict.isupper()


class Unbuildable(Exception):  # noqa: N818 (no fault, a fact)
    """No tiny model of this class can be built, or it does not run by itself, whatever the attention."""


def tiny_model(name: str, implementation: str) -> Any:
    """A model of the class ``name`` in evaluation mode, with weights as they are initialised."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind._from_config(tiny_config(kind.config_class), attn_implementation=implementation).eval()


@torch.no_grad()
def sweep(name: str, backend: str = "auto", options: dict[str, Any] | None = None) -> dict[str, Outcome]:
    """The outcomes of a class on a backend, by case: ``configured``, ``padded``, those of ``DESCRIPTIONS``, ``cache``.

    Raises:
        Unbuildable: there is nothing to compare with; says why.
    """
    model, made = _built(name), _answer(lambda: _made(name, backend))
    wanted = None if made.verdict == "refused" else _References.of(model)
    switched = _answer(lambda: polyattn_transformers.use(model, backend, options))
    if made.verdict != switched.verdict:
        answers = f"made on it: {made.verdict} {made.text}; switched to it: {switched.verdict} {switched.text}"
        return {"configured": Outcome("CRASH", answers)}
    if wanted is None or switched.verdict != "equal":
        return {"configured": made}
    with _counted(model) as calls:
        outcomes = {"configured": made, "padded": _outcome(lambda: _padded(model), wanted.padded)}
    if outcomes["padded"].verdict == "equal" and not calls:
        return {"configured": Outcome("CRASH", "accepted, but no layer of it asked the backend for attention")}
    for title, description in DESCRIPTIONS.items():
        described = functools.partial(_packed, model, description)
        outcomes[title] = _outcome(described, wanted.alone)
    outcomes["cache"] = _cached(model, wanted)
    return outcomes


@dataclasses.dataclass(frozen=True)
class _References:
    """Logits of transformers' eager attention: of a padded batch, each document alone, a whole text and its steps."""

    padded: Tensor
    alone: Tensor
    whole: Tensor | None
    stepped: Tensor | None

    @classmethod
    def of(cls, model: Any) -> _References:
        try:
            cached = hasattr(model(input_ids=_ids(), use_cache=True), "past_key_values")
            return cls(
                padded=_padded(model),
                alone=torch.cat([model(input_ids=part).logits for part in _ids()[:1].split(LENGTHS, 1)], 1),
                whole=_stepped(model, [TOKENS]) if cached else None,
                stepped=_stepped(model, STEPS) if cached else None,
            )
        except Exception as fault:
            raise Unbuildable(f"it does not run by itself: {_line(fault)}") from fault


def _built(name: str) -> Any:
    """A model on transformers' eager attention, whose weights are large enough for attention to matter."""
    try:
        model = tiny_model(name, "eager")
    except Exception as fault:
        raise Unbuildable(f"no tiny model of it can be built here: {_line(fault)}") from fault
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.3) if parameter.dim() > 1 else parameter.add_(noise * 0.1)
    return model


def _made(name: str, backend: str) -> None:
    with torch.device("meta"):
        tiny_model(name, f"polyattn_{backend}")


@contextlib.contextmanager
def _counted(model: Any) -> Iterator[list[nn.Module]]:
    """The layers that ask the model's implementation for attention."""
    implementation, calls = model.config._attn_implementation, []
    attend = ALL_ATTENTION_FUNCTIONS[implementation]

    def counted(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        calls.append(module)
        return attend(module, *arguments, **keywords)

    AttentionInterface.register(implementation, counted)
    try:
        yield calls
    finally:
        AttentionInterface.register(implementation, attend)


def _ids() -> Tensor:
    return torch.randint(10, 90, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def _live(model: Any, left: int) -> Tensor:
    live = torch.ones(2, TOKENS, dtype=torch.long)
    live[0, : 0 if type(model).__name__ in NO_LEFT_PADDING else left] = 0
    return live


def _padded(model: Any) -> Tensor:
    """Logits of the tokens of a batch with padding on the left and on the right."""
    live = _live(model, 4)
    live[1, 9:] = 0
    return model(input_ids=_ids(), attention_mask=live).logits[live.bool()]


def _packed(model: Any, description: Callable[[], dict[str, Any]]) -> Tensor:
    return model(input_ids=_ids()[:1], **description()).logits


def _stepped(model: Any, steps: Sequence[int]) -> Tensor:
    """Logits of the tokens of a left-padded batch, in steps with a cache."""
    live = _live(model, 3)
    positions = (live.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    parts, cache, start = [], None, 0
    for stop in itertools.accumulate(steps):
        inputs = {"input_ids": _ids()[:, start:stop], "attention_mask": live[:, :stop]}
        inputs |= {"position_ids": positions[:, start:stop]} if takes_positions else {}
        out = model(**inputs, past_key_values=cache, use_cache=stop > start and len(steps) > 1)
        parts.append(out.logits)
        cache, start = getattr(out, "past_key_values", None), stop
    return torch.cat(parts, 1)[live.bool()]


def _cached(model: Any, wanted: _References) -> Outcome:
    if wanted.whole is None or wanted.stepped is None:
        return Outcome("none", "the class has no cache that a caller can pass on")
    found = _outcome(lambda: _stepped(model, STEPS), wanted.whole)
    if found.verdict == "WRONG" and _outcome(lambda: wanted.stepped, wanted.whole).verdict == "WRONG":
        found = _outcome(lambda: _stepped(model, STEPS), wanted.stepped)
        text = "as transformers' eager attention, whose steps differ from its own forward"
        return dataclasses.replace(found, text=found.text or text)
    return found


def _answer(configure: Callable[[], object]) -> Outcome:
    try:
        configure()
    except PolyattnError as refusal:
        return Outcome("refused", _line(refusal))
    except Exception as fault:  # noqa: BLE001 (any other is what the sweep looks for)
        return Outcome("CRASH", _fault(fault))
    return Outcome("equal")


def _outcome(run: Callable[[], Tensor], wanted: Tensor) -> Outcome:
    got: list[Tensor] = []
    answer = _answer(lambda: got.append(run()))
    if not got:
        return answer
    error = float((got[0] - wanted).abs().max() / (1 + wanted.abs().max()))
    return Outcome("equal", error=error) if error <= BOUND else Outcome("WRONG", f"off by {error:.2g}", error)


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())


def _fault(fault: Exception) -> str:
    place = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{type(fault).__name__} in {place.name}: {_line(fault)}"
