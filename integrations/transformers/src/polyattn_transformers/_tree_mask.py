"""A tree of rows as a model input: prefixes that rows share stand once, and each row is a path of the tree."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from polyattn import LayoutError, MaskLayout
from polyattn_transformers._no_tensor import as_device
from polyattn_transformers._packing import PackedMask
from polyattn_transformers._parts import Parts


class Tree(Protocol):
    """What a tree is read from, such as :class:`polyattn.PackedTree`."""

    @property
    def layout(self) -> MaskLayout:
        """``MaskLayout.tree(...)`` of one batch row."""


class TreeMask(PackedMask):
    """A tree in the place of an ``attention_mask``; made by :func:`packed_tree`.

    Args:
        layout: made by ``MaskLayout.tree``.
        positions: ``Int[1, K]``, the depth of each token.
    """

    what = "a TreeMask"

    def __init__(self, layout: MaskLayout, positions: Tensor) -> None:
        visibility: Any = layout.visibility
        super().__init__(visibility.q_segments, name="the tree", layouts={True: layout})
        self._positions, self._together = positions, False

    def layout(self, *, causal: bool) -> MaskLayout:
        """Who sees whom; only causal attention has rows that do not change with what goes on from them."""
        if not causal:
            raise LayoutError(
                "packed(tree=...) must go into causal attention, got a layer that sees both ways, where a shared "
                "prefix would see all rows; give each row a row of its own, with padding"
            )
        return self._layouts[True]

    def lengths(self) -> list[int]:
        """The length of a shortest row that there might be, and of the longest."""
        return [1, int(self.positions.max()) + 1]

    def to(self, device: torch.device | str | None = None, *_: Any, **__: Any) -> TreeMask:
        """The mask on ``device``; a dtype, which transformers asks for too, changes nothing."""
        if not isinstance(device, (str, torch.device)) or as_device(device) == self.device:
            return self
        return TreeMask(self._layouts[True].to(device), self.positions.to(device))

    def check(self, model: str, parts: Parts, given: dict[str, Any], named: list[str]) -> None:
        """Refuse what would give rows other numbers than each has alone.

        Args:
            model: the name of its class.
            parts: what is known of it.
            given: the arguments of the call.
            named: those that describe packed documents.

        Raises:
            LayoutError: names the argument or the model.
        """
        if named:
            raise LayoutError(f"packed(tree=...) and {', '.join(named)} both say who sees whom; give one of them")
        if given.get("labels") is not None:
            raise LayoutError(
                "labels must not be given beside packed(tree=...): the token behind the last one of a node is not the "
                "next token of its rows; compute the loss from the logits with PackedTree.next_tokens()"
            )
        positions = given.get("position_ids")
        if positions is not None and not self.has_positions(positions):
            raise LayoutError(
                "position_ids must be the depths of the tree's tokens beside packed(tree=...), got other ones; leave "
                "them to packed(tree=...)"
            )
        reason = ""
        if parts.relative:
            reason = "it knows positions by the distance of tokens in the row only"
        elif parts.first_position:
            reason = "it numbers tokens from behind its padding index"
        if reason:
            raise LayoutError(f"{model} cannot run a tree: {reason}; give each row a row of its own, with padding")


def packed_tree(tree: Tree, device: torch.device | str | None) -> dict[str, Any]:
    """The model inputs for a tree; see :func:`polyattn_transformers.packed`."""
    layout = getattr(tree, "layout", None)
    fields = layout.visibility.given() if isinstance(layout, MaskLayout) and hasattr(layout.visibility, "given") else ()
    if not isinstance(layout, MaskLayout) or "kv_segment_ends" not in fields or layout.batch != 1:
        raise LayoutError(
            f"tree must be what polyattn.pack_tree(rows) returns, got {type(tree).__name__}; or an object whose layout "
            "is MaskLayout.tree(parents, lengths) of one row"
        )
    if set(fields) != {"causal", "q_positions", "kv_positions", "q_segments", "kv_segments", "kv_segment_ends"}:
        raise LayoutError(
            f"the layout of tree must be a causal tree without further rules, got {layout.describe()}; a model sets "
            "its windows itself"
        )
    layout = layout if device is None else layout.to(as_device(device))
    mask = TreeMask(layout, layout.token_positions())
    return {"attention_mask": mask, "position_ids": mask.positions}
