"""torch's linear layer, computed by the fastest of several products."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv.arguments import checked
from structconv.errors import ShapeError
from structconv.nn.conv import ERRORS
from structconv.nn.layer import Device, recorded
from structconv.primitives.products import linear
from structconv.shapes import check_alike, check_choice, check_natural, check_tensor

__all__ = ["Linear"]

#: The activations that a layer may have, and True for ReLU.
_ACTIVATIONS: dict[str | None, bool] = {None: False, "relu": True}


def _plain(t: Tensor) -> bool:
    """Return True for a plain, contiguous torch tensor."""
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested


class Linear(nn.Linear):
    """y = x W^T + b, a drop-in for `torch.nn.Linear`.

    Equals `Conv(Identity(), P, Q)`.

    With `activation="relu"` y = max(x W^T + b, 0), which large products compute in place: one table of M Q numbers is
    held and not two.

    In float32 on a CPU the product and its two gradients are each computed by torch's library, by oneDNN or by a native
    kernel, whichever is the fastest for these sizes (`structconv.primitives.products`); elsewhere, under autocast, in
    compiled programs, and for sparse tensors and subclasses by torch.

    Shapes: (..., P) -> (..., Q), any floating dtype. 2 M P Q flops for M rows; keeps x and W for the backward pass, y
    with an activation.

    Args:
        in_features, out_features, bias, device, dtype: as torch's: P, Q, and whether there is a b.
        activation: "relu", or `None` for none.

    Raises:
        ConfigError: another activation, or x is no tensor. ShapeError: its last axis, dtype or device are not W's.

    Example:

        >>> from structconv.nn import Linear
        >>> Linear(8, 4, activation="relu")(torch.randn(5, 8)).min() >= 0
        tensor(True)
    """

    @checked
    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Device = None,
                 dtype: torch.dtype | None = None, *, activation: Literal["relu"] | None = None) -> None:
        for name, features in (("in_features", in_features), ("out_features", out_features)):
            check_natural("Linear", name, features)
        super().__init__(in_features, out_features, bias, device, dtype)
        check_choice("Linear", "activation", activation, tuple(_ACTIVATIONS))
        self.activation: str | None = activation

    def forward(self, input: Tensor) -> Tensor:
        """(..., P) -> (..., Q)."""
        if type(input) is Proxy:
            return cast(Tensor, recorded(self, input))
        try:
            if not (_plain(input) and _plain(self.weight)):
                y = super().forward(input)
                return y.relu() if _ACTIVATIONS[self.activation] else y
            return linear(input, self.weight, self.bias, relu=_ACTIVATIONS[self.activation])
        except (*ERRORS, KeyError):
            self._explain(input)
            raise

    def _explain(self, x: Tensor) -> None:
        """Raise the error of a call that failed."""
        check_choice("Linear", "activation", self.activation, tuple(_ACTIVATIONS))
        check_tensor("Linear", "x", x)
        if self.weight.dim() == 2 and x.shape[-1:] != self.weight.shape[1:]:
            raise ShapeError("Linear", f"x must have shape (..., P={self.weight.shape[1]})", tuple(x.shape))
        check_alike("Linear", x, self.weight, other_name="the weight")

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.activation is None else f", activation={self.activation!r}")
