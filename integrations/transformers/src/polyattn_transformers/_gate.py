"""The one place that knows the documents of a forward, before its first layer runs.

However documents are described, here they become one :class:`PackedMask` in the place of the ``attention_mask``, with
positions that restart; or they are refused, because something in the model would not keep them apart. The gate stands
in front of every model of transformers: what says outright where documents lie is read at the outermost one, since
that may hand nothing down; position ids, which are evidence only, are read where the masks of the layers are made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from polyattn import LayoutError
from polyattn.documents import ranks
from polyattn_transformers import _documents
from polyattn_transformers._backends import PREFIX
from polyattn_transformers._documents import SEGMENTS, readable
from polyattn_transformers._inputs import check_mask, check_positions
from polyattn_transformers._packing import PackedMask, check_size
from polyattn_transformers._parts import Parts, polyattn_parts
from polyattn_transformers._tree_mask import TreeMask

Arguments = dict[str, Any]

#: What a model that derives positions from pictures gets beside its text.
_PICTURES = ("pixel_values", "image_", "video_", "audio_", "input_features", "second_per_grid")


def install() -> None:
    """Put the gate in front of every model of transformers; what runs on another implementation passes as it is."""
    # A method, since Dynamo of torch 2.10 hands a module to no function whose result is a constant.
    PreTrainedModel.polyattn_parts = polyattn_parts  # type: ignore[attr-defined]
    PreTrainedModel.__call__ = _gated  # type: ignore[method-assign]


def _gated(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if _runs_here(self):
        parts: Parts = self.polyattn_parts(id(self))  # type: ignore[operator]
        given = dict(zip(parts.names, args, strict=False)) | kwargs
        if _admit(self, parts, given):
            output = nn.Module.__call__(self, **given)
            _mark(given.get("past_key_values"), getattr(output, "past_key_values", None))
            return output
    return nn.Module.__call__(self, *args, **kwargs)


def _runs_here(model: PreTrainedModel) -> bool:
    """Whether the tokens of a text go to attention of polyattn, here or in a part with its own configuration."""
    if _is_ours(model.config):
        return True
    return bool(model.config.sub_configs) and any(map(_is_ours, model.polyattn_parts(id(model)).configs))  # type: ignore[operator]


def _is_ours(config: PretrainedConfig) -> bool:
    implementation = getattr(config, "_attn_implementation", None)
    return isinstance(implementation, str) and implementation.startswith(PREFIX)


def _mark(*caches: Any) -> None:
    """Note on a cache that it holds documents and does not know where they lie."""
    for cache in caches:
        if hasattr(cache, "get_seq_length") and not torch.compiler.is_compiling():
            cache.polyattn_packed = True


def _admit(model: PreTrainedModel, parts: Parts, given: Arguments) -> bool:
    """Whether a call has documents; if so, ``given`` says it in the one form that layers read.

    Raises:
        LayoutError: descriptions that are wrong or contradict each other, or documents that the model mixes.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    words = {name: given.get(name) for name in SEGMENTS}
    named = [name for name, value in words.items() if value is not None]
    size = _size(given)
    if size is None:
        return False
    if getattr(given.get("past_key_values"), "polyattn_packed", False) and _earlier(given["past_key_values"]):
        raise LayoutError(
            "past_key_values must not hold packed documents, since nobody knows to which document a cached key "
            "belongs; run each document alone to decode from it"
        )
    if mask is None and positions is None and not named:
        return False
    check_mask(mask)
    batch, length = size
    if isinstance(mask, PackedMask):
        check_size(mask, batch, length, length)
        if isinstance(mask, TreeMask):
            mask.check(type(model).__name__, parts, given, named)
    check_positions(positions, batch, length, axes=parts.takes_axes)
    ahead = not (mask is None or isinstance(mask, (Tensor, PackedMask)))
    if ahead or (isinstance(mask, Tensor) and mask.dim() == 4):
        if named:
            form = "made ahead" if ahead else "[B, 1, Q, K]"
            raise LayoutError(f"attention_mask {form} and {', '.join(named)} both say who sees whom; give one of them")
        return False
    live, numbers = _documents.from_mask(mask, length) if isinstance(mask, Tensor) else (None, None)
    said: list[tuple[str, Tensor]] = []
    if isinstance(mask, PackedMask):
        said.append((mask.name, mask.documents))
        live = mask.live
    if (found := _documents.explicit(words, batch, length, length)) is not None:
        said.append(found[:2])
    if numbers is not None:
        said.append(("attention_mask", numbers))
    if said and not isinstance(mask, PackedMask):
        _documents.check_whole(*said[0], live)
        mask = PackedMask(said[0][1], live, name=said[0][0])
    evidence = _evidence(model, parts, given, mask, live, size)
    if evidence is not None:
        said.append(("position_ids", evidence))
    for name, documents in said[1:]:
        _documents.check_agree((said[0][0], name), said[0][1], documents, live)
    if not said:
        return False
    if not isinstance(mask, PackedMask):
        mask = PackedMask(said[0][1], live, name=said[0][0])  # said by the positions alone
    if parts.makes_masks:
        _refuse_what_mixes(type(model).__name__, parts, given, mask)
    elif parts.joins_two:
        _refuse(type(model).__name__, _CROSS)
    for name in named:
        del given[name]
    given["attention_mask"] = mask
    _number(type(model).__name__, parts, given, mask)
    return True


def _size(given: Arguments) -> tuple[int, int] | None:
    """Rows and tokens of a call that gets text."""
    for name, rank in (("input_ids", 2), ("inputs_embeds", 3)):
        tokens = given.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() == rank:
            return tokens.shape[0], tokens.shape[1]
    return None


def _evidence(
    model: PreTrainedModel,
    parts: Parts,
    given: Arguments,
    known: Tensor | PackedMask | None,
    live: Tensor | None,
    size: tuple[int, int],
) -> Tensor | None:
    """The documents ``Int[B, Q]`` that position ids describe; ``None`` where they describe none, or are read later.

    Those that documents known already have describe nothing more.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    batch, length = size
    if positions is None or (isinstance(known, PackedMask) and positions.dim() == 2 and known.has_positions(positions)):
        return None
    text = positions[0] if positions.dim() == 3 and positions.shape[0] == 4 else positions
    if text.dim() != 2 or length == 1 or not (parts.makes_masks or "position_ids" not in parts.names):
        return None
    cache = given.get("past_key_values")
    earlier = _earlier(cache)
    if not readable(text) and earlier != 0:
        return None
    use_cache = given.get("use_cache")
    use_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if mask is None and cache is None and not use_cache:
        # Nothing but the positions describes this forward: transformers starts a document at every jump.
        found = find_packed_sequence_indices(text.expand(batch, -1))
    else:
        found = _documents.from_positions(text, live, batch)
    if found is None:
        return None
    if not readable(text) and _mixing(parts, given):
        # Nobody knows yet whether there are documents, so the check goes into the graph.
        alone = (found == found[:, :1]).all()
        torch._assert_async(alone, "position_ids restart in a model that mixes packed documents")  # noqa: SLF001
        return None
    if earlier:
        raise LayoutError(
            f"position_ids describe several documents, but {earlier} tokens are cached, and nobody knows to which "
            "document a cached key belongs; pack into a forward without earlier tokens"
        )
    return found


def _earlier(cache: Any) -> int | None:
    """How many tokens a cache holds; ``None`` where nobody may look."""
    if cache is None:
        return 0
    count = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
    if isinstance(count, Tensor):
        return int(count) if readable(count) else None
    return count


_CROSS = "its cross attention does not know to which document a token of the encoder belongs"


def _mixing(parts: Parts, given: Arguments) -> str | None:
    """Why a model would mix packed documents, or give them other positions than each has alone."""
    if parts.mixers:
        more = f" and {len(parts.mixers) - 3} more" if len(parts.mixers) > 3 else ""
        return (
            "these layers hand something from token to token without asking for documents: "
            f"{', '.join(parts.mixers[:3])}{more}"
        )
    if given.get("encoder_hidden_states") is not None or parts.joins_two:
        return _CROSS
    if not (parts.takes_positions or parts.relative):
        return "it numbers the tokens of a row itself and takes no position_ids, so only the first would start at 0"
    return None


def _refuse_what_mixes(model: str, parts: Parts, given: Arguments, mask: PackedMask) -> None:
    if (reason := _mixing(parts, given)) is not None:
        _refuse(model, reason)
    if parts.relative:
        _documents.check_together(mask.name, mask.documents, mask.live)
    length = mask.shape[1]
    if parts.scales_from is not None and length >= parts.scales_from:
        _refuse(
            model,
            f"it scales queries by the place of a token in the row from {parts.scales_from} tokens on, and a row has "
            f"{length}",
        )
    if parts.turns and readable(mask.documents):
        lengths = mask.lengths()
        for length, always in parts.turns:
            if lengths[-1] > length and lengths[0] < lengths[-1] and (always or lengths[0] <= length):
                _refuse(
                    model,
                    f"its rotation changes for all tokens of a forward when one document is longer than {length}, and "
                    f"these have {lengths[0]} to {lengths[-1]} tokens",
                )


def _refuse(model: str, reason: str) -> None:
    raise LayoutError(
        f"{model} cannot keep packed documents apart: {reason}; give each document a row of its own, with padding"
    )


def _number(model: str, parts: Parts, given: Arguments, mask: PackedMask) -> None:
    """Give every document the positions that it has alone, unless the caller gave positions."""
    positions = given.get("position_ids")
    if not parts.takes_positions:
        return
    if positions is None:
        if parts.several_axes and any(
            key.startswith(_PICTURES) for key, value in given.items() if isinstance(value, Tensor)
        ):
            raise LayoutError(
                f"position_ids must be given beside packed documents with pictures or sound, got None; {model} derives "
                "positions of several axes from a whole row, so make them for each document alone and join them"
            )
        positions = mask.positions
    if parts.makes_masks and parts.first_position and positions.dim() == 2:
        own = _behind_padding(parts.first_position, given.get("input_ids"), mask)
        # packed() counts from 0 and cannot know where a model starts.
        positions = torch.where((positions == mask.positions).all(), own, positions)
        starts = mask.positions.expand_as(positions) == 0
        if readable(positions) and not torch.equal(positions[starts], own.expand_as(positions)[starts]):
            raise LayoutError(
                f"position_ids must start at {parts.first_position} with each document for {model}, which keeps the "
                f"lower ones for padding, got {positions[starts].unique().tolist()}; leave position_ids to "
                "polyattn_transformers.packed(...)"
            )
    given["position_ids"] = positions


def _behind_padding(first: int, tokens: Tensor | None, mask: PackedMask) -> Tensor:
    """The positions that a model like RoBERTa gives the tokens of a document: padding tokens in it are not counted."""
    if tokens is None:
        return mask.positions + first
    padding = tokens == first - 1
    counted = ranks(mask.documents.long() * 2 + padding)
    return torch.where(padding, first - 1, counted + first)
