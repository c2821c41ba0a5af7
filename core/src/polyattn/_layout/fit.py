"""Whether the parts of a layout fit each other, and the batch and heads that follow from them."""

from __future__ import annotations

from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import check_bool, check_int
from polyattn._layout.structured import StructuredMask


def fit(
    q_len: int,
    kv_len: int,
    batch: int | None,
    heads: int | None,
    visibility: object,
    active_queries: Tensor | None,
) -> tuple[int, int]:
    """Check that the parts of a layout fit each other; batch and heads, read off the tensors where not given.

    Raises:
        LayoutError: one message with every size or device that does not fit.
    """
    check_int("q_len", q_len)
    check_int("kv_len", kv_len)
    for name, given in (("batch", batch), ("heads", heads)):
        if given is not None:
            check_int(name, given)
    tensors: dict[str, Tensor] = {}
    if isinstance(visibility, Tensor):
        check_bool("visibility", visibility, "[B|1, H|1, Q, K]", (4,))
        tensors = {"visibility": visibility}
    elif isinstance(visibility, StructuredMask):
        tensors = visibility.tensors()
    elif not callable(visibility):
        got = type(visibility).__name__
        raise LayoutError(f"visibility must be a Bool tensor, a mask_mod function or a StructuredMask, got {got}")
    if active_queries is not None:
        check_bool("active_queries", active_queries, "[B|1, Q]", (2,))
        tensors = {**tensors, "active_queries": active_queries}
    problems = []
    for name, value in tensors.items():
        want = list(value.shape[:1])
        if name == "visibility":
            want = [*value.shape[:2], q_len, kv_len]
        elif name != "prefix_lengths":
            want.append(kv_len if name.startswith("kv_") else q_len)
        elif value.dim() == 2:
            want.append(value.shape[1])
        if list(value.shape) != want:
            problems.append(f"{name} must fit q_len={q_len} and kv_len={kv_len}: shape {want}, got {list(value.shape)}")
    rows = _one_size("batch", batch, {name: value.shape[0] for name, value in tensors.items()}, problems)
    per_head = {"visibility": visibility.shape[1]} if isinstance(visibility, Tensor) else {}
    if isinstance(visibility, StructuredMask) and heads not in (None, 1):
        problems.append(f"heads must be 1 with a StructuredMask, which is the same for all heads, got {heads}")
    count = _one_size("heads", heads, per_head, problems)
    devices = {name: value.device for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} {device}" for name, device in devices.items())
        problems.append(f"all tensors of a layout must be on one device, got {where}")
    if problems:
        raise LayoutError("; ".join(problems))
    return rows, count


def _one_size(name: str, given: int | None, found: dict[str, int], problems: list[str]) -> int:
    """The size that all agree on, where 1 broadcasts; a disagreement is added to ``problems``."""
    sizes = {**({} if given is None else {name: given}), **found}
    distinct = {size for size in sizes.values() if size != 1}
    # A given size is what the layout has: a tensor may broadcast to it, it does not broadcast to a tensor.
    if len(distinct) > 1 or (given == 1 and distinct):
        got = ", ".join(f"{key} {size}" for key, size in sizes.items())
        problems.append(f"{name} must be one number, where a tensor's 1 broadcasts, got {got}")
    return max(distinct, default=1) if given is None else given
