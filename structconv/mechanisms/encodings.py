"""Positional encodings that are added to entries: sinusoidal for any number of axes, learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structconv.arguments import checked
from structconv.errors import ConfigError
from structconv.shapes import check_finite, check_positive

__all__ = ["LearnedEncoding", "SinusoidalEncoding", "sinusoidal"]


def sinusoidal(positions: Tensor, channels: int, base: float = 10000.0) -> Tensor:
    """p[i, 2j] = sin(i / base^(2j/d)), p[i, 2j+1] = cos of the same (Vaswani et al. 2017, section 3.5).

    Args:
        positions: a vector for one axis, or (..., A) for A axes, among which the channels are split evenly; floating
            or integer.
        channels: d, even on each axis. base: 10000 in the paper.

    Returns:
        (..., channels) in float32, or in the dtype of floating positions.

    Example:

        >>> from structconv.mechanisms import sinusoidal
        >>> sinusoidal(torch.arange(3), 2)
        tensor([[ 0.0000,  1.0000],
                [ 0.8415,  0.5403],
                [ 0.9093, -0.4161]])
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
    """x + p with p of `sinusoidal`, for entries of a sequence or, with `shape`, of a grid of any order.

    Example:

        >>> from structconv.mechanisms import SinusoidalEncoding
        >>> SinusoidalEncoding(8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    @checked
    def __init__(self, channels: int, shape: tuple[int, ...] | None = None, base: float = 10000.0) -> None:
        super().__init__()
        self.channels, self.shape = check_positive("SinusoidalEncoding", "channels", channels), shape
        self.base = check_finite("SinusoidalEncoding", "base", base, above=0)

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """(..., M, P) -> (..., M, P); of a sequence the place of the first entry may be given, or those of all."""
        if self.shape is None:
            positions = _placed(x, positions).to(torch.float32).unsqueeze(-1)
        else:
            axes = [torch.arange(size, device=x.device, dtype=torch.float32) for size in self.shape]
            positions = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return x + sinusoidal(positions, self.channels, self.base).to(x.dtype)


class LearnedEncoding(nn.Module):
    """x + e with a trained vector e_m for each of at most `length` positions.

    Example:

        >>> from structconv.mechanisms import LearnedEncoding
        >>> LearnedEncoding(16, 8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    @checked
    def __init__(self, length: int, channels: int, *, device: torch.device | str | int | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_positive("LearnedEncoding", "length", length)
        check_positive("LearnedEncoding", "channels", channels)
        self.embedding = nn.Parameter(torch.empty(length, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors again, in place."""
        nn.init.normal_(self.embedding, std=0.02)

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """(..., M, P) -> (..., M, P), at positions below `length`, counted from the first entry or given."""
        if not isinstance(positions, Tensor):
            return x + self.embedding[positions : positions + x.shape[-2]]
        return x + self.embedding[positions]


def _placed(x: Tensor, positions: int | Tensor) -> Tensor:
    """Return the position of each entry."""
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions, positions + x.shape[-2], device=x.device)


