"""The linear layer of torch, by the fastest of several products."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.fx import Proxy

from structconv.errors import ShapeError
from structconv.nn.conv import ERRORS
from structconv.nn.layer import recorded
from structconv.primitives.products import linear
from structconv.shapes import check_alike, check_tensor

__all__ = ["Linear"]


class Linear(nn.Linear):
    """y = x W^T + b, a drop-in for `torch.nn.Linear`: what `Conv(Identity(), P, Q)` computes, by torch's names.

    In float32 on a CPU the product and its two gradients are each computed by torch's library, by oneDNN or by a native
    kernel, whichever is the fastest for these sizes (`structconv.primitives.products`); elsewhere, under autocast, in
    compiled programs and for subclasses of tensors by torch.

    Shapes: (..., P) -> (..., Q), any floating dtype. 2 M P Q flops for M rows; keeps x and W for the backward pass.

    Raises:
        ConfigError: x is no tensor. ShapeError: its last axis, dtype or device are not those of W.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., P) -> (..., Q)."""
        if type(input) is Proxy:
            return cast(Tensor, recorded(self, input))
        try:
            if type(input) is not Tensor or input.is_nested or type(self.weight) not in (nn.Parameter, Tensor):
                return super().forward(input)
            return linear(input, self.weight, self.bias)
        except ERRORS:
            self._explain(input)
            raise

    def _explain(self, x: Tensor) -> None:
        """Say what was wrong in a call that failed."""
        check_tensor("Linear", "x", x)
        if x.shape[-1:] != self.weight.shape[1:]:
            raise ShapeError("Linear", f"x must have shape (..., P={self.weight.shape[1]})", tuple(x.shape))
        check_alike("Linear", x, self.weight, other_name="the weight")
