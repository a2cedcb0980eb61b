"""Tensors in an expression as modules: `Mixing` combines heads by a matrix, `Factor` multiplies them by numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError, ShapeError
from structconv.shapes import check_positive

__all__ = ["Factor", "Mixing"]


class Mixing(nn.Module):
    """W (K, J) over the heads of an expression: a number J for a learned one, normal with variance 1/K, or a matrix of
    K rows, trained if it is a parameter."""

    _role = "mixing"

    def __init__(self, heads: Any, size: int) -> None:
        super().__init__()
        self.drawn = not isinstance(heads, Tensor)
        if self.drawn:
            check_positive("mix", "heads", heads)
        elif not heads.is_floating_point():
            raise ConfigError("mix", "the matrix must be floating", str(heads.dtype), "Convert it with .float().")
        elif heads.dim() != 2 or heads.shape[0] != size:
            raise ShapeError("mix", f"the matrix must have shape (K={size}, J)", tuple(heads.shape))
        self.shape = (size, heads if self.drawn else heads.shape[1])
        if self.drawn or isinstance(heads, nn.Parameter):
            self.register_parameter("mixing", None if self.drawn else heads)
        else:
            self.register_buffer("mixing", heads)

    def bind(self, channels: Any) -> None:
        """Draw W again; a matrix from the user stays."""
        if self.drawn:
            self.mixing = nn.Parameter(torch.empty(self.shape))
            nn.init.normal_(self.mixing, std=self.shape[0] ** -0.5)

    def forward(self) -> Tensor:
        """W."""
        mixing: Tensor = self.mixing
        return mixing

    def extra_repr(self) -> str:
        """K and J."""
        return f"{self.shape[0]} -> {self.shape[1]}"


class Factor(nn.Module):
    """A tensor of numbers that moves, saves and loads with its expression: a buffer, or a parameter if it was one."""

    def __init__(self, factor: Tensor, role: str = "scale") -> None:
        super().__init__()
        #: The name that a layer has for it.
        self._role = role
        if isinstance(factor, nn.Parameter):
            self.factor: Tensor = factor
        else:
            self.register_buffer("factor", factor)

    def forward(self) -> Tensor:
        """The numbers."""
        return self.factor
