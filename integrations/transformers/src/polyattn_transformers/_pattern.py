"""Reading the mask functions of transformers.

transformers describes a mask by a closure ``(batch, head, query, key) -> Bool`` over absolute indices, put together by
the factories of ``masking_utils``. A closure of a known factory is recognised by its code object, and its parameters
are read from its cells; every other function stays a function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

MaskFunction = Callable[..., Any]
Term = tuple[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """What a mask function says; every condition that is given must hold.

    Attributes:
        function: the whole mask function.
        causal: a query sees no later key, except those of its own block.
        window: ``|q - k| < window``.
        chunk: size of the chunks, and ``Int[B]``, where the first chunk of each row starts.
        valid: ``Bool[B, K]`` tensors over absolute key indices.
        documents: ``Int[B, L]`` over absolute indices; query and key must be of one document.
        blocks: ``Int[B, L]`` over absolute indices; tokens with one number >= 0 see each other. Comes with ``causal``.
        opaque: functions that are not recognised.
        refusal: why no layer can attend by this; models make masks for kinds of layers that they do not have.
    """

    function: MaskFunction
    causal: bool = False
    window: int | None = None
    chunk: tuple[int, Tensor] | None = None
    valid: tuple[Tensor, ...] = ()
    documents: Tensor | None = None
    blocks: Tensor | None = None
    opaque: tuple[MaskFunction, ...] = ()
    refusal: str | None = None

    def given(self) -> frozenset[str]:
        """The conditions that are there, by name."""
        fields = (field for field in dataclasses.fields(self) if field.name not in {"function", "refusal"})
        return frozenset(field.name for field in fields if getattr(self, field.name) is not field.default)

    @classmethod
    def unread(cls, function: MaskFunction) -> Pattern:
        """The pattern that says no more than the function itself."""
        return cls(function, opaque=(function,))


def read_pattern(function: MaskFunction) -> Pattern:
    """Take a mask function apart as far as it is made of transformers' own factories."""
    terms = list(_terms(function))
    found: dict[str, list[Any]] = {}
    for kind, value in terms:
        found.setdefault(kind, []).append(value)
    if "refusal" in found:
        return Pattern(function, refusal=found["refusal"][0])
    causal = "causal" in found
    windows = found.get("within", [])
    # The causal window is one-sided: only together with the causal rule is it a rule about distance.
    if "behind" in found:
        if not causal:
            return Pattern.unread(function)
        windows = windows + found["behind"]
    if any(len(found.get(kind, ())) > 1 for kind in ("chunk", "documents", "blocks")):
        return Pattern.unread(function)
    if "blocks" in found and (windows or "chunk" in found):
        return Pattern.unread(function)
    return Pattern(
        function,
        causal=causal,
        window=min(windows) if windows else None,
        chunk=found.get("chunk", [None])[0],
        valid=tuple(found.get("valid", ())),
        documents=found.get("documents", [None])[0],
        blocks=found.get("blocks", [None])[0],
        opaque=tuple(found.get("opaque", ())),
    )


def _terms(function: MaskFunction) -> Iterator[Term]:
    """The conditions whose conjunction ``function`` is."""
    if function is hf.causal_mask_function:
        yield "causal", True
        return
    if function is hf.bidirectional_mask_function:
        return
    code = getattr(function, "__code__", None)
    if code is _AND:
        for part in _cells(function)["mask_functions"]:
            yield from _terms(part)
    elif code is _OR:
        yield from _union(function)
    else:
        yield _leaf(function, code) or ("opaque", function)


def _leaf(function: MaskFunction, code: CodeType | None) -> Term | None:
    for known, read in _LEAVES:
        if code is known:
            return read(_cells(function))
    return None


def _union(function: MaskFunction) -> Iterator[Term]:
    """``causal | same block`` is a causal rule over blocks; no other union is structured."""
    parts = _cells(function)["mask_functions"]
    if len(parts) == 2 and getattr(parts[1], "__code__", None) is _BLOCKS:
        terms = list(_terms(parts[0]))
        kinds = [kind for kind, _ in terms]
        if "causal" in kinds and all(kind in ("causal", "documents") for kind in kinds):
            yield from terms
            yield "blocks", _cells(parts[1])["block_sequence_ids"]
            return
    yield "opaque", function


def _cells(function: MaskFunction) -> dict[str, Any]:
    closure: Any = function.__closure__
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}


def _behind(cells: dict[str, Any]) -> Term | None:
    return _sized("behind", "sliding_window", cells["sliding_window"], 1)


def _within(cells: dict[str, Any]) -> Term | None:
    # Inclusive: distance <= size.
    return _sized("within", "sliding_window", cells["sliding_window"], 0, lambda size: size + 1)


def _chunk(cells: dict[str, Any]) -> Term | None:
    start = cells["left_padding"]
    return _sized("chunk", "attention_chunk_size", cells["chunk_size"], 1, lambda size: (size, start))


def _sized(
    kind: str, name: str, size: object, least: int, meant: Callable[[int], Any] = lambda size: size
) -> Term | None:
    """A window or chunk of the model's configuration; ``None`` if its size is not a number known here."""
    if not isinstance(size, int):
        return None
    if size < least:
        return "refusal", (
            f"{name} must be at least {least}, or None where nothing is cut off, got {size} in the model's config, "
            f"which would leave no key to see; set config.{name} = None"
        )
    return kind, meant(size)


def _code(factory: Callable[..., Any], *arguments: Any) -> CodeType:
    """The code object that every function made by ``factory`` shares."""
    code: CodeType = factory(*arguments).__code__
    return code


_NONE = torch.zeros(0, dtype=torch.int64)
_AND = _code(hf.and_masks, hf.causal_mask_function)
_OR = _code(hf.or_masks, hf.causal_mask_function)
_BLOCKS = _code(hf.blockwise_overlay, _NONE)
# Pairs and no dict: torch.compile cannot guard an entry whose key is a code object.
_LEAVES: tuple[tuple[CodeType, Callable[[dict[str, Any]], Term | None]], ...] = (
    (_code(hf.sliding_window_overlay, 1), _behind),
    (_code(hf.sliding_window_bidirectional_overlay, 1), _within),
    (_code(hf.chunked_overlay, 1, _NONE), _chunk),
    (_code(hf.padding_mask_function, _NONE), lambda cells: ("valid", cells["padding_mask"])),
    (_code(hf.packed_sequence_mask_function, _NONE), lambda cells: ("documents", cells["packed_sequence_mask"])),
)
