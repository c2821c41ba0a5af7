"""One learned logit per query head that takes part in the softmax and carries no value."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyattn_modules.dtensors import own


class HeadSinks(nn.Embedding):
    """Sink logits, ``[heads]``, zero at first.

    An embedding of one row rather than a bare parameter of the layer: whoever initialises a model by walking its
    modules (after ``to_empty``, or for keys that a checkpoint lacks) knows embeddings, and would leave a parameter of
    a module that it does not know as the memory was.

    Args:
        heads: number of query heads.
        made: ``device`` and ``dtype``.
    """

    def __init__(self, heads: int, **made: Any) -> None:
        super().__init__(1, heads, **made)

    def reset_parameters(self) -> None:
        """Set every logit to zero."""
        nn.init.zeros_(self.weight)

    def logits(self) -> Tensor:
        """The logits, ``[heads]``; of this rank's heads where a mesh shares them."""
        weight = self.weight
        return (weight if type(weight) is nn.Parameter else own(weight))[0]
