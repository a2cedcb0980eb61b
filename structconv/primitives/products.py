"""Products with a narrow matrix, which general libraries compute at a fraction of their rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["product"]

#: Columns from which a product runs at full rate, and up to which a convolution beats a padded product.
FULL_WIDTH, CONVOLVED_WIDTH = 16, 8
#: Numbers of x below which the call itself is what costs.
LEAST_NUMBERS = 1 << 14
_CONVOLVES = torch.backends.mkldnn.is_available()


def product(x: Tensor, w: Tensor) -> Tensor:
    """x w, (..., M, P) and (P, Q) -> (..., M, Q), contiguous where it is not computed by `x @ w` itself.

    In float32 on a CPU a product with 2 to 15 columns reaches 4 to 20 GFLOP/s a core in MKL on AMD processors, where
    one with 16 reaches 70; its gradient in w is slower still. Such a w is filled up to 16 columns with zeros, forward
    and backward; where x needs no gradient and Q <= 8, the product is a 1x1 convolution over channels-last pixels,
    which oneDNN computes. Two to five times faster; any other product is `x @ w`. Holds 16 M numbers at most.
    """
    columns = w.shape[-1]
    if not 1 < columns < FULL_WIDTH or w.dtype != torch.float32 or x.dtype != torch.float32 or w.dim() != 2:
        return x @ w
    if w.device.type != "cpu":
        return x @ w
    if not torch.compiler.is_compiling():  # a traced program shall hold for any number of entries
        if x.numel() < LEAST_NUMBERS:
            return x @ w
        if columns <= CONVOLVED_WIDTH and _CONVOLVES and not (x.requires_grad and torch.is_grad_enabled()):
            return _convolved(x, w)
    return (x @ functional.pad(w, (0, FULL_WIDTH - columns)))[..., :columns].contiguous()


def _convolved(x: Tensor, w: Tensor) -> Tensor:
    pixels = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)
    y = functional.conv2d(pixels, w.t().unsqueeze(-1).unsqueeze(-1))
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], w.shape[-1])
