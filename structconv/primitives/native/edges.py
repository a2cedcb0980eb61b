"""Attention along the edges in plain torch: what the native kernels compute, on any device and in any dtype.

Everything is (K, E) in the order of the edges. `Ends` knows the two ends of each edge; the operators' own
files put scores on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.hashing import Drop, hash_uniform
from structconv.primitives.native.indices import Csr
from structconv.primitives.segments import segment_max, segment_sum

__all__ = ["Ends", "ends_of"]


class Ends:
    """The two ends of every edge, and the two layouts."""

    def __init__(self, by_target: Csr, by_source: Csr) -> None:
        self.by_target, self.by_source = by_target, by_source
        self.num_outputs, self.num_inputs = by_target.indptr.shape[0] - 1, by_source.indptr.shape[0] - 1
        self.source, self.target = ends_of(by_target)

    def softmax_parts(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights p (K, E) and lse (N, K): p_e = exp(s_e - lse_n), zero where all scores into n are -inf."""
        peak = segment_max(scores, self.target, self.num_outputs)
        peak = peak.masked_fill(peak == -torch.inf, 0)
        total = segment_sum(torch.exp(scores - peak[:, self.target]), self.target, self.num_outputs)
        lse = torch.where(total == 0, torch.inf, peak + total.log())
        return self.weights(scores, lse.t()), lse.t().contiguous()

    def weights(self, scores: Tensor, lse_NK: Tensor) -> Tensor:
        """exp(s_e - lse_n)."""
        return torch.exp(scores - lse_NK.t()[:, self.target])

    def kept(self, drop: Drop, heads: int) -> Tensor | None:
        """The factors of the weights: 0 or 1 / (1 - p); None without dropout."""
        if drop.p == 0 or drop.seed is None:
            return None
        head = torch.arange(heads, device=self.source.device).unsqueeze(-1)
        pair = self.source * self.num_outputs + self.target
        uniform = hash_uniform(drop.seed, head // drop.batch_heads, head % drop.batch_heads, pair)
        return (uniform >= drop.p).to(torch.float64) / (1 - drop.p)

    def collect(self, weights: Tensor, x: Tensor) -> Tensor:
        """sum_e w_ke x_mk for every output: (K, E), (M, K, C) -> (N, K, C)."""
        return spmm(self.by_target, self.by_source, weights, x.transpose(0, 1)).transpose(0, 1)

    def spread(self, weights: Tensor, g: Tensor) -> Tensor:
        """sum_e w_ke g_nk for every input: (K, E), (N, K, C) -> (M, K, C)."""
        return spmm(self.by_source, self.by_target, weights, g.transpose(0, 1)).transpose(0, 1)

    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        """<q_nk, k_mk> for every edge: (N, K, D), (M, K, D) -> (K, E)."""
        return sddmm(self.by_target, self.by_source, q.transpose(0, 1), k.transpose(0, 1))


def ends_of(layout: Csr) -> tuple[Tensor, Tensor]:
    """(source, target) of every edge, in the order of the edges."""
    ends = layout.indptr[1:].long()
    steps = ends.new_zeros((layout.indices.shape[0] + 1,)).index_add(0, ends, torch.ones_like(ends))
    row = steps[:-1].cumsum(0)  # as repeat_interleave, by operators that ONNX has
    order = layout.order.long()  # a permutation, so that scatter leaves nothing of what was there
    return row.scatter(0, order, layout.indices.long()), row.scatter(0, order, row)
