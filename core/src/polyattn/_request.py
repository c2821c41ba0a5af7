"""What one attention call asks for, and why a backend may refuse it.

``AttentionRequest`` holds everything that a backend must know before it sees tensor data: sizes,
dtype, device and features. It is a value (frozen, hashable), so equal requests share prepared state.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from polyattn._errors import AttentionInputError
from polyattn.messages import is_number, shown

if TYPE_CHECKING:
    import torch


_MOST_FLOAT32 = 3.4028234663852886e38
_WIDEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """Everything but the mask that one attention call asks for.

    Attributes:
        batch: B of the tensors; a layout of batch 1 is expanded to it.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv; ``heads % kv_heads == 0``.
        head_dim: width D of queries and keys.
        v_head_dim: width Dv of values.
        dtype: dtype of q, k and v after the autocast rule.
        device: device of q, k and v, index included.
        scale: factor of the scores; ``None`` means ``head_dim ** -0.5`` and is resolved at construction.
        dropout_p: probability of dropping an attention weight; acts only when ``training``.
        training: whether the caller trains.
        softcap: ``c`` in ``c * tanh(scores / c)``, or ``None``.
        has_bias: whether a bias will be given to ``attend``.
        has_sinks: whether sink logits will be given to ``attend``.
        needs_grad: whether gradients into any tensor may be asked for.
        needs_bias_grad: whether gradients into the bias may be asked for.
        needs_lse: whether the log-sum-exp is returned.
        needs_lse_grad: whether gradients flow through the log-sum-exp.
        deterministic: whether only deterministic kernels may run.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None = None
    dropout_p: float = 0.0
    training: bool = False
    softcap: float | None = None
    has_bias: bool = False
    has_sinks: bool = False
    needs_grad: bool = False
    needs_bias_grad: bool = False
    needs_lse: bool = False
    needs_lse_grad: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        import torch

        problems = []
        for name in ("batch", "heads", "kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            least = 0 if name == "batch" else 1
            if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or value < least:
                problems.append(f"{name} must be an int >= {least}, got {shown(value)}")
            elif name.endswith("dim") and value > _WIDEST:
                problems.append(f"{name} must be at most {_WIDEST}, got {shown(value)}")
        if not problems and self.heads % self.kv_heads:
            problems.append(
                f"heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}"
            )
        if not isinstance(self.dtype, torch.dtype):
            problems.append(f"dtype must be a torch.dtype, got {shown(self.dtype)}")
        if not isinstance(self.device, torch.device):
            problems.append(f"device must be a torch.device, got {shown(self.device)}; make one with torch.device(...)")
        for name in ("scale", "dropout_p", "softcap"):
            value = getattr(self, name)
            if isinstance(value, int) and is_number(value):
                object.__setattr__(self, name, float(value))
        if self.scale is None:
            if not problems:
                object.__setattr__(self, "scale", self.head_dim**-0.5)
        elif not self._is_finite(self.scale):
            problems.append(f"scale must be a finite number or None, got {shown(self.scale)}{self._limit(self.scale)}")
        if not is_number(self.dropout_p) or not 0.0 <= self.dropout_p < 1.0:
            problems.append(f"dropout_p must lie in [0, 1), got {shown(self.dropout_p)}")
        if self.softcap is not None and not (self._is_finite(self.softcap) and self.softcap > 0):
            problems.append(
                "softcap must be a positive finite number or None, got "
                f"{shown(self.softcap)}{self._limit(self.softcap)}; None turns it off"
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.needs_lse_grad and not self.needs_lse:
            problems.append("needs_lse_grad must come with needs_lse=True, got needs_lse=False")
        if self.needs_bias_grad and not self.has_bias:
            problems.append("needs_bias_grad must come with has_bias=True, got has_bias=False")
        if problems:
            raise AttentionInputError("; ".join(problems))

    def _is_finite(self, value: object) -> bool:
        """Whether a number is one also in the dtype in which scores are computed."""
        return is_number(value) and (self._in_float64 or abs(value) <= _MOST_FLOAT32)  # type: ignore[arg-type]

    def _limit(self, value: object) -> str:
        """What a finite number that is refused exceeds."""
        if self._is_finite(value) or not is_number(value):
            return ""
        return f", which is not finite in FP32, in which scores are computed (at most {_MOST_FLOAT32:.4g})"

    @property
    def _in_float64(self) -> bool:
        import torch

        return self.dtype is torch.float64

    @property
    def dropout(self) -> float:
        """The dropout probability that acts: ``dropout_p`` while training, else 0."""
        return self.dropout_p if self.training else 0.0

    @property
    def group(self) -> int:
        """How many query heads share one KV head."""
        return self.heads // self.kv_heads

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        training: bool = False,
        softcap: float | None = None,
        has_bias: bool | None = None,
        has_sinks: bool | None = None,
        needs_grad: bool | None = None,
        needs_bias_grad: bool | None = None,
        needs_lse: bool = False,
        needs_lse_grad: bool | None = False,
        deterministic: bool | None = None,
    ) -> AttentionRequest:
        """Read the request off the tensors of a call.

        Args:
            q: ``[B, Hq, Q, D]``.
            k: ``[B, Hkv, K, D]``.
            v: ``[B, Hkv, K, Dv]``.
            bias: the bias of the call, if it is at hand; gives ``has_bias`` and ``needs_bias_grad``.
            sinks: the sink logits of the call, if they are at hand; gives ``has_sinks``.

        Every other keyword is the attribute of that name; ``None`` means: read it off the tensors and
        off torch's modes (grad mode, autocast, deterministic algorithms).

        Raises:
            AttentionInputError: shapes, dtypes or devices contradict each other, or a scalar is out of range.
        """
        import torch

        from polyattn._tensors import check_qkv, compute_dtype

        check_qkv(q, k, v)

        grad = torch.is_grad_enabled()
        bias_grad = grad and getattr(bias, "requires_grad", False)
        scores_grad = needs_lse and (bias_grad or (grad and (q.requires_grad or k.requires_grad)))
        any_grad = bias_grad or (
            grad and (q.requires_grad or k.requires_grad or v.requires_grad or getattr(sinks, "requires_grad", False))
        )
        return cls(
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            dtype=compute_dtype(q, k, v),
            device=q.device,
            scale=scale,
            dropout_p=dropout_p,
            training=training,
            softcap=softcap,
            has_bias=(bias is not None) if has_bias is None else has_bias,
            has_sinks=(sinks is not None) if has_sinks is None else has_sinks,
            needs_grad=any_grad if needs_grad is None else needs_grad,
            needs_bias_grad=bias_grad if needs_bias_grad is None else needs_bias_grad,
            needs_lse=needs_lse,
            needs_lse_grad=scores_grad if needs_lse_grad is None else needs_lse_grad,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        )


_FLAGS = tuple(field.name for field in dataclasses.fields(AttentionRequest) if field.type == "bool")
