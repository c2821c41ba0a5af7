"""Whether the parts of a layout fit each other, and the batch and heads that follow from them."""

from __future__ import annotations

from torch import Tensor

from polyattn._errors import LayoutError
from polyattn._layout.checks import check_bool, check_int, check_ints, check_positions
from polyattn._layout.structure import Structure
from polyattn._layout.structured import StructuredMask


def infer_sizes(
    q_len: int,
    kv_len: int,
    batch: int | None,
    heads: int | None,
    visibility: object,
    active_queries: Tensor | None,
    positions: tuple[Tensor | None, Tensor | None] = (None, None),
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
    tensors: dict[str, tuple[Tensor, str]] = {}
    strange = isinstance(visibility, StructuredMask) and type(visibility) is not StructuredMask
    if isinstance(visibility, Tensor):
        check_bool("visibility", visibility, "[B|1, H|1, Q, K]", (4,))
        tensors = {"visibility": (visibility, "BHQK")}
    elif isinstance(visibility, Structure) and not strange:
        tensors = {name: (value, visibility.axes(name)) for name, value in visibility.tensors().items()}
    elif strange or not callable(visibility):
        got = type(visibility).__name__
        if strange:
            got += ", a subclass whose own rules nobody here knows; give them as a mask_mod function and join it with &"
        raise LayoutError(f"visibility must be a Bool tensor, a mask_mod function or a StructuredMask, got {got}")
    if active_queries is not None:
        check_bool("active_queries", active_queries, "[B|1, Q]", (2,))
        tensors["active_queries"] = active_queries, "BQ"
    problems: list[str] = []
    if positions[0] is not None or positions[1] is not None:
        tensors |= _positions(visibility, *positions)
    for name, (value, axes) in tensors.items():
        if not axes:
            problems.append(f"{name} must begin with q_ or kv_, which says what its second dimension runs over")
        want = [{"Q": q_len, "K": kv_len}.get(axis, size) for axis, size in zip(axes, value.shape, strict=False)]
        if axes and list(value.shape) != want:
            problems.append(f"{name} must fit q_len={q_len} and kv_len={kv_len}: shape {want}, got {list(value.shape)}")
    rows = _one_size("batch", batch, {name: value.shape[0] for name, (value, _) in tensors.items()}, problems)
    per_head = {name: value.shape[1] for name, (value, axes) in tensors.items() if axes[1:2] == "H"}
    if isinstance(visibility, Structure) and not per_head and heads not in (None, 1):
        problems.append(
            f"heads must be 1 with a {type(visibility).__name__}, which is the same for all heads, got {heads}"
        )
    count = _one_size("heads", heads, per_head, problems)
    devices = {name: value.device for name, (value, _) in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} {device}" for name, device in devices.items())
        problems.append(f"all tensors of a layout must be on one device, got {where}")
    if problems:
        raise LayoutError("; ".join(problems))
    return rows, count


def _positions(visibility: object, q: Tensor | None, k: Tensor | None) -> dict[str, tuple[Tensor, str]]:
    """The positions of a dense mask or ``mask_mod`` by name with their axes, checked by themselves."""
    named = (("q_positions", q, "BQ"), ("kv_positions", k, "BK"))
    given = {name: (value, axes) for name, value, axes in named if value is not None}
    if given and isinstance(visibility, Structure):
        raise LayoutError(
            f"{' and '.join(given)} must be fields of the StructuredMask, got them beside it; give them there"
        )
    for name, (value, axes) in given.items():
        check_ints(name, value, f"[B|1, {axes[1]}]", (2,))
    check_positions(q, k)
    return given


def _one_size(name: str, given: int | None, found: dict[str, int], problems: list[str]) -> int:
    """The size that all agree on, where 1 broadcasts; a disagreement is added to ``problems``."""
    sizes = {**({} if given is None else {name: given}), **found}
    distinct: list[int] = []  # not a set: the symbolic sizes of a traced graph have no hash
    for size in sizes.values():
        if size != 1 and size not in distinct:
            distinct.append(size)
    # A given size is what the layout has: a tensor may broadcast to it, it does not broadcast to a tensor.
    if len(distinct) > 1 or (given == 1 and distinct):
        got = ", ".join(f"{key} {size}" for key, size in sizes.items())
        problems.append(f"{name} must be one number, where a tensor's 1 broadcasts, got {got}")
    if given is None:  # Dynamo of torch 2.10 does not trace max(..., default=)
        return max(distinct) if distinct else 1
    return given
