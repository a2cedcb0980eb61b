"""`Projection`: the linear maps of scores, x W^T (+ b) for each head, computed late so that a kernel may fuse them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structconv import torch_compat as private
from structconv.arguments import checked
from structconv.bases.tree import Projected
from structconv.primitives.products import linear, split_heads
from structconv.shapes import check_natural, check_positive

__all__ = ["Projection"]


class Projection(nn.Linear):
    """x W^T (+ b): (..., M, P) -> (..., M, K D), the heads side by side. Uniform(+-1/sqrt(P)), as torch's linear layer.

    Any module of the same shapes may take its place, a quantized linear layer or one with an update of low rank.

    Example:

        >>> from structconv.mechanisms import Projection
        >>> Projection(8, heads=2, dim=4)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(self, channels: int, heads: int, dim: int, bias: bool = False) -> None:
        check_natural("Projection", "channels", channels)
        check_natural("Projection", "dim", dim)
        super().__init__(channels, check_positive("Projection", "heads", heads) * dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def by_heads(projection: nn.Module, x: Tensor, heads: int) -> Tensor | Projected:
    """x through a projection, head by head (..., K, M, D): a lazy `Projected` if the projection only multiplies and
    adds, else the tensor."""
    own: Any = projection._parameters
    if (type(projection) is not Projection or not private.all_plain(projection) or torch.compiler.is_compiling()
            or "weight" not in own or "bias" not in own):
        return heads_of(projection, x, heads)
    return Projected(x, own["weight"], own["bias"], heads)


def heads_of(projection: nn.Module, x: Tensor, heads: int) -> Tensor:
    """x through a projection, head by head: (..., M, P) -> (..., K, M, D)."""
    y: Tensor = projection(x)
    return split_heads(y, heads, y.shape[-1] // heads)


def drawn(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """Uniform with variance 1 / fan_in, so that a term of unit-variance channels has unit variance."""
    bound = (3.0 / fan_in) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
