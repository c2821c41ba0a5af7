"""Layouts under compile, export, vmap, pickling, on devices without data, and within bounded memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from layout_kinds import KINDS
from polyattn._errors import LayoutError
from polyattn._layout import MaskLayout, StructuredMask, base, checks, known
from polyattn._request import AttentionRequest


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def causal_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


LAYOUTS = {
    name: KINDS[name][0]
    for name in (
        "window", "window of two sides", "packed", "prefix_lm", "chunked", "block causal", "tree", "sink tokens",
        "union", "union of other positions", "dense for each head", "mask_mod", "inactive rows",
    )
} | {
    "mask_mod of parts": MaskLayout.from_mod(causal_mod, q_len=20, kv_len=24).select_queries([3, 19])
    & MaskLayout.full(2, 24),
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@every_layout
def test_the_mask_mod_builds_a_block_mask_and_the_same_dense_mask(layout):
    sizes = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    mask = create_mask(layout.to_mask_mod(), *sizes, device="cpu")
    assert torch.equal(mask, layout.to_dense().expand(sizes))
    blocks = create_block_mask(layout.to_mask_mod(), *sizes, device="cpu", BLOCK_SIZE=8)
    assert torch.equal(blocks.to_dense().bool().any((-1, -2)), mask.any((-1, -2)))


def test_a_layout_whose_mask_mod_cannot_pickle_says_so_and_still_copies():
    layout = MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_len=2, kv_len=2)
    with pytest.raises(LayoutError, match=r"mask_mod must pickle to pickle its layout, got .*top level of a module"):
        pickle.dumps({"layout": layout})
    assert torch.equal(copy.deepcopy(layout).to_dense(), layout.to_dense())


@every_layout
def test_rows_in_blocks_equal_the_whole(layout, monkeypatch):
    whole, rows, unseen = layout.to_dense(), ~layout.to_dense().any(-1), ~layout.to_dense().any(-2)
    monkeypatch.setattr(base, "ROW_BLOCK", 3 * layout.batch * layout.heads * layout.kv_len)
    assert torch.equal(layout.to_dense(), whole)
    assert torch.equal(layout.rows_without_keys().expand(rows.shape), rows)
    assert torch.equal(layout.unseen_keys().expand(unseen.shape), unseen)
    assert torch.equal(layout.dense_rows(1, 2), whole[:, :, 1:2])


@pytest.mark.parametrize(
    "name",
    ["window", "window of two sides", "packed", "block causal", "tree", "sink tokens", "union", "mask_mod of parts"],
)
def test_layouts_are_inputs_of_compiled_functions(name):
    layout = LAYOUTS[name]

    def asked(layout):
        bands = layout.to_bands()
        return (
            layout.to_dense(),
            layout.rows_without_keys(),
            layout.unseen_keys(),
            bands if bands is None else bands + 0,
        )

    inside = torch.compile(asked, fullgraph=True, backend="eager")(layout)
    for got, want in zip(inside, asked(layout), strict=True):
        assert got is want is None or torch.equal(got.expand(want.shape), want)


def test_other_documents_do_not_compile_again():
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def rows(layout):
        return layout.to_dense(), layout.to_blocks().sum(0)

    for lengths in ([3, 5], [1, 1, 6], [8], [2, 2, 2, 2], [4, 4]):
        rows(MaskLayout.packed(lengths))
    assert counter.frame_count <= 2


def test_layouts_are_made_and_combined_inside_compiled_functions():
    def combined(ids):
        packed = MaskLayout.packed(document_ids=ids, validate=False)
        layout = packed.with_window(2) & MaskLayout.causal(ids.shape[1])
        return layout.select_queries(slice(2, None)).to_dense()

    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert torch.equal(torch.compile(combined, fullgraph=True, backend="eager")(ids), combined(ids))


def test_narrowing_in_a_compiled_function_keeps_the_blocks():
    layout = MaskLayout.packed([4, 4])
    table = torch.compile(lambda layout: layout.with_window(2).to_blocks() + 0, fullgraph=True, backend="eager")(layout)
    assert torch.equal(table, layout.to_blocks())


class Masks(torch.nn.Module):
    def forward(self, ids, valid):
        packed = MaskLayout.packed(document_ids=ids, validate=False)
        padded = MaskLayout.padded(valid, window=3, validate=False)
        return (packed & padded).to_dense(), packed.rows_without_keys(), padded.unseen_keys()


@pytest.mark.parametrize("strict", [True, False])
def test_constructors_are_exported_with_symbolic_lengths(strict):
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(
        Masks(),
        (torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, dtype=torch.bool)),
        dynamic_shapes={"ids": {1: size}, "valid": {1: size}},
        strict=strict,
    )
    inputs = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[False, True, True, True, True, False]])
    for exported, direct in zip(program.module()(*inputs), Masks()(*inputs), strict=True):
        assert torch.equal(exported, direct.expand(exported.shape))


class Asked(torch.nn.Module):
    def forward(self, q, ids, valid):
        mask = StructuredMask(q_segments=ids, kv_segments=ids, kv_valid=valid)
        layout = MaskLayout(ids.shape[1], ids.shape[1], visibility=mask, validate=False)
        return layout.to_dense().expand(AttentionRequest.of(q, q, q).batch, -1, -1, -1) & True


@pytest.mark.parametrize("strict", [True, False])
def test_a_layout_and_a_request_are_exported_with_a_symbolic_batch(strict):
    def inputs(rows):
        ids = torch.arange(4).expand(rows, 4) // 2
        return torch.zeros(rows, 1, 4, 8), ids, ids > 0

    program = torch.export.export(
        Asked(), inputs(3), dynamic_shapes=[{0: torch.export.Dim("rows", min=2, max=64)}] * 3, strict=strict
    )
    assert torch.equal(program.module()(*inputs(5)), Asked()(*inputs(5)))


def test_values_on_a_device_without_data_are_never_read():
    positions = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    mask = StructuredMask(causal=True, window=3, q_positions=positions, kv_positions=positions)
    layout = MaskLayout(q_len=6, kv_len=6, visibility=mask, active_queries=positions > 0)
    assert layout.to_blocks() is None
    for result in (
        layout.to_dense(),
        layout.rows_without_keys(),
        layout.unseen_keys(),
        layout.with_window(2).select_queries(slice(1, 4)).select_keys([0, 5]).to_dense(),
        (layout & MaskLayout.causal(6)).to_dense(device="meta"),
        MaskLayout.packed(torch.zeros(2, device="meta", dtype=torch.int32), kv_len=6, validate=False).to_dense(),
    ):
        assert result.device.type == "meta"


def test_blocks_stay_on_the_host_when_a_layout_moves():
    layout = MaskLayout.packed([3, 3])
    moved = layout.to("meta")
    assert moved.device == torch.device("meta")
    assert torch.equal(moved.to_blocks(), layout.to_blocks())
    assert not moved.may_have_fully_masked_rows
    assert moved.with_window(1).to_blocks()[1:].tolist() == layout.with_window(1).to_blocks()[1:].tolist()
    assert moved.rows_without_keys().device.type == "meta"


def test_a_layout_without_tensors_serves_every_device():
    layout = MaskLayout.causal(4)
    assert layout.device is None
    assert layout.to("meta") is layout
    assert layout.to_dense("meta").device.type == "meta"


def test_layouts_keep_the_default_device_and_dtype_out():
    with torch.device("meta"):
        layout = MaskLayout.packed([2, 2], window=1)
        assert layout.device == torch.device("cpu")
        assert layout.to_blocks()[1:, 1:3].tolist() == [[0, 2], [2, 4]]
        assert layout.to_dense().device.type == "cpu"
        assert not layout.rows_without_keys().any()
        assert not layout.unseen_keys().any()
        assert MaskLayout.causal(2).draw() == "#-\n##"


def test_layouts_compare_by_identity_and_never_change():
    layout = MaskLayout.packed([2, 2])
    assert layout != MaskLayout.packed([2, 2])
    assert {layout: 1}[layout] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.q_len = 3
    some = torch.tensor([[True, True, False, False]])
    assert dataclasses.replace(layout, active_queries=some).may_have_fully_masked_rows


class Largest(TorchDispatchMode):
    """Remembers the largest integer tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.dtype in {torch.int32, torch.int64} and not func.is_view:
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("form", ["structured", "mask_mod"])
def test_no_integer_temporary_is_as_large_as_the_mask(form, monkeypatch):
    monkeypatch.setattr(base, "ROW_BLOCK", 2**14)
    size = 512
    if form == "structured":
        positions = torch.arange(size)[None]
        mask = StructuredMask(causal=True, window=100, chunk_size=300, q_positions=positions, kv_positions=positions)
        layout = MaskLayout(q_len=size, kv_len=size, visibility=mask)
    else:
        layout = MaskLayout.from_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0, q_len=size, kv_len=size)
    with Largest() as largest:
        layout.to_dense()
    assert 0 < largest.elements <= 2**14


def test_fully_masked_rows_and_unseen_keys_of_a_structure_are_linear():
    layout = MaskLayout.causal(100_000, window=512)
    with Largest() as largest:
        assert not layout.rows_without_keys().any()
        assert not layout.unseen_keys().any()
    assert largest.elements <= 1_000_000


@pytest.mark.parametrize(
    "operation, searches",
    [
        (lambda layout: layout.with_window(2), 1),
        (lambda layout: layout.with_window(2**40), 0),
        (lambda layout: layout.expand(3), 0),
        (lambda layout: layout.to("meta"), 0),
        (lambda layout: layout & MaskLayout.causal(6), 2),  # the other layout's own
        (lambda layout: layout.select_queries(slice(1, 4)), 1),
    ],
    ids=["window", "window beyond every distance", "expand", "to", "and", "select"],
)
def test_an_operation_looks_for_blocks_only_where_they_do_not_follow(operation, searches, monkeypatch):
    layout, found = MaskLayout.packed([2, 4]), []

    def find(*arguments):
        found.append(arguments)
        return find_table(*arguments)

    find_table = known.find_table
    monkeypatch.setattr(known, "find_table", find)
    assert operation(layout).to_blocks() is not None
    assert len(found) == searches


IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
OF_TENSORS = {
    "padded": lambda: MaskLayout.padded(IDS < 2),
    "padded by lengths": lambda: MaskLayout.padded(lengths=torch.tensor([4, 6]), kv_len=6),
    "lengths": lambda: MaskLayout.packed(torch.tensor([[2, 4], [3, 3]])),
    "offsets": lambda: MaskLayout.packed(cu_seqlens=torch.tensor([0, 2, 6])),
    "documents": lambda: MaskLayout.packed(document_ids=IDS),
    "scattered documents": lambda: MaskLayout.packed(document_ids=torch.tensor([[0, 1, 0, 1, 1, 0]])),
    "positions": lambda: MaskLayout.packed(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]), active_queries=IDS < 1),
    "prefix": lambda: MaskLayout.prefix_lm(torch.tensor([3, 1]), 6),
    "fields": lambda: MaskLayout(
        6, 6, visibility=StructuredMask(causal=True, kv_valid=IDS < 3, q_segments=IDS, kv_segments=IDS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("build", OF_TENSORS.values(), ids=OF_TENSORS.keys())
def test_a_tensor_on_a_device_is_read_once_and_by_no_operation(build, monkeypatch):
    want, read = build().to_blocks(), []

    def copied(value, *, sync):
        read.append(value)
        return value.clone() if sync else None

    for module in (checks, known):
        monkeypatch.setattr(module, "on_host", copied)
    layout = build()
    assert len({id(value) for value in read}) == len(read) <= 2
    other, count = MaskLayout.causal(6), len(read)
    for derived in (
        layout.with_window(2), layout & other, other & layout, layout.select_queries(slice(1, 4)),
        layout.select_keys(slice(0, 4)), layout.expand(layout.batch + (layout.batch == 1)), layout.to("meta"),
    ):  # fmt: skip
        assert derived._known.lowered or not isinstance(derived.visibility, StructuredMask)
    assert len(read) == count
    assert torch.equal(layout.to_blocks(), want) if want is not None else layout.to_blocks() is None
