"""Ways to write the tensors of a call that change nothing about what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyattn_conformance.case import Case
from polyattn_conformance.reference import softmax_step


def _sequence_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def _width_strided(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else torch.stack([x, x], -1)[..., 0]


def _sliced(x: Tensor) -> Tensor:
    wide = torch.cat([x, torch.full_like(x, torch.nan)], -1)
    return wide[..., : x.shape[-1]]


def _rows_of_more(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], 1).flatten(0, 1)[::2]


def _heads_of_more(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]] if x.dim() > 1 else x


def _offset(x: Tensor) -> Tensor:
    flat = torch.cat([x.new_full((1,), torch.nan), x.flatten()])
    return flat[1:].view(x.shape)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _heads_expanded(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x) if x.dim() > 1 else x


#: Ways to lay a tensor out in memory; the expanded ones repeat a part of it with a stride of zero.
ARRANGEMENTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sequence_first": _sequence_first,
    "width_strided": _width_strided,
    "sliced": _sliced,
    "rows_of_more": _rows_of_more,
    "heads_of_more": _heads_of_more,
    "offset": _offset,
    "expanded": _expanded,
    "heads_expanded": _heads_expanded,
}


def rearranged(case: Case, pick: Callable[[], Callable[[Tensor], Tensor]]) -> Case:
    """The case with every tensor, incoming gradients included, laid out as the next ``pick()`` does."""
    tensors = {**case.tensors(), "grad_output": case.grad_output, "grad_lse": case.grad_lse}
    return case.change(**{name: pick()(x) if x.numel() else x for name, x in tensors.items()})


def poisoned(case: Case, poison: float) -> Case:
    """The case with ``poison`` wherever nothing may look.

    In queries, keys and values that the mask hides, alone or together with a bias of ``-inf``, and in the incoming
    gradients of rows that see nothing.
    """
    step = softmax_step(case.q, case.k, case.v, case.visible, bias=case.bias)
    group = case.q.shape[1] // case.k.shape[1]
    masked = ~step.live
    unseen = ~step.visible.any(-2).unflatten(1, (-1, group)).any(2).unsqueeze(-1)
    return case.change(
        q=case.q.masked_fill(masked.unsqueeze(-1), poison),
        k=case.k.masked_fill(unseen, poison),
        v=case.v.masked_fill(unseen, poison),
        grad_output=case.grad_output.masked_fill(masked.unsqueeze(-1), poison),
        grad_lse=case.grad_lse.masked_fill(masked, poison),
    )
