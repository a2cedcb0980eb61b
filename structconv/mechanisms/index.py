"""Index-based mechanisms: they read the structure, or nothing, and never the content of x or z."""

from __future__ import annotations

from typing import Any

from structconv.bases import dense
from structconv.bases.base import Basis
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.shapes import check_positive

__all__ = ["Identity"]


class Identity(Mechanism):
    """Each output is its own input, `size` times; a layer over it is a 1x1 convolution.

    Args:
        size: K.
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
        return dense.Identity(inputs.num_inputs, self._size, inputs.device)
