"""`RelativeValue`: a vector for each relative position, added to the values of attention."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from structconv import ops
from structconv.bases.base import Basis
from structconv.bases.positions import ClippedShifts
from structconv.kernels.blocked_attention import with_shares
from structconv.shapes import check_positive
from structconv.theta import Theta


class RelativeValue(nn.Module):
    """sum_m a_kmn r[clip(m - n)] for each head: Shaw et al. 2018, eq. 3, the term beside the values.

    It is `attention.outer(ClippedShifts(clip))` applied to ones, with r (2 clip + 1, D) as its weight; D is what one
    head carries (the rank of a `LowRank` weight). Cost beyond the attention's: 2 K N (2 clip + 1) D flops.
    """

    table: nn.Parameter

    def __init__(self, clip: int) -> None:
        super().__init__()
        self.clip = check_positive("RelativeValue", "clip", clip)

    def bound(self, theta: Theta) -> RelativeValue:
        """A copy with parameters for the channels that a head of Theta carries."""
        term = copy.deepcopy(self)
        dim = theta.head_channels
        term.table = nn.Parameter(torch.randn(2 * self.clip + 1, dim) * dim**-0.5)
        return term

    def forward(self, basis: Basis) -> Tensor:
        """(..., K, N, D)."""
        found = with_shares(basis, self.table.new_empty((1, basis.num_inputs, 0)), "clip", self.clip)
        if found is not None:
            return found[1] @ self.table
        shifts = ClippedShifts(self.table, self.clip, basis.num_inputs, basis.num_outputs)
        ones = self.table.new_ones(basis.num_inputs, 1)
        share = basis.outer(shifts).analysis(ones).squeeze(-1)
        share = share.unflatten(-2, (basis.size, 2 * self.clip + 1))
        return share.mT @ self.table

    def added(self, basis: Basis, r: Tensor) -> Tensor:
        """A^T r and the term, (..., K, N, D): in one pass over the scores where a kernel can."""
        found = with_shares(basis, r, "clip", self.clip)
        return ops.apply(basis, r) + self(basis) if found is None else found[0] + found[1] @ self.table
