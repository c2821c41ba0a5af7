"""One attention call as data, and how to run it: the unit that every check of the kit is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyattn import AttentionRequest, AttentionResult, MaskLayout
from polyattn_conformance.failure import CheckFailed, require

Call = Callable[..., AttentionResult]
#: What a tensor's gradient is called among the results.
GRADIENT = "gradient of {}"
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Mode:
    """What is asked of one call.

    Attributes:
        grad: gradients into every tensor of the case.
        lse: the log-sum-exp.
        lse_grad: gradients through it as well.
    """

    grad: bool = False
    lse: bool = False
    lse_grad: bool = False

    def __str__(self) -> str:
        lse = "output and LSE" if self.lse else "output"
        if not self.grad:
            return f"{lse} without gradients"
        return f"gradients of {lse}" if self.lse_grad or not self.lse else "gradients of the output, LSE returned"


INFER = Mode()
INFER_LSE = Mode(lse=True)
TRAIN = Mode(grad=True)
TRAIN_LSE = Mode(grad=True, lse=True, lse_grad=True)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Case:
    """Tensors, mask and scalars of one call, with the gradients that come back into its results.

    Attributes:
        layout: the mask.
        q: ``[B, Hq, Q, D]``.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, Dv]``.
        grad_output: ``[B, Hq, Q, Dv]``, incoming gradient of the output.
        grad_lse: ``[B, Hq, Q]``, incoming gradient of the LSE.
        bias: as given to ``attend``.
        sinks: as given to ``attend``.
        scale: as in the request.
        softcap: as in the request.
        leaves: names of the tensors whose gradients are asked for in modes with gradients.
    """

    layout: MaskLayout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_output: Tensor
    grad_lse: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    leaves: tuple[str, ...] = DIFFERENTIABLE

    def request(self, mode: Mode, **changes: object) -> AttentionRequest:
        """The request of this call in ``mode``; ``changes`` replace its attributes."""
        with_bias_grad = mode.grad and self.bias is not None and "bias" in self.leaves
        request = AttentionRequest.of(
            self.q,
            self.k,
            self.v,
            bias=self.bias,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
            needs_grad=mode.grad,
            needs_bias_grad=with_bias_grad,
            needs_lse=mode.lse,
            needs_lse_grad=mode.lse_grad,
        )
        return dataclasses.replace(request, **changes) if changes else request  # type: ignore[arg-type]

    @property
    def visible(self) -> Tensor:
        """``Bool[B|1, H|1, Q, K]`` from the layout."""
        return self.layout.to_dense(self.q.device)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in self.tensors().items())
        scalars = f"scale {self.scale}, softcap {self.softcap}, gradients of {', '.join(self.leaves)}"
        return f"<{sizes}, {self.q.dtype}, {scalars}, {self.layout.describe()}>"

    def tensors(self) -> dict[str, Tensor]:
        """The inputs that are there, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def extras(self) -> dict[str, Tensor]:
        """The bias and the sinks, where there are any."""
        return {name: x for name, x in self.tensors().items() if name in {"bias", "sinks"}}

    def change(self, **changes: object) -> Case:
        """The case with some attributes replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype) -> Case:
        """The case with q, k, v and the output's gradient in ``dtype``."""
        return self.change(
            q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), grad_output=self.grad_output.to(dtype)
        )


def make_case(
    layout: MaskLayout,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    seed: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    bias: tuple[int, ...] | None = None,
    sinks: bool = False,
) -> Case:
    """A case with standard normal tensors.

    Args:
        layout: its batch and heads, where above 1, win over ``batch`` and ``heads``.
        dtype: of q, k, v, bias and sinks.
        device: of everything.
        batch: B.
        heads: Hq.
        kv_heads: Hkv; ``None`` means Hq.
        head_dim: D.
        v_head_dim: Dv; ``None`` means D.
        seed: of the random numbers, which are the same on every device and in every dtype up to rounding.
        scale: as in the request.
        softcap: as in the request.
        bias: shape of a random bias, or ``None`` for no bias.
        sinks: whether there are random sink logits.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    batch = layout.batch if layout.batch > 1 else batch
    heads = layout.heads if layout.heads > 1 else heads
    kv_heads = heads if kv_heads is None else kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return Case(
        layout=layout.to(torch.device(device)),
        q=normal(batch, heads, layout.q_len, head_dim),
        k=normal(batch, kv_heads, layout.kv_len, head_dim),
        v=normal(batch, kv_heads, layout.kv_len, v_head_dim),
        grad_output=normal(batch, heads, layout.q_len, v_head_dim),
        grad_lse=normal(batch, heads, layout.q_len).to(torch.promote_types(dtype, torch.float32)),
        bias=None if bias is None else normal(*bias),
        sinks=normal(heads) if sinks else None,
        scale=scale,
        softcap=softcap,
    )


def evaluate(call: Call, case: Case, mode: Mode) -> dict[str, Tensor]:
    """Run ``call(q, k, v, bias=, sinks=)`` on a case.

    Returns:
        ``output``, ``lse`` when asked for, and the gradients that were asked for, by name.

    Raises:
        CheckFailed: something else than a result came back, a result is missing or lies in the memory of an input or of
            itself, it requires grad where none was asked for, or the call wrote into its inputs.
    """
    inputs = {name: x.detach() for name, x in case.tensors().items()}
    given = {**inputs, "the gradient of output": case.grad_output, "the gradient of lse": case.grad_lse}
    before = {name: x.clone() for name, x in given.items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if mode.grad and name in case.leaves}
    with torch.set_grad_enabled(mode.grad):
        result = call(inputs["q"], inputs["k"], inputs["v"], bias=inputs.get("bias"), sinks=inputs.get("sinks"))
    if not isinstance(result, AttentionResult):
        raise CheckFailed(f"attend must return an AttentionResult, got {type(result).__name__}")
    values = {"output": result.output}
    if mode.lse:
        if result.lse is None:
            raise CheckFailed("needs_lse was asked for, and lse is None")
        values["lse"] = result.lse
    for name, x in values.items():
        _check_memory(name, x, inputs)
        require(mode.grad or not x.requires_grad, f"{name} requires grad although nothing that went in does")
    if leaves:
        values |= _gradients(values, leaves, case, mode)
    for name, x in given.items():
        require(torch.equal(x.nan_to_num(), before[name].nan_to_num()), f"attend wrote into {name}")
    return {name: x.detach() for name, x in values.items()}


def _check_memory(name: str, x: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Whoever changes a result in place must change nothing else."""
    if not isinstance(x, Tensor):
        raise CheckFailed(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.numel():
        return
    where = x.untyped_storage().data_ptr()
    shared = [other for other, y in inputs.items() if y.untyped_storage().data_ptr() == where]
    require(not shared, f"{name} lies in the memory of {', '.join(shared)}; whoever changes one changes the other")
    repeated = [size for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and stride == 0]
    require(not repeated, f"{name} of shape {list(x.shape)} repeats elements: its strides are {list(x.stride())}")


def _gradients(values: Mapping[str, Tensor], leaves: Mapping[str, Tensor], case: Case, mode: Mode) -> dict[str, Tensor]:
    incoming = {"output": case.grad_output}
    if mode.lse_grad:
        incoming["lse"] = case.grad_lse.to(values["lse"].dtype)
    for name in incoming:
        require(
            values[name].requires_grad, f"{name} does not require grad although gradients through it were asked for"
        )
    gradients = torch.autograd.grad(
        [values[name] for name in incoming], list(leaves.values()), list(incoming.values()), materialize_grads=True
    )
    return {GRADIENT.format(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}
