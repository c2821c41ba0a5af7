from __future__ import annotations

import pytest
import torch

from polyattn import ConfigError
from tiny_lm.data import NO_TARGET, PackedRows, python_documentation

DOCUMENTS = [b"one", b"a longer document", b"x", b"two", b"the last"]


def packed(**changes):
    return PackedRows(DOCUMENTS, **({"row_length": 8, "rows": 2, "seed": 0} | changes))


def test_documents_fill_each_row():
    for step in range(5):
        batch = packed().batch(step)
        assert [sum(row) for row in batch.lengths] == [8, 8]


def test_an_epoch_holds_every_document_once_up_to_the_last_incomplete_batch():
    rows = packed(row_length=4, rows=2)
    epoch = b"".join(bytes(rows.batch(step).tokens.flatten().tolist()) for step in range(rows.batches_per_epoch))
    rest = epoch
    for document in sorted(DOCUMENTS, key=len, reverse=True):
        rest = rest.replace(document, b"", 1)
    assert len(epoch) == 32
    assert any(document.startswith(rest) for document in DOCUMENTS), "only a document cut at the end is left"


def test_a_target_is_the_next_byte_of_the_same_document():
    batch = packed().batch(0)
    for tokens, targets, positions, lengths in zip(
        batch.tokens, batch.targets, batch.positions, batch.lengths, strict=True
    ):
        start = 0
        for length in lengths:
            document = slice(start, start + length)
            assert targets[document].tolist() == [*tokens[document][1:].tolist(), NO_TARGET]
            assert positions[document].tolist() == list(range(length))
            start += length


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    forward, backward = packed(), packed()
    ahead = [forward.batch(step).tokens for step in range(6)]
    back = [backward.batch(step).tokens for step in reversed(range(6))]
    assert all(torch.equal(a, b) for a, b in zip(ahead, reversed(back), strict=True))
    assert not torch.equal(packed(seed=1).batch(0).tokens, ahead[0])


def test_each_epoch_has_an_order_of_its_own():
    rows = packed()
    first, second = (range(epoch * rows.batches_per_epoch, (epoch + 1) * rows.batches_per_epoch) for epoch in (0, 1))
    texts = [torch.cat([rows.batch(step).tokens for step in steps]) for steps in (first, second)]
    assert not torch.equal(*texts)


def test_a_text_smaller_than_one_batch_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"rows \* row_length = 80 bytes and a text of 32"):
        packed(rows=10)


def test_the_text_is_pythons_own_documentation():
    documents = python_documentation()
    assert len(documents) > 50
    assert any(b"lambda" in document for document in documents)
