"""`Taps`: matrices whose outputs each read a few inputs, given by a table of indices and a table of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.dense import check_heads
from structconv.shapes import broadcast

__all__ = ["Taps"]


@value
class Taps(Basis):
    """A_kmn = sum_t weights_knt [index_knt = m]: T taps for each output, 2 K N T C flops and O(K N C) memory.

    Args:
        index: (..., K or 1, N, T) int64, the input of each tap; -1 reads nothing.
        weights: (..., K, N, T).
        inputs: M.

    Example:

        >>> from structconv.bases import Taps
        >>> Taps(torch.tensor([[[0], [0], [1]]]), torch.ones(1, 3, 1), 2).dense()[0]
        tensor([[1., 1., 0.],
                [0., 0., 1.]])
    """

    ENTRY_COUNTS = ("inputs",)

    index: Tensor
    weights: Tensor
    inputs: int

    @property
    def size(self) -> int:
        return self.weights.shape[-3]

    @property
    def num_inputs(self) -> int:
        return self.inputs

    @property
    def num_outputs(self) -> int:
        return self.weights.shape[-2]

    @property
    def taps(self) -> int:
        """T."""
        return self.weights.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(tuple(self.index.shape[:-3]), tuple(self.weights.shape[:-3]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        gap = r.new_zeros(()).expand(*r.shape[:-2], 1, r.shape[-1])
        padded, rows = torch.cat([r, gap], -2), self.index % (self.num_inputs + 1)
        y: Tensor | None = None
        for tap in range(self.taps):
            term = self._read(padded, rows[..., tap]) * self.weights[..., tap, None].to(r.dtype)
            y = term if y is None else y + term
        assert y is not None, "there is a tap"
        return y

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Taps")
        return self.apply(x.unsqueeze(-3))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        weights = self.weights if dtype is None else self.weights.to(dtype)
        shape = (*self.batch_shape, self.size, self.num_outputs, self.taps)
        rows = (self.index % (self.num_inputs + 1)).expand(shape).mT
        a = weights.new_zeros(*shape[:-2], self.num_inputs + 1, self.num_outputs)
        return a.scatter_add(-2, rows, weights.expand(shape).mT)[..., :-1, :]

    def _read(self, r: Tensor, rows: Tensor) -> Tensor:
        """The rows (..., K or 1, N) of r (..., K or 1, M + 1, C)."""
        if rows.numel() == rows.shape[-1]:
            return r.index_select(-2, rows.flatten())
        lead = torch.broadcast_shapes(r.shape[:-2], rows.shape[:-1])
        return r.expand(*lead, *r.shape[-2:]).gather(-2, rows.expand(*lead, -1).unsqueeze(-1).expand(
            *lead, -1, r.shape[-1]))
