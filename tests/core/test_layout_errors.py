"""Every refused argument of a layout is named, with what came, what is needed and what to do."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch

from polyattn._errors import LayoutError, PolyattnError
from polyattn._layout import MaskLayout, StructuredMask

IDS = torch.tensor([[0, 0, 1, 1]] * 2)
VALID = torch.ones(2, 4, dtype=torch.bool)
FLOATS = torch.zeros(4, 4)


def of_another_kind(make):
    with warnings.catch_warnings():  # torch calls them beta
        warnings.simplefilter("ignore")
        return make()


def layout_of(**fields):
    return MaskLayout(q_len=4, kv_len=4, visibility=StructuredMask(**fields))


def causal_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


REFUSED = {
    "negative length": (lambda: MaskLayout.causal(-1), "q_len must be an int >= 0, got -1"),
    "length of wrong type": (lambda: MaskLayout.full(3, 4.0), "kv_len must be an int >= 0, got 4.0"),
    "bool as length": (lambda: MaskLayout.full(True), "q_len must be an int >= 0, got True"),
    "window 0": (lambda: MaskLayout.causal(3, window=0), "window .* must be an int >= 1, got 0"),
    "with_window 0": (lambda: MaskLayout.causal(3).with_window(0), "window .* must be an int >= 1, got 0"),
    "float window": (lambda: MaskLayout.causal(3, window=2.0), "window .* must be an int >= 1, got 2.0"),
    "chunk 0": (lambda: MaskLayout.chunked(0, 3), "chunk_size must be an int >= 1, got 0"),
    "causal that is not a bool": (lambda: StructuredMask(causal=1), "causal must be True or False, got 1"),
    "validate that is not a bool": (lambda: MaskLayout(2, 2, validate=0), "validate must be True or False, got 0"),
    "float mask": (lambda: MaskLayout.dense(FLOATS), r"mask must be Bool.*got torch.float32.*bias=, where -inf blocks"),
    "float drop mask": (lambda: MaskLayout.from_drop_mask(FLOATS), r"mask must be Bool.*bias="),
    "float kv_valid": (lambda: MaskLayout.padded(FLOATS), r"kv_valid must be Bool\[B\|1, K\].*float32.*bias="),
    "float visibility": (
        lambda: MaskLayout(q_len=4, kv_len=4, visibility=FLOATS[None, None]),
        "visibility must be Bool.*bias=",
    ),
    "mask of ones and zeros": (lambda: MaskLayout.padded(IDS), r"kv_valid .* got torch.int64; call .bool\(\)"),
    "mask of rank 3": (lambda: MaskLayout.dense(VALID[None]), r"mask must be .* got shape \[1, 2, 4\]; .*unsqueeze"),
    "kv_valid of rank 1": (lambda: MaskLayout.padded(VALID[0]), r"kv_valid must be .* got shape \[4\]"),
    "lengths given as kv_valid": (
        lambda: MaskLayout.padded([3, 4]),
        r"kv_valid must be a tensor Bool.*got list; .* valid keys as padded\(lengths=..., kv_len=...\)",
    ),
    "mask that is a list": (lambda: MaskLayout.dense([[True]]), "mask must be a tensor Bool.*got list"),
    "unknown visibility": (lambda: MaskLayout(2, 2, visibility="causal"), "visibility must be .* got str"),
    "mask_mod that is not a function": (
        lambda: MaskLayout.from_mod(3, q_len=2, kv_len=2),
        r"mask_mod must be a function \(b, h, q_idx, kv_idx\) -> Bool, got int",
    ),
    "active_queries of rank 1": (
        lambda: MaskLayout.causal(4, active_queries=VALID[0]),
        r"active_queries must be Bool\[B\|1, Q\], got shape \[4\]",
    ),
    "active_queries of wrong length": (
        lambda: MaskLayout.causal(3, active_queries=VALID),
        r"active_queries must fit q_len=3 and kv_len=3: shape \[2, 3\], got \[2, 4\]",
    ),
    "float active_queries": (lambda: MaskLayout.causal(4, active_queries=FLOATS), "active_queries must be Bool"),
    "kv_valid of wrong length": (
        lambda: MaskLayout(q_len=3, kv_len=3, visibility=StructuredMask(kv_valid=VALID)),
        r"kv_valid must fit q_len=3 and kv_len=3: shape \[2, 3\], got \[2, 4\]",
    ),
    "dense mask of wrong size": (
        lambda: MaskLayout(q_len=3, kv_len=4, visibility=VALID[None, None]),
        r"visibility must fit q_len=3 and kv_len=4: shape \[1, 1, 3, 4\], got \[1, 1, 2, 4\]",
    ),
    "different batches": (
        lambda: MaskLayout.padded(VALID, active_queries=torch.ones(3, 4, dtype=torch.bool)),
        "batch must be one number.*kv_valid 2, active_queries 3",
    ),
    "batch that a tensor exceeds": (
        lambda: MaskLayout(q_len=4, kv_len=4, batch=1, visibility=StructuredMask(kv_valid=VALID)),
        "batch must be one number.*got batch 1, kv_valid 2",
    ),
    "negative batch": (lambda: MaskLayout(q_len=4, kv_len=4, batch=-2), "batch must be an int >= 0, got -2"),
    "heads of a structure": (
        lambda: MaskLayout(q_len=4, kv_len=4, heads=2),
        "heads must be 1 with a StructuredMask.*got 2",
    ),
    "two devices": (
        lambda: MaskLayout.padded(VALID, active_queries=VALID.to("meta")),
        "one device, got kv_valid cpu, active_queries meta",
    ),
    "no padding": (MaskLayout.padded, r"padded\(\) must get kv_valid or lengths, got neither"),
    "padding twice": (
        lambda: MaskLayout.padded(VALID, lengths=[4]),
        r"padded\(\) must get kv_valid or lengths, got both",
    ),
    "lengths without kv_len": (lambda: MaskLayout.padded(lengths=[3]), "kv_len must be given with lengths, got None"),
    "padding longer than the row": (
        lambda: MaskLayout.padded(lengths=[2, 5], kv_len=4),
        r"lengths must lie in 0 .. kv_len, got \[2, 5\] and kv_len=4",
    ),
    "unknown side": (
        lambda: MaskLayout.padded(lengths=[2], kv_len=4, side="up"),
        "side must be 'left' or 'right', where the padding is, got 'up'",
    ),
    "kv_len against kv_valid": (lambda: MaskLayout.padded(VALID, kv_len=5), "got 4 keys and kv_len=5"),
    "no documents": (MaskLayout.packed, "exactly one of lengths, cu_seqlens, document_ids, position_ids, got none"),
    "documents twice": (
        lambda: MaskLayout.packed([4], document_ids=IDS),
        "exactly one of .*, got lengths and document_ids",
    ),
    "negative document": (lambda: MaskLayout.packed([3, -1]), "lengths must be >= 0, got -1"),
    "float lengths": (lambda: MaskLayout.packed([2.5]), r"lengths must be ints or an integer tensor, got \[2.5\]"),
    "bools as lengths": (lambda: MaskLayout.packed([True]), "lengths must be ints or an integer tensor"),
    "a number as lengths": (lambda: MaskLayout.packed(7), "lengths must be ints or an integer tensor, got 7"),
    "float tensor of lengths": (
        lambda: MaskLayout.packed(torch.tensor([2.0])),
        "lengths must be .* int32 or int64, got torch.float32; cast it first",
    ),
    "length beyond int64": (
        lambda: MaskLayout.packed([2**70]),
        "lengths must be ints that fit int64, got 1180591620717411303424",
    ),
    "length beyond what can be printed": (
        lambda: MaskLayout.full(10**5000),
        "q_len must be at most 72057594037927936, got an int of 16610 bits",
    ),
    "numbers whose sum wraps to zero": (
        lambda: MaskLayout.packed([2**62] * 4),
        "what lengths add up to must be at most 72057594037927936, got 18446744073709551616",
    ),
    "offset beyond int64": (lambda: MaskLayout.packed(cu_seqlens=[0, 2**63]), "cu_seqlens must be ints that fit int64"),
    "offset beyond memory": (
        lambda: MaskLayout.packed(cu_seqlens=[0, 2**62]),
        "what cu_seqlens end at must be at most 72057594037927936, got 4611686018427387904",
    ),
    "document id beyond int64": (
        lambda: MaskLayout.packed(document_ids=[0, -(2**70)]),
        "document_ids must be ints that fit int64, got -1180591620717411303424",
    ),
    "position id beyond int64": (
        lambda: MaskLayout.packed(position_ids=[0, 2**70]),
        "position_ids must be ints that fit int64",
    ),
    "prefix beyond int64": (lambda: MaskLayout.prefix_lm(2**70, 8), "prefix_lengths must be ints that fit int64"),
    "valid keys beyond int64": (
        lambda: MaskLayout.padded(lengths=[2**70], kv_len=4),
        "lengths must be ints that fit int64",
    ),
    "lengths that do not add up": (
        lambda: MaskLayout.packed([3, 4], kv_len=9),
        "lengths must add up to kv_len, got 7 and kv_len=9",
    ),
    "rows that add up to different numbers": (
        lambda: MaskLayout.packed([[3, 4], [5]]),
        r"lengths of every batch row must add up to one number, got \[7, 5\]; .*document of its own",
    ),
    "offsets that do not start at 0": (
        lambda: MaskLayout.packed(cu_seqlens=[1, 4]),
        r"cu_seqlens must start at 0, got \[1\]",
    ),
    "lengths given as offsets": (
        lambda: MaskLayout.packed(cu_seqlens=[0, 4, 2]),
        "cu_seqlens must never decrease, .*lengths go into lengths=",
    ),
    "no offsets": (lambda: MaskLayout.packed(cu_seqlens=[]), "cu_seqlens must hold at least the offset 0"),
    "offsets that end early": (
        lambda: MaskLayout.packed(cu_seqlens=[0, 3, 7], kv_len=9),
        "cu_seqlens must end at kv_len, got 7 and kv_len=9",
    ),
    "negative document ids": (
        lambda: MaskLayout.packed(document_ids=[0, -1]),
        "document_ids must be >= 0, got -1; .*active_queries=",
    ),
    "document ids of wrong length": (
        lambda: MaskLayout.packed(document_ids=IDS, kv_len=5),
        "document_ids must have one entry per token, got 4 and kv_len=5",
    ),
    "ragged document ids": (
        lambda: MaskLayout.packed(document_ids=[[0, 1], [0]]),
        r"document_ids must have rows of one length, got \[2, 1\]",
    ),
    "multi-axis position ids": (
        lambda: MaskLayout.packed(position_ids=torch.zeros(3, 1, 6, dtype=torch.int64)),
        r"position_ids must be \[B, K\], got shape \[3, 1, 6\]: .*text axis.*position_ids\[0\]",
    ),
    "position ids with a gap": (
        lambda: MaskLayout.packed(position_ids=[[0, 1], [0, 2]]),
        "position_ids must restart at 0 .* got 2 after 0 in row 1, column 1; .*document_ids=",
    ),
    "position ids that start late": (
        lambda: MaskLayout.packed(position_ids=[3, 4]),
        "position_ids must restart at 0 .* got 3 first in row 0, column 0",
    ),
    "prefix too long": (
        lambda: MaskLayout.prefix_lm([1, 9], 8),
        r"prefix_lengths must lie in 0 .. kv_len, got \[1, 9\] and kv_len=8",
    ),
    "negative prefix": (lambda: MaskLayout.prefix_lm(-1, 8), "prefix_lengths must lie in 0 .. kv_len"),
    "nested prefixes": (lambda: MaskLayout.prefix_lm([[1], [2]], 8), "prefix_lengths must be ints"),
    "prefix without causality": (
        lambda: layout_of(prefix_lengths=torch.tensor([1])),
        "prefix_lengths must come with causal=True",
    ),
    "prefix per segment without segments": (
        lambda: layout_of(causal=True, prefix_lengths=torch.tensor([[1, 2]])),
        "prefix_lengths per segment must come with q_segments and kv_segments",
    ),
    "segment without a prefix": (
        lambda: layout_of(causal=True, q_segments=IDS, kv_segments=IDS, prefix_lengths=torch.tensor([[1]])),
        "q_segments must lie in 0 .. 0, the segments that prefix_lengths lists, got 0 .. 1",
    ),
    "segments of queries alone": (lambda: layout_of(q_segments=IDS), "must be given together, got q_segments alone"),
    "positions of keys alone": (lambda: layout_of(kv_positions=IDS), "kv_positions must come with q_positions"),
    "positions of two dtypes": (
        lambda: layout_of(q_positions=IDS, kv_positions=IDS.int()),
        "must share one dtype, got torch.int64 and torch.int32; cast",
    ),
    "float positions": (
        lambda: layout_of(q_positions=FLOATS),
        "q_positions must be .* int32 or int64, got torch.float32",
    ),
    "index out of range": (lambda: MaskLayout.causal(3).select_queries([1, 3]), "index must lie in 0 .. 2, got 1 .. 3"),
    "negative index": (lambda: MaskLayout.causal(3).select_keys([-1]), "index must lie in 0 .. 2, got -1 .. -1"),
    "index beyond int64": (lambda: MaskLayout.causal(3).select_keys([2**70]), "index must be ints that fit int64"),
    "slice with step 0": (
        lambda: MaskLayout.causal(3).select_keys(slice(0, 3, 0)),
        r"index must be a slice of ints whose step is not 0, got slice\(0, 3, 0\)",
    ),
    "slice of floats": (
        lambda: MaskLayout.causal(3).select_queries(slice(0.0, 3)),
        "index must be a slice of ints whose step is not 0",
    ),
    "bools as index": (lambda: MaskLayout.causal(2).select_keys([True, False]), "index must be ints"),
    "bool tensor as index": (lambda: MaskLayout.causal(4).select_keys(VALID[0]), "index must be Int.*got torch.bool"),
    "heads that are not a slice": (
        lambda: MaskLayout.causal(2).select_heads(0),
        "index must be a slice of heads, got 0",
    ),
    "intersection of different lengths": (
        lambda: MaskLayout.causal(3) & MaskLayout.causal(3, 4),
        "joined with & must fit each other: kv_len must be equal, got 3 and 4",
    ),
    "intersection of different batches": (
        lambda: MaskLayout.padded(VALID) & MaskLayout.padded(torch.ones(3, 4, dtype=torch.bool)),
        "batch must be equal or 1, got 2 and 3",
    ),
    "intersection across devices": (
        lambda: MaskLayout.padded(VALID) & MaskLayout.padded(VALID).to("meta"),
        "device must be the same, got cpu and meta",
    ),
    "expansion of a batch": (
        lambda: MaskLayout.padded(VALID).expand(3),
        "batch must be 2, the rows that the layout describes, got 3; only a layout of batch 1 serves any number",
    ),
    "a flag as a batch": (lambda: MaskLayout.causal(3).expand(True), "batch must be an int >= 0, got True"),
    "an empty batch of two rows": (
        lambda: MaskLayout.padded(VALID).expand(0),
        "batch must be 2, the rows .*, got 0; only",
    ),
    "sparse mask": (
        lambda: MaskLayout.dense(VALID.to_sparse()),
        "mask must be an ordinary dense tensor Bool.*, got layout torch.sparse_coo; call .to_dense",
    ),
    "compressed sparse drop mask": (
        lambda: MaskLayout.from_drop_mask(of_another_kind(VALID.to_sparse_csr)),
        "mask must be an ordinary dense tensor Bool.*, got layout torch.sparse_csr",
    ),
    "sparse kv_valid": (lambda: MaskLayout.padded(VALID.to_sparse()), "kv_valid must be an ordinary dense tensor"),
    "sparse documents": (
        lambda: MaskLayout.packed(document_ids=IDS.to_sparse(), validate=False),
        "document_ids must be an ordinary dense tensor Int.*, got layout torch.sparse_coo",
    ),
    "nested mask": (
        lambda: MaskLayout.dense(of_another_kind(lambda: torch.nested.nested_tensor([VALID[0]]))),
        "mask must be an ordinary dense tensor Bool.*, got a nested tensor; .* pad a nested one",
    ),
    "picture without values": (
        lambda: MaskLayout.dense(VALID.to("meta")).draw(),
        "a layout must hold values to be drawn, got tensors on the device meta",
    ),
    "picture of an absent row": (lambda: MaskLayout.causal(3).draw(batch=1), "batch must lie in 0 .. 0, got 1"),
    "picture of no int": (
        lambda: MaskLayout.causal(3).draw(head=0.0),
        "head must be an int >= 0, got 0.0",
    ),
    "picture without size": (lambda: MaskLayout.causal(3).draw(size=0), "size must be an int >= 1, got 0"),
    "rows before the first": (lambda: MaskLayout.causal(3).dense_rows(-1, 2), "start must be an int >= 0, got -1"),
    "rows after the last": (lambda: MaskLayout.causal(3).dense_rows(1, 4), "stop must be at most 3, got 4"),
    "rows backwards": (lambda: MaskLayout.causal(3).dense_rows(2, 1), "start must be at most stop, got 2 and 1"),
    "check of what cannot be read": (
        lambda: MaskLayout.packed(document_ids=IDS.to("meta")),
        "document_ids cannot be checked .* pass validate=False",
    ),
    "unread lengths without kv_len": (
        lambda: MaskLayout.packed(torch.tensor([4]).to("meta"), validate=False),
        "kv_len must be given with validate=False, where lengths is not read",
    ),
    "mask_mod that returns floats": (
        lambda: MaskLayout.from_mod(lambda b, h, q, k: (q - k).float(), q_len=2, kv_len=2).to_dense(),
        "mask_mod must return a Bool tensor.*got torch.float32.*bias=",
    ),
    "mask_mod that returns no tensor": (
        lambda: MaskLayout.from_mod(lambda b, h, q, k: True, q_len=2, kv_len=2).unseen_keys(),
        "mask_mod must return a Bool tensor.*got bool",
    ),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_argument_is_refused_by_name(make, text):
    with pytest.raises(LayoutError) as caught:
        make()
    assert re.search(text, str(caught.value)), str(caught.value)


def test_all_faults_of_a_layout_come_in_one_message():
    with pytest.raises(LayoutError) as caught:
        MaskLayout(q_len=3, kv_len=5, heads=2, visibility=StructuredMask(kv_valid=VALID, q_positions=IDS))
    assert all(name in str(caught.value) for name in ("kv_valid must fit", "q_positions must fit", "heads must be 1"))


def test_an_error_inside_a_mask_mod_is_its_cause():
    def broken(b, h, q_idx, kv_idx):
        raise ZeroDivisionError("no reason")

    layout = MaskLayout.from_mod(broken, q_len=2, kv_len=2)
    with pytest.raises(LayoutError, match=r"mask_mod .*broken raised ZeroDivisionError .*no reason") as caught:
        layout.to_dense()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_layout_is_joined_with_layouts_only():
    with pytest.raises(TypeError):
        MaskLayout.causal(2) & 3


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PolyattnError, match=r"plot\(\) needs matplotlib.*polyattn\[viz\]"):
        MaskLayout.causal(2).plot()


@pytest.mark.parametrize("side", ["left", "junk"])
def test_a_side_beside_valid_keys_is_refused(side):
    with pytest.raises(LayoutError, match=f"side must go with lengths, got side='{side}' with kv_valid"):
        MaskLayout.padded(torch.ones(1, 4, dtype=torch.bool), side=side)


def test_a_drop_mask_is_asked_for_in_its_own_sense():
    with pytest.raises(LayoutError, match=r"with True = may not attend, got torch.float32"):
        MaskLayout.from_drop_mask(torch.zeros(4, 4))


@pytest.mark.parametrize("device", ["cudaa", "", 5, 3.5, [], True])
@pytest.mark.parametrize("ask", ["to", "to_dense", "rows_without_keys", "unseen_keys"])
def test_what_names_no_device_is_refused(ask, device):
    for layout in (MaskLayout.causal(4), MaskLayout.padded(VALID), MaskLayout.dense(VALID)):
        with pytest.raises(LayoutError, match=f"device must be a device of torch, .*, got {re.escape(repr(device))}"):
            getattr(layout, ask)(device)


def test_a_layout_without_values_says_its_shapes():
    layout = MaskLayout.dense(VALID.to("meta"))
    assert layout.to_dense().shape == layout.with_window(1).to_dense().shape == (1, 1, 2, 4)
