"""What a request reads off the tensors, and what it refuses."""

import dataclasses
import pickle

import pytest
import torch

from polyattn import AttentionInputError, AttentionRequest, Reason


def tensors(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 6), dtype=torch.float32, **options):
    return [torch.zeros(shape, dtype=dtype, **options) for shape in (q, k, v)]


def test_a_request_reads_sizes_dtype_and_modes_off_the_tensors():
    request = AttentionRequest.of(*tensors(requires_grad=True))
    assert (request.batch, request.heads, request.kv_heads, request.head_dim, request.v_head_dim) == (2, 4, 2, 8, 6)
    assert request.dtype is torch.float32
    assert request.device == torch.device("cpu")
    assert request.scale == 8**-0.5
    assert request.needs_grad
    assert not request.needs_lse_grad
    with torch.no_grad():
        assert not AttentionRequest.of(*tensors(requires_grad=True)).needs_grad


def test_equal_requests_are_one_key_and_survive_pickling():
    first, second = AttentionRequest.of(*tensors()), AttentionRequest.of(*tensors())
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first


def test_under_autocast_mixed_dtypes_become_the_autocast_dtype():
    q, k, _ = tensors()
    v = tensors(dtype=torch.bfloat16)[2]
    with torch.autocast("cpu", torch.bfloat16):
        assert AttentionRequest.of(q, k, v).dtype is torch.bfloat16
    with pytest.raises(AttentionInputError, match=r"q torch.float32, k torch.float32, v torch.bfloat16; cast them"):
        AttentionRequest.of(q, k, v)


def test_autocast_leaves_double_precision_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert AttentionRequest.of(*tensors(dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("autocast", [None, "cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_meta_tensors_make_a_request_inside_and_outside_autocast(autocast):
    q, k, v = tensors(device="meta")
    if autocast is None:
        assert AttentionRequest.of(q, k, v).device.type == "meta"
    else:
        with torch.autocast(autocast, torch.bfloat16):
            assert AttentionRequest.of(q, k, v).dtype is torch.float32


@pytest.mark.parametrize(
    "shapes, text",
    [
        ({"q": (2, 3, 5, 8)}, "Hq=3 and Hkv=2"),
        ({"q": (2, 1, 5, 8)}, "Hq=1 and Hkv=2"),
        ({"k": (2, 3, 7, 8)}, "same number of heads, got 3 and 2"),
        ({"k": (1, 2, 7, 8)}, "batch sizes must be equal, got 2, 1, 2"),
        ({"k": (2, 2, 7, 9)}, "q and k must have the same width, got 8 and 9"),
        ({"v": (2, 2, 6, 6)}, "k and v must have the same length, got 7 and 6"),
        ({"q": (4, 5, 8)}, r"must be \[B, Hq, Q, D\]"),
        ({"q": (2, 4, 5, 0), "k": (2, 2, 7, 0)}, "widths must be at least 1, got D=0"),
    ],
)
def test_contradicting_shapes_are_refused_by_name(shapes, text):
    with pytest.raises(AttentionInputError, match=text):
        AttentionRequest.of(*tensors(**shapes))


def test_every_fault_of_the_shapes_is_in_one_message():
    with pytest.raises(AttentionInputError) as caught:
        AttentionRequest.of(*tensors(q=(1, 3, 5, 8)))
    assert "batch sizes" in str(caught.value)
    assert "Hq=3" in str(caught.value)


def test_integers_and_lists_are_not_queries():
    with pytest.raises(AttentionInputError, match=r"must be float64, float32, bfloat16 or float16, got torch.int64"):
        AttentionRequest.of(*tensors(dtype=torch.int64))
    with pytest.raises(AttentionInputError, match=r"k must be a torch.Tensor, got list"):
        AttentionRequest.of(torch.zeros(1, 1, 1, 1), [1], torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize(
    "field, text",
    [
        ({"softcap": 0.0}, "softcap must be a positive finite number or None, got 0.0"),
        ({"softcap": -1.0}, "got -1.0"),
        ({"softcap": float("nan")}, "got nan"),
        ({"softcap": 10**400}, "softcap must be a positive finite number or None, got an int of 1329 bits"),
        (
            {"softcap": 1e39},
            r"got 1e\+39, which is not finite in FP32, in which scores are computed \(at most 3.403e\+38\)",
        ),
        ({"scale": -(10**400)}, "scale must be a finite number or None, got an int of 1329 bits"),
        ({"scale": 1e300}, r"got 1e\+300, which is not finite in FP32"),
        ({"scale": True}, "scale must be a finite number or None, got True"),
        ({"dropout_p": 10**400}, r"dropout_p must lie in \[0, 1\), got an int of 1329 bits"),
        ({"scale": float("inf")}, "scale must be a finite number or None, got inf"),
        ({"dropout_p": 1.0}, r"dropout_p must lie in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, "got -0.1"),
        ({"training": 1}, "training must be True or False, got 1"),
        ({"needs_lse": "no"}, "needs_lse must be True or False, got 'no'"),
        ({"needs_lse_grad": True}, "needs_lse_grad must come with needs_lse=True"),
        ({"needs_bias_grad": True}, "needs_bias_grad must come with has_bias=True"),
    ],
)
def test_scalars_out_of_range_are_refused(field, text):
    with pytest.raises(AttentionInputError, match=text):
        AttentionRequest.of(*tensors(), **field)


def test_fp64_takes_numbers_that_fp32_cannot_hold():
    assert AttentionRequest.of(*tensors(dtype=torch.float64), scale=1e300, softcap=10**300).softcap == 1e300


def test_a_whole_number_is_the_same_request_as_its_float():
    request = AttentionRequest.of(*tensors(), scale=2, softcap=30)
    assert request == AttentionRequest.of(*tensors(), scale=2.0, softcap=30.0)
    assert (type(request.scale), type(request.softcap)) == (float, float)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"dtype": "float32"}, "dtype must be a torch.dtype, got 'float32'"),
        ({"device": "cpu"}, "device must be a torch.device, got 'cpu'; make one with torch.device"),
        ({"head_dim": 10**700}, "head_dim must be at most 2147483647, got an int of 2326 bits"),
        ({"batch": -1}, "batch must be an int >= 0, got -1"),
        ({"heads": 3}, "heads must be a multiple of kv_heads, got heads=3 and kv_heads=2"),
    ],
)
def test_a_request_made_by_hand_is_checked_like_any_other(changes, text):
    with pytest.raises(AttentionInputError, match=text):
        dataclasses.replace(AttentionRequest.of(*tensors()), **changes)


@pytest.mark.parametrize(
    "wrong, text",
    [
        (
            lambda x: x.to_sparse(),
            r"q must be an ordinary dense tensor, got layout torch.sparse_coo; call .to_dense",
        ),
        (lambda x: torch.nested.nested_tensor([x[0]]), "q must be an ordinary dense tensor, got a nested tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_tensors_are_refused(wrong, text):
    q, k, v = tensors()
    with pytest.raises(AttentionInputError, match=text):
        AttentionRequest.of(wrong(q), k, v)


def test_dropout_acts_in_training_only():
    assert AttentionRequest.of(*tensors(), dropout_p=0.5).dropout == 0.0
    assert AttentionRequest.of(*tensors(), dropout_p=0.5, training=True).dropout == 0.5


def test_a_reason_reads_as_a_sentence_and_as_json():
    reason = Reason("no_lse", "lse", "needs_lse=True", "needs_lse=False", "use eager")
    assert str(reason) == "lse: got needs_lse=True, need needs_lse=False; use eager"
    assert reason.to_dict()["code"] == "no_lse"
