"""What each constructor lets be seen, on the small inputs on which masks are usually wrong."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn._layout import MaskLayout, StructuredMask


def rows(layout, batch=0):
    """The mask of one batch row as strings, one a query: ``1`` seen, ``0`` not."""
    dense = layout.to_dense()
    mask = dense[batch % dense.shape[0], 0]
    return ["".join("01"[x] for x in row) for row in mask.int().tolist()]


def bools(*texts):
    return torch.tensor([[mark == "1" for mark in text] for text in texts])


def test_full_shows_every_key_and_kv_len_defaults_to_q_len():
    assert rows(MaskLayout.full(2)) == ["11", "11"]
    assert rows(MaskLayout.full(1, 3)) == ["111"]


def test_causal_queries_are_the_last_positions():
    assert rows(MaskLayout.causal(3)) == ["100", "110", "111"]
    assert rows(MaskLayout.causal(1, 5)) == ["11111"]
    assert rows(MaskLayout.causal(2, 5)) == ["11110", "11111"]
    assert rows(MaskLayout.causal(4, 2)) == ["00", "00", "10", "11"]


def test_a_causal_window_counts_the_query_itself():
    seen = MaskLayout.causal(8, window=3).to_dense()[0, 0].sum(1)
    assert seen.tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert rows(MaskLayout.causal(3, window=1)) == ["100", "010", "001"]


def test_a_window_without_causality_is_symmetric_by_distance():
    layout = MaskLayout.full(8).with_window(3)
    assert layout.to_dense()[0, 0].sum(1).tolist() == [3, 4, 5, 5, 5, 5, 4, 3]


def test_of_two_windows_the_smaller_holds():
    assert MaskLayout.causal(6, window=2).with_window(4).visibility.window == 2
    assert MaskLayout.causal(6, window=4).with_window(2).visibility.window == 2
    layout = MaskLayout.causal(6, window=4)
    assert layout.with_window(None) is layout


def test_padding_on_the_right_on_the_left_and_in_holes():
    assert rows(MaskLayout.padded(bools("110"))) == ["100", "110", "110"]
    assert rows(MaskLayout.padded(bools("011"))) == ["000", "010", "011"]
    assert rows(MaskLayout.padded(bools("101"), causal=False)) == ["101"] * 3
    assert rows(MaskLayout.padded(bools("11100"), q_len=2, causal=False)) == ["11100"] * 2


@pytest.mark.parametrize("lengths", [[1, 3], torch.tensor([1, 3])], ids=["ints", "tensor"])
def test_padding_by_lengths_equals_padding_by_a_mask(lengths):
    right = MaskLayout.padded(lengths=lengths, kv_len=3, causal=False)
    assert [rows(right, b)[0] for b in (0, 1)] == ["100", "111"]
    left = MaskLayout.padded(lengths=lengths, kv_len=3, side="left", causal=False)
    assert [rows(left, b)[0] for b in (0, 1)] == ["001", "111"]


FORMS = {
    "lengths": {"lengths": [3, 1, 2]},
    "one list of lengths per row": {"lengths": [[3, 1, 2]]},
    "a tensor of lengths": {"lengths": torch.tensor([3, 1, 2])},
    "offsets": {"cu_seqlens": [0, 3, 4, 6]},
    "an int32 tensor of offsets": {"cu_seqlens": torch.tensor([0, 3, 4, 6], dtype=torch.int32)},
    "document ids": {"document_ids": [7, 7, 7, 2, 5, 5]},
    "a tensor of document ids": {"document_ids": torch.tensor([[0, 0, 0, 1, 2, 2]])},
    "position ids": {"position_ids": [0, 1, 2, 0, 0, 1]},
    "a tensor of position ids": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]])},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_way_to_give_documents_gives_the_same_mask(form):
    assert rows(MaskLayout.packed(**form)) == ["100000", "110000", "111000", "000100", "000010", "000011"]


def test_documents_of_different_rows_never_merge():
    layout = MaskLayout.packed(position_ids=torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]))
    assert layout.batch == 2
    assert rows(layout, 0) == ["10000", "11000", "11100", "00010", "00011"]
    assert rows(layout, 1) == ["10000", "11000", "00100", "00110", "00111"]
    assert layout.to_blocks()[1:, :5].tolist() == [
        [0, 0, 3, 0, 3],
        [0, 3, 5, 3, 5],
        [1, 0, 2, 0, 2],
        [1, 2, 5, 2, 5],
    ]


def test_rows_may_hold_different_numbers_of_documents():
    layout = MaskLayout.packed([[2, 1, 1], [4]], causal=False)
    assert rows(layout, 0) == ["1100", "1100", "0010", "0001"]
    assert rows(layout, 1) == ["1111"] * 4
    offsets = MaskLayout.packed(cu_seqlens=[[0, 2, 3, 4], [0, 4]], causal=False)
    assert torch.equal(layout.to_dense(), offsets.to_dense())


def test_empty_documents_take_no_token():
    assert rows(MaskLayout.packed([0, 2, 0, 1, 0], causal=False)) == ["110", "110", "001"]
    assert MaskLayout.packed([]).kv_len == 0


def test_an_all_ones_padding_mask_changes_no_document():
    packed = MaskLayout.packed(position_ids=[0, 1, 2, 0, 1, 2])
    both = packed & MaskLayout.padded(torch.ones(1, 6, dtype=torch.bool))
    assert torch.equal(both.to_dense(), packed.to_dense())
    assert torch.equal(both.to_blocks(), packed.to_blocks())


def test_a_prefix_is_seen_from_everywhere():
    assert rows(MaskLayout.prefix_lm(2, 4)) == ["1100", "1100", "1110", "1111"]
    by_row = MaskLayout.prefix_lm([0, 3], 3)
    assert rows(by_row, 0) == ["100", "110", "111"]
    assert rows(by_row, 1) == ["111", "111", "111"]
    assert rows(MaskLayout.prefix_lm(3, 2, 4)) == ["1110", "1111"]


def test_a_prefix_per_document_is_counted_in_positions():
    ids, positions = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    mask = StructuredMask(
        causal=True,
        q_positions=positions,
        kv_positions=positions,
        q_segments=ids,
        kv_segments=ids,
        prefix_lengths=torch.tensor([[2, 0]]),
    )
    layout = MaskLayout(q_len=6, kv_len=6, visibility=mask)
    assert rows(layout) == ["110000", "110000", "111000", "000100", "000110", "000111"]
    assert layout.to_blocks() is not None


def test_chunks_are_counted_in_positions_rounded_down():
    assert rows(MaskLayout.chunked(2, 5)) == ["10000", "11000", "00100", "00110", "00001"]
    assert rows(MaskLayout.chunked(2, 3, 5)) == ["00100", "00110", "00001"]
    assert rows(MaskLayout.chunked(2, 4, 3)) == ["000", "100", "110", "001"]
    assert rows(MaskLayout.chunked(2, 3, causal=False)) == ["110", "110", "001"]


def test_dense_and_drop_masks_are_complements():
    drop = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert rows(MaskLayout.from_drop_mask(drop)) == ["100", "110", "111"]
    assert torch.equal(MaskLayout.dense(drop).to_dense(), ~MaskLayout.from_drop_mask(drop).to_dense())
    assert MaskLayout.dense(torch.ones(2, 3, 4, 5, dtype=torch.bool)).heads == 3


def test_a_block_diffusion_draft_sees_its_context_and_its_own_block():
    block, anchors = torch.arange(4) // 2, torch.tensor([1, 3])
    context = torch.arange(3) < anchors[block][:, None]
    layout = MaskLayout.dense(torch.cat([context, block[:, None] == block], 1))
    assert rows(layout) == ["1001100", "1001100", "1110011", "1110011"]


@pytest.mark.parametrize("offset", [3, torch.tensor(3), torch.tensor([3])], ids=["int", "scalar", "one element"])
def test_a_mask_mod_may_capture_an_int_or_a_tensor_of_one_element(offset):
    layout = MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx, q_len=4, kv_len=8)
    assert rows(layout) == ["11110000", "11111000", "11111100", "11111110"]


@pytest.mark.parametrize(
    "select",
    [
        lambda table, q_idx, kv_idx: table[q_idx, kv_idx],
        lambda table, q_idx, kv_idx: table[q_idx][kv_idx],
        lambda table, q_idx, kv_idx: table[(q_idx,)].any() & table[q_idx - 3, kv_idx],
        lambda table, q_idx, kv_idx: table[0, kv_idx] | table[-1, kv_idx] | table[[0, 1]].all(),
        lambda table, q_idx, kv_idx: table[0][1] & table[q_idx, 1],
    ],
    ids=["element", "row, then element", "row", "ints beside tensors", "ints alone"],
)
def test_a_mask_mod_may_index_a_captured_tensor(select):
    table = bools("110", "011", "101")
    layout = MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: select(table, q_idx, kv_idx), q_len=3, kv_len=3)
    seen = [[bool(select(table, torch.tensor(i), torch.tensor(j))) for j in range(3)] for i in range(3)]
    assert layout.to_dense()[0, 0].tolist() == seen
    assert any(map(any, seen))
    assert layout.rows_without_keys()[0, 0].tolist() == [not any(row) for row in seen]


def test_a_mask_mod_of_one_batch_row_serves_every_batch_row():
    def mod(b, h, q_idx, kv_idx):
        return kv_idx <= b + h

    layout = MaskLayout.from_mod(mod, q_len=2, kv_len=3)
    assert rows(layout) == ["100", "100"]
    assert rows(layout.expand(2), 1) == ["100", "100"]
    index = torch.tensor(1), torch.tensor(1), torch.tensor(0), torch.tensor(1)
    assert not layout.to_mask_mod()(*index)
    per_row = MaskLayout.from_mod(mod, q_len=2, kv_len=3, batch=2, heads=2)
    assert per_row.to_dense()[:, :, 0].int().tolist() == [[[1, 0, 0], [1, 1, 0]], [[1, 1, 0], [1, 1, 1]]]


def test_inactive_queries_see_nothing_in_every_form():
    active = bools("101", "011")
    for layout in (
        MaskLayout.causal(3, active_queries=active),
        MaskLayout.dense(torch.ones(3, 3, dtype=torch.bool).tril(), active_queries=active),
        MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_len=3, kv_len=3, active_queries=active),
    ):
        assert layout.batch == 2
        assert rows(layout, 0) == ["100", "000", "111"]
        assert rows(layout, 1) == ["000", "110", "111"]
        assert layout.rows_without_keys()[:, 0].int().tolist() == [[0, 1, 0], [1, 0, 0]]


def test_blocks_leave_out_inactive_ends_and_cover_inactive_holes():
    layout = MaskLayout.causal(6, active_queries=bools("010110"))
    assert layout.to_blocks()[1:].tolist() == [[0, 1, 5, 0, 5, 1, 1]]
    assert layout.may_have_fully_masked_rows
    assert layout.unseen_keys()[0, 0].int().tolist() == [0, 0, 0, 0, 0, 1]


def test_keys_that_only_an_inactive_query_sees_are_unseen():
    layout = MaskLayout.causal(5, window=1, active_queries=bools("10110"))
    assert layout.unseen_keys()[0, 0].int().tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.full(0),
        MaskLayout.causal(0, 4),
        MaskLayout.causal(4, 0),
        MaskLayout.packed([]),
        MaskLayout.padded(torch.ones(0, 3, dtype=torch.bool)),
        MaskLayout.padded(torch.ones(2, 0, dtype=torch.bool)),
        MaskLayout.dense(torch.ones(0, 1, 2, 3, dtype=torch.bool)),
        MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_len=0, kv_len=3),
        MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_len=3, kv_len=0),
    ],
    ids=repr,
)
def test_empty_sizes_have_empty_masks(layout):
    shape = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    assert layout.to_dense().expand(shape).shape == shape
    assert layout.rows_without_keys().expand(shape[:3]).all()
    assert layout.unseen_keys().expand(*shape[:2], shape[3]).all()
    assert layout.to_blocks() is None or layout.to_blocks().tolist() == [[0] * 7] * 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows_at_the_limit_of_the_positions_are_exact(dtype):
    limit = torch.iinfo(dtype).max
    places = [-limit - 1, -limit, -1, 0, limit - 1, limit]
    positions = torch.tensor([places], dtype=dtype)
    for window in (limit - 1, limit, limit + 1, 2**40):
        mask = StructuredMask(window=window, q_positions=positions, kv_positions=positions)
        layout = MaskLayout(q_len=6, kv_len=6, visibility=mask)
        unlimited = window > limit
        assert (mask.window is None) == unlimited
        expected = [[unlimited or abs(q - k) < window for k in places] for q in places]
        assert layout.to_dense()[0, 0].tolist() == expected
        by_element = layout.to_mask_mod()(
            torch.tensor(0), torch.tensor(0), torch.arange(6)[:, None], torch.arange(6)[None]
        )
        assert by_element.expand(6, 6).tolist() == expected


@pytest.mark.parametrize("window", [2**31 - 2, 2**31 - 1, 2**31])
def test_a_window_near_the_limit_of_int32_shows_all_ordinary_keys(window):
    positions = torch.arange(5, dtype=torch.int32)[None]
    mask = StructuredMask(causal=True, window=window, q_positions=positions, kv_positions=positions)
    assert rows(MaskLayout(q_len=5, kv_len=5, visibility=mask)) == rows(MaskLayout.causal(5))


def test_queries_with_positions_alone_meet_keys_counted_from_zero():
    mask = StructuredMask(causal=True, q_positions=torch.tensor([[0, 2]]))
    assert rows(MaskLayout(q_len=2, kv_len=3, visibility=mask)) == ["100", "111"]


def test_batch_and_heads_are_read_off_the_tensors():
    assert MaskLayout(q_len=2, kv_len=2, visibility=StructuredMask(kv_valid=bools("10", "11"))).batch == 2
    layout = MaskLayout(q_len=2, kv_len=2, visibility=torch.ones(2, 4, 2, 2, dtype=torch.bool))
    assert (layout.batch, layout.heads) == (2, 4)
    assert MaskLayout(q_len=2, kv_len=2, batch=3, visibility=StructuredMask(kv_valid=bools("10"))).batch == 3
    assert MaskLayout(q_len=2, kv_len=2).to_dense().all()


def test_blocks_say_where_documents_lie():
    assert MaskLayout.packed([3, 1, 2]).to_blocks().tolist() == [
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 3, 0, 3, 0, 1],
        [0, 3, 4, 3, 4, 0, 0],
        [0, 4, 6, 4, 6, 0, 1],
    ]


def test_blocks_place_queries_at_the_end_and_trim_what_a_window_hides():
    assert MaskLayout.causal(2, 9).to_blocks()[1:].tolist() == [[0, 0, 2, 0, 9, 7, 1]]
    assert MaskLayout.causal(2, 9, window=3).to_blocks()[1:].tolist() == [[0, 0, 2, 5, 9, 2, 1]]
    assert MaskLayout.causal(5, 2).to_blocks()[1:].tolist() == [[0, 3, 5, 0, 2, 0, 1]]


def test_a_prefix_makes_a_block_below_it_and_a_causal_one_above():
    assert MaskLayout.prefix_lm(2, 5).to_blocks()[1:].tolist() == [[0, 0, 2, 0, 2, 0, 0], [0, 2, 5, 0, 5, 2, 1]]


def test_chunks_and_padding_make_blocks():
    assert MaskLayout.chunked(2, 5).to_blocks()[1:, 1:5].tolist() == [[0, 2, 0, 2], [2, 4, 2, 4], [4, 5, 4, 5]]
    left = MaskLayout.padded(bools("0011", "1111"))
    assert left.to_blocks()[1:].tolist() == [[0, 2, 4, 2, 4, 0, 1], [1, 0, 4, 0, 4, 0, 1]]
    assert MaskLayout.padded(bools("1101")).to_blocks() is None


def test_queries_in_a_few_runs_have_a_block_each():
    layout = MaskLayout.causal(8).select_queries([0, 1, 6, 7])
    assert layout.to_blocks()[1:].tolist() == [[0, 0, 2, 0, 2, 0, 1], [0, 2, 4, 0, 8, 6, 1]]


def test_positions_too_far_apart_for_a_table_are_exact_without_one():
    limit = 2**63 - 1
    mask = StructuredMask(
        causal=True, q_positions=torch.tensor([[limit, -limit - 1]]), kv_positions=torch.tensor([[0]])
    )
    layout = MaskLayout(q_len=2, kv_len=1, visibility=mask)
    assert rows(layout) == ["1", "0"]
    assert layout.to_bands() is None


def test_inactive_holes_may_be_fully_masked_rows_and_hide_keys():
    layout = MaskLayout.causal(3, window=1, active_queries=bools("101"))
    assert layout.may_have_fully_masked_rows
    assert layout.may_have_unseen_keys


def every_second(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


@pytest.mark.parametrize(
    "layout",
    [
        MaskLayout.dense(torch.ones(6, 6, dtype=torch.bool)),
        MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= 0, q_len=6, kv_len=6),
        MaskLayout.full(6),
    ],
    ids=["dense", "mask_mod", "structured"],
)
def test_a_window_after_a_selection_measures_from_the_old_places(layout):
    part = layout.select_queries([5, 1]).select_keys([0, 2, 4, 5])
    assert rows(part.with_window(2)) == ["0011", "1100"]
    both = part & MaskLayout.from_mod(every_second, q_len=2, kv_len=4)
    assert rows(both.with_window(2)) == ["0010", "1000"]


def test_an_intersection_measures_by_the_positions_of_the_one_that_compares_them():
    early = MaskLayout.causal(6).select_queries([0, 2])
    late = MaskLayout.full(6).select_queries([4, 5])
    assert rows(early & late) == rows(late & early) == ["100000", "111000"]
    assert isinstance((early & late).visibility, StructuredMask)


def test_an_intersection_of_different_positions_is_a_function():
    early, late = MaskLayout.causal(6).select_queries([0, 2]), MaskLayout.causal(2, 6, window=4)
    both = early & late
    assert rows(both) == ["000000", "001000"]
    assert callable(both.visibility)


def test_what_has_no_structure_has_no_blocks():
    scattered = torch.arange(400).flip(0)[None]
    mask = StructuredMask(causal=True, q_positions=scattered, kv_positions=scattered)
    for layout in (
        MaskLayout.dense(torch.ones(3, 3, dtype=torch.bool)),
        MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_len=3, kv_len=3),
        MaskLayout(q_len=400, kv_len=400, visibility=mask),
    ):
        assert layout.to_bands() is None
        assert layout.max_runs is None
        assert layout.may_have_fully_masked_rows
        assert layout.may_have_unseen_keys


def test_queries_of_several_runs_have_bands_but_no_blocks_of_one_run():
    layout = MaskLayout.packed(document_ids=[0, 1, 0, 1])
    assert layout.to_blocks() is None
    assert layout.max_runs == 2
    assert torch.equal(layout.to_blocks(max_runs=2)[:, :5], layout.to_bands()[:, :5])
    assert layout.key_intervals() is None
    assert layout.key_intervals(max_runs=2)[0, 3].tolist() == [[1, 2], [3, 4]]


def test_a_picture_in_characters_shows_queries_as_lines():
    assert MaskLayout.packed([2, 1]).draw() == "#--\n##-\n--#"
    assert MaskLayout.causal(4).draw(size=2) == "+-\n#+"
    assert MaskLayout.padded(bools("10", "11"), causal=False).draw(batch=1) == "##\n##"
    assert MaskLayout.causal(0).draw() == ""


def test_the_description_names_the_rules_and_the_sizes():
    layout = MaskLayout.packed([[4, 2], [6]], window=3)
    assert layout.describe() == "causal, window 3, packed documents, 6 queries x 6 keys, batch 2"
    assert repr(layout) == f"<MaskLayout: {layout.describe()}>"
    dense = MaskLayout.dense(torch.ones(1, 2, 3, 4, dtype=torch.bool), active_queries=bools("110"))
    assert dense.describe() == "dense mask, 3 queries x 4 keys, 2 heads, some queries inactive"
    assert MaskLayout.prefix_lm(1, 4).describe() == "causal, after a prefix, 4 queries x 4 keys"


def test_a_plot_is_a_figure_that_can_be_saved(tmp_path):
    pytest.importorskip("matplotlib")
    figure = MaskLayout.causal(600, window=100).plot(size=50)
    figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    assert figure.axes[0].images[0].get_array().shape == (50, 50)


def test_a_layout_without_keys_or_queries_is_drawn():
    assert MaskLayout.full(3, 0).draw() == "\n\n"
    assert MaskLayout.full(0, 3).draw() == ""


def test_a_batch_of_a_million_rows_repeats_the_blocks_of_one():
    blocks = MaskLayout.packed([2, 1]).expand(2**20).to_blocks()
    assert blocks.shape == (2**21 + 1, 7)
    assert blocks[:3].tolist() == [[0] * 7, [0, 0, 2, 0, 2, 0, 1], [0, 2, 3, 2, 3, 0, 0]]
    assert blocks[-1].tolist() == [2**20 - 1, 2, 3, 2, 3, 0, 0]


def test_padding_in_a_segment_that_no_query_has_leaves_the_structure():
    mask = StructuredMask(
        causal=True,
        q_positions=torch.tensor([[0, 1, 2, 3]]),
        kv_positions=torch.tensor([[0, 1, 2, 3] + [0] * 9]),
        q_segments=torch.tensor([[0] * 4]),
        kv_segments=torch.tensor([[0] * 4 + [-1] * 9]),
    )
    layout = MaskLayout(4, 13, visibility=mask)
    assert layout.to_blocks()[1:].tolist() == [[0, 0, 4, 0, 4, 0, 1]]
    assert rows(layout) == ["1" + "0" * 12, "11" + "0" * 11, "111" + "0" * 10, "1111" + "0" * 9]


def test_the_work_of_lowering_does_not_grow_with_the_rows():
    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    def operations(batch):
        lengths = torch.arange(20, 20 + batch)[:, None]
        with Count() as count:
            mask = StructuredMask(causal=True, q_positions=lengths - 1, kv_valid=torch.arange(64) < lengths)
            assert MaskLayout(1, 64, visibility=mask).to_blocks().shape == (batch + 1, 7)
        return count.operations

    assert operations(32) == operations(2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("narrow", [lambda window, **rest: MaskLayout.packed(**rest, window=window),
                                    lambda window, **rest: MaskLayout.packed(**rest).with_window(window)],
                         ids=["at once", "later"])  # fmt: skip
def test_a_window_counts_the_tokens_of_a_document_that_lies_in_pieces(narrow, validate, causal):
    ids = torch.tensor([[0, 1, 0, 0, 1, 0, 1], [3, 3, 3, 5, 5, 3, 3]])
    layout = narrow(2, document_ids=ids, causal=causal, validate=validate)
    dense = layout.to_dense()[:, 0]
    for row, numbers in zip(dense, ids, strict=True):
        for number in numbers.unique():
            at = (numbers == number).nonzero()[:, 0]
            alone = MaskLayout.causal(len(at), window=2) if causal else MaskLayout.full(len(at)).with_window(2)
            assert torch.equal(row[at][:, at], alone.to_dense()[0, 0])
            assert not row[at][:, numbers != number].any()


def test_documents_that_lie_together_keep_their_blocks_and_need_no_positions():
    layout = MaskLayout.packed(document_ids=[4, 4, 1, 1, 1, 2], window=2)
    assert layout.visibility.q_positions is None
    assert torch.equal(layout.to_blocks(), MaskLayout.packed([2, 3, 1], window=2).to_blocks())


def test_documents_in_pieces_are_parted_when_traced():
    ids = torch.tensor([[0, 1, 0, 0, 1, 0, 1]])
    masked = lambda ids: MaskLayout.packed(document_ids=ids, validate=False).with_window(2).to_dense()  # noqa: E731
    assert torch.equal(torch.compile(masked, fullgraph=True, backend="eager")(ids), masked(ids))
