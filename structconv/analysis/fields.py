"""Receptive fields: the inputs that an output depends on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["receptive_field"]


def receptive_field(fn: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The largest number of input entries that any one output entry of `fn` depends on.

    An input m counts for an output n when the gradient of some channel of y_n with respect to x_m is not zero at `x`.
    The output's channels are first combined at random, so that two of them do not cancel. A dependence with slope zero
    at `x`, such as through an inactive ReLU, is not counted: use smooth functions.

    Args:
        fn: (M, P) -> (N, Q), differentiable.
        x: (M, P), the point at which to differentiate; use float64.

    Cost: N backward passes.

    Example: two 3x3 convolutions on a grid of 7 x 7 pixels.

        >>> from structconv import Conv, Cuboid, Grid
        >>> from structconv.analysis.fields import receptive_field
        >>> grid, first, second = Grid((7, 7)), *(Conv(Cuboid((3, 3)), 1, 1).double() for _ in range(2))
        >>> x = torch.randn(49, 1, dtype=torch.float64)
        >>> receptive_field(lambda x: second(first(x, structure=grid), structure=grid), x)
        25
    """
    x = x.detach().clone().requires_grad_()
    y = fn(x)
    generator = torch.Generator(y.device).manual_seed(0)
    weight = torch.randn(y.shape[-1], dtype=y.dtype, device=y.device, generator=generator)
    outputs = y @ weight
    counts = [torch.autograd.grad(output, x, retain_graph=True)[0].abs().sum(-1).count_nonzero() for output in outputs]
    return int(max(counts, default=torch.tensor(0)))
