"""Where tokens stand in their documents."""

from __future__ import annotations

import pytest
import torch

from polyattn.documents import ranks, together


@pytest.mark.parametrize(
    "documents, counted, lie_together",
    [
        ([[5, 5, 2, 2, 2]], [[0, 1, 0, 1, 2]], True),
        ([[5, 2, 5, 2, 2]], [[0, 0, 1, 1, 2]], False),
        ([[1, 1, 1], [0, 1, 0]], [[0, 1, 2], [0, 0, 1]], False),
        ([[7]], [[0]], True),
        ([[]], [[]], True),
    ],
)
def test_a_token_counts_the_earlier_tokens_of_its_document(documents, counted, lie_together):
    ids = torch.tensor(documents, dtype=torch.int32)
    assert ranks(ids).tolist() == counted
    assert bool(together(ids)) is lie_together


def test_tokens_that_do_not_count_may_lie_between_the_others():
    ids = torch.tensor([[1, 0, 0, 1]])
    assert not together(ids)
    assert together(ids, torch.tensor([[True, True, True, False]]))
