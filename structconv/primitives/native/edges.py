"""Attention along the edges in plain torch: what the native kernels compute, on any device and in any dtype.

Everything is (K, E) in the order of the edges. `Ends` knows the two ends of each edge; the operators' own
files put scores on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native.indices import Csr
from structconv.primitives.segments import segment_softmax
from structconv.primitives.sorting import rows_of

__all__ = ["Ends", "ends_of"]


class Ends:
    """The two ends of every edge, and the two layouts."""

    def __init__(self, by_target: Csr, by_source: Csr) -> None:
        self.by_target, self.by_source = by_target, by_source
        self.num_outputs, self.num_inputs = by_target.indptr.shape[0] - 1, by_source.indptr.shape[0] - 1
        self.source, self.target = ends_of(by_target)

    def softmax(self, scores: Tensor, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
        """The softmax of (K, E) over the edges into an output, after its dropout."""
        weights = segment_softmax(scores, self.target, self.num_outputs)
        if p == 0 or seed is None:
            return weights
        head = torch.arange(len(scores), device=self.source.device).unsqueeze(-1)
        pair = self.source * self.num_outputs + self.target
        uniform = hash_uniform(seed, head // batch_heads, head % batch_heads, pair)
        return weights * ((uniform >= p).to(torch.float64) / (1 - p)).to(weights.dtype)

    def collect(self, weights: Tensor, x: Tensor) -> Tensor:
        """sum_e w_ke x_mk for every output: (K, E), (M, K, C) -> (N, K, C)."""
        return spmm(self.by_target, self.by_source, weights, x.transpose(0, 1)).transpose(0, 1)

    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        """<q_nk, k_mk> for every edge: (N, K, D), (M, K, D) -> (K, E)."""
        return sddmm(self.by_target, self.by_source, q.transpose(0, 1), k.transpose(0, 1))


def ends_of(layout: Csr) -> tuple[Tensor, Tensor]:
    """(source, target) of every edge, in the order of the edges."""
    row = rows_of(layout.indptr[1:], layout.indices.shape[0])
    order = layout.order.long()  # a permutation, so that scatter leaves nothing of what was there
    return row.scatter(0, order, layout.indices.long()), row.scatter(0, order, row)
