"""Index-based mechanisms: they read the structure or nothing, never the content of x or z."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.compiler import is_compiling

from structconv.bases import dense
from structconv.bases.base import Basis
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.shapes import check_positive

__all__ = ["Identity"]

#: A value of a few numbers.
_identity = lru_cache(maxsize=64)(dense.Identity)


class Identity(Mechanism):
    """Each output is its own input, `size` times; a layer over it is a 1x1 convolution.

    Args:
        size: K.

    Example:

        >>> from structconv import Conv, Identity
        >>> layer = Conv(Identity(), 4, 8)                         # a 1x1 convolution
        >>> layer(torch.randn(5, 4)).shape
        torch.Size([5, 8])
    """

    reads = ()
    batching = "structure"

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self._size = check_positive("Identity", "size", size)

    @property
    def size(self) -> int:
        return self._size

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        return "x"

    def forward(self, inputs: Inputs) -> Basis:
        entries, device = inputs.x.shape[-2], inputs.x.device
        make = _identity if type(entries) is int and not is_compiling() else dense.Identity
        return make(entries, self._size, device)
