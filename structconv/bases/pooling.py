"""Pooling: a window summed into one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.dense import check_heads
from structconv.bases.pairs import Pairs
from structconv.bases.shift import Shift, ShiftTransposed
from structconv.structures.batching import GridBatch
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid

__all__ = ["Pooling"]


@value
class Pooling(Basis):
    """One matrix, scale sum_k shift_k: the mean over a window, or its transpose.

    Args:
        shift: the window, as a strided `Shift`, or the transpose of one.
        scale: 1 over the number of positions, for the mean.

    Example:

        >>> from structconv import Grid, Shift
        >>> from structconv.bases import Pooling
        >>> window = Shift(Grid(4), [0, -1], stride=2)
        >>> Pooling(window, 0.5).dense()[0]
        tensor([[0.5000, 0.0000],
                [0.5000, 0.0000],
                [0.0000, 0.5000],
                [0.0000, 0.5000]])
    """

    keeps_key = True

    shift: Shift | ShiftTransposed
    scale: float = 1.0
    size = 1

    @property
    def num_inputs(self) -> int:
        return self.shift.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.shift.num_outputs

    _shown = "Pooling({0.shift!r}, scale={0.scale:g})"

    @property
    def input_grid(self) -> Grid | GridBatch:
        """The grid of the M inputs."""
        return self.shift.input_grid

    @property
    def output_grid(self) -> Grid | GridBatch:
        """The grid of the N outputs."""
        return self.shift.output_grid

    @property
    def device(self) -> torch.device:
        return self.shift.device

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.scale * self.shift.dense(dtype).sum(-3, keepdim=True)

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        return self.scale * self.shift.synthesis(r).unsqueeze(-3)

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Pooling")
        return self.apply(x.unsqueeze(-3))

    def synthesis(self, r: Tensor) -> Tensor:
        return self.apply(r).squeeze(-3)

    def pattern(self) -> Graph | None:
        return self.shift.pattern()

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self.scale * self.shift.evaluate(pairs).sum(0, keepdim=True)

    def _transposed(self) -> Basis:
        transposed = self.shift._transposed()
        assert isinstance(transposed, Shift | ShiftTransposed)
        return Pooling(transposed, self.scale)
