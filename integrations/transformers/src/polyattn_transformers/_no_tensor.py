"""What travels in the place of a mask tensor and says so when it is used as one."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from polyattn import LayoutError
from polyattn.messages import shown


def as_device(device: object) -> torch.device:
    """A device by itself or by its name.

    Raises:
        LayoutError: it is neither.
    """
    text = f"device must be a device of torch, such as 'cuda' or torch.device('cuda'), got {shown(device)}"
    if not isinstance(device, (str, torch.device)):
        raise LayoutError(text)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise LayoutError(text) from error


class NotATensorError(LayoutError, AttributeError, TypeError):
    """What is not a tensor was used as one; an ``AttributeError`` too, since ``hasattr`` must be able to ask."""


class NoTensor:
    """Refuses every use as a tensor that a subclass does not answer itself.

    Attributes:
        what: the subject of the refusals.
        cure: what to do, after the colon.
    """

    __slots__ = ()

    what: ClassVar[str]
    cure: ClassVar[str]

    def __getattr__(self, name: str) -> NoReturn:
        raise NotATensorError(self._refusal(f"has no attribute {name!r}"))

    def __getitem__(self, index: object) -> NoReturn:
        raise NotATensorError(self._refusal("cannot be indexed"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (bool, int, float, torch.Tensor)):
            raise NotATensorError(self._refusal("cannot be compared with numbers"))
        return NotImplemented

    __hash__ = object.__hash__

    def _operate(self, *_: object) -> NoReturn:
        raise NotATensorError(self._refusal("cannot be computed with"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operate
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = _operate
    __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = __float__ = __int__ = _operate

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        """Refuse every function of torch."""
        raise NotATensorError(cls._refusal(f"cannot be given to torch's {getattr(function, '__name__', function)}"))

    @classmethod
    def _refusal(cls, fact: str) -> str:
        return f"{cls.what} is not a tensor and {fact}: {cls.cure}"
