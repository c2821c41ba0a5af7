"""What one attention call asks for: sizes, dtype, device and features, all that a backend must know before the data."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyattn._errors import AttentionInputError
from polyattn._tensors import check_qkv, compute_dtype
from polyattn.messages import is_number, shown

_MOST_FLOAT32 = torch.finfo(torch.float32).max
_WIDEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """Everything but the mask that one attention call asks for; a value, so that equal requests share prepared state.

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
        if self.scale is not None:
            problems += self._faults("scale", "a finite number or None")
        elif not problems:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        if not is_number(self.dropout_p) or not 0.0 <= self.dropout_p < 1.0:
            problems.append(f"dropout_p must lie in [0, 1), got {shown(self.dropout_p)}")
        if self.softcap is not None:
            problems += self._faults("softcap", "a positive finite number or None", "; None turns it off")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.needs_lse_grad and not self.needs_lse:
            problems.append("needs_lse_grad must come with needs_lse=True, got needs_lse=False")
        if self.needs_bias_grad and not self.has_bias:
            problems.append("needs_bias_grad must come with has_bias=True, got has_bias=False")
        if problems:
            raise AttentionInputError("; ".join(problems))

    def _faults(self, name: str, need: str, hint: str = "") -> list[str]:
        """What is wrong with a factor of the scores, which must be finite also in the dtype of the scores."""
        value, limit = getattr(self, name), ""
        if is_number(value):
            if self.dtype is not torch.float64 and abs(value) > _MOST_FLOAT32:
                limit = f", which is not finite in FP32, in which scores are computed (at most {_MOST_FLOAT32:.4g})"
            elif name == "scale" or value > 0:
                return []
        return [f"{name} must be {need}, got {shown(value)}{limit}{hint}"]

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
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
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
            bias: gives ``has_bias`` and ``needs_bias_grad``, if it is at hand.
            sinks: likewise ``has_sinks``.

        Every other keyword is the attribute of that name; ``None`` means: read it off the tensors and torch's modes
        (grad mode, autocast, deterministic algorithms).

        Raises:
            AttentionInputError: shapes, dtypes or devices contradict each other, or a scalar is out of range.
        """
        check_qkv(q, k, v)
        grad = torch.is_grad_enabled()
        bias_grad = grad and getattr(bias, "requires_grad", False)
        qk_grad = grad and (q.requires_grad or k.requires_grad)
        any_grad = bias_grad or qk_grad or (grad and (v.requires_grad or getattr(sinks, "requires_grad", False)))
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
            needs_lse_grad=needs_lse and (bias_grad or qk_grad) if needs_lse_grad is None else needs_lse_grad,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        )


_FLAGS = tuple(field.name for field in dataclasses.fields(AttentionRequest) if field.type == "bool")
