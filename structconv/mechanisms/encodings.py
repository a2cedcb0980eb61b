"""Positional encodings: sinusoidal for any number of axes, learnt, rotary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError
from structconv.shapes import check_positive

__all__ = ["LearntEncoding", "Rotary", "SinusoidalEncoding", "sinusoidal"]


def sinusoidal(positions: Tensor, channels: int, base: float = 10000.0) -> Tensor:
    """p[i, 2j] = sin(i / base^(2j/d)), p[i, 2j+1] = cos of the same (Vaswani et al. 2017, section 3.5).

    Args:
        positions: a vector for one axis, or (..., A) for A axes, among which the channels are split evenly; floating
            or integer.
        channels: d, even on each axis. base: 10000 in the paper.

    Returns:
        (..., channels) in float32, or in the dtype of floating positions.
    """
    coordinates = positions.unsqueeze(-1) if positions.dim() == 1 else positions
    axes = coordinates.shape[-1]
    if channels % (2 * axes):
        raise ConfigError("sinusoidal", f"channels must be a multiple of 2 x {axes} axes", channels)
    dtype = positions.dtype if positions.is_floating_point() else torch.get_default_dtype()
    width = channels // axes
    rate = base ** (-torch.arange(0, width, 2, dtype=dtype, device=positions.device) / width)
    angle = coordinates.to(dtype).unsqueeze(-1) * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-3)


class SinusoidalEncoding(nn.Module):
    """x + p with p of `sinusoidal`, for entries of a sequence or, with `shape`, of a grid of any order."""

    def __init__(self, channels: int, shape: tuple[int, ...] | None = None, base: float = 10000.0) -> None:
        super().__init__()
        self.channels, self.shape, self.base = check_positive("SinusoidalEncoding", "channels", channels), shape, base

    def forward(self, x: Tensor) -> Tensor:
        """(..., M, P) -> (..., M, P)."""
        if self.shape is None:
            positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32).unsqueeze(-1)
        else:
            axes = [torch.arange(size, device=x.device, dtype=torch.float32) for size in self.shape]
            positions = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return x + sinusoidal(positions, self.channels, self.base).to(x.dtype)


class LearntEncoding(nn.Module):
    """x + e with a trained vector e_m for each of at most `length` positions."""

    def __init__(self, length: int, channels: int, *, device: torch.device | str | int | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_positive("LearntEncoding", "length", length)
        check_positive("LearntEncoding", "channels", channels)
        self.embedding = nn.Parameter(torch.empty(length, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew, in place."""
        nn.init.normal_(self.embedding, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(..., M, P) -> (..., M, P), M at most `length`."""
        return x + self.embedding[: x.shape[-2]]


class Rotary(nn.Module):
    """Rotates channel pairs (2j, 2j+1) of entry i by the angle i / base^(2j/d) (Su et al. 2021, eq. 34).

    Scores of rotated queries and keys depend on the offset of their positions alone.
    """

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, t: Tensor) -> Tensor:
        """(..., M, D) -> (..., M, D), D even."""
        entries, dim = t.shape[-2:]
        if dim % 2:
            raise ConfigError("Rotary", "the channels of a head must be even", dim)
        rate = self.base ** (-torch.arange(0, dim, 2, device=t.device, dtype=torch.float64) / dim)
        angle = torch.arange(entries, device=t.device, dtype=torch.float64).unsqueeze(-1) * rate
        cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
        even, odd = t[..., 0::2], t[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
