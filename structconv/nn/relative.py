"""`RelativeValue`: a vector for each relative position, added to the values of attention."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from structconv.nn.layer import Layer
from structconv.shapes import check_natural
from structconv.weights import Weight

__all__ = ["RelativeValue"]


class RelativeValue(Layer):
    """sum_m a_kmn r[clip(m - n)] for each head: Shaw et al. 2018, eq. 3, the term beside the values.

    It is `attention.outer(ClippedShifts(clip))` applied to ones, with r (2 clip + 1, D) as its weight; D is what one
    head carries (the rank of a `LowRank` weight). Cost beyond the attention's: 2 K N (2 clip + 1) D flops.

    Example:

        >>> from structconv import Conv, DotProduct, LowRank
        >>> from structconv.nn import RelativeValue
        >>> layer = Conv(DotProduct(2, 4).softmax(), 8, 8, weight=LowRank(4), relative_value=RelativeValue(clip=3))
        >>> layer(torch.randn(6, 8)).shape
        torch.Size([6, 8])
    """

    table: nn.Parameter
    fixed = frozenset(("clip",))
    is_part = True

    def __init__(self, clip: int) -> None:
        super().__init__()
        self.clip = check_natural("RelativeValue", "clip", clip)

    def bound(self, theta: Weight) -> RelativeValue:
        """A copy with parameters for the channels that a head of Theta carries."""
        term = copy.deepcopy(self)
        dim = theta.head_channels
        term.table = nn.Parameter(torch.randn(2 * self.clip + 1, dim) * dim**-0.5)
        return term

    def forward(self) -> Tensor:
        """r, (2 clip + 1, D)."""
        return self.table
