"""Positional encodings that are added to entries: sinusoidal for any number of axes, learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv.arguments import checked
from structconv.derived import values_known
from structconv.errors import ConfigError, ShapeError
from structconv.shapes import broadcast, check_entries, check_finite, check_positive, check_tensor

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

    Raises:
        ConfigError: positions for a grid, whose points have their own.
        ShapeError: x is not floating (..., M, P), or the positions are not those of its entries.

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
        owner, grid = "SinusoidalEncoding", self.shape
        _check(owner, x, positions, self.channels, None if grid is None else math.prod(grid))
        if self.shape is None:
            positions = _positions_of(x, positions).to(torch.float32).unsqueeze(-1)
        else:
            if isinstance(positions, Tensor) or positions != 0:
                raise ConfigError(owner, f"positions must be absent for a grid of shape={grid}", positions)
            axes = [torch.arange(size, device=x.device, dtype=torch.float32) for size in self.shape]
            positions = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return x + sinusoidal(positions, self.channels, self.base).to(x.dtype)


class LearnedEncoding(nn.Module):
    """x + e with a trained vector e_m for each of at most `length` positions.

    Raises:
        ShapeError: x is not floating (..., M, P), or a position is not in [0, length).

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
        if type(x) is not Proxy:  # torch.fx records what follows
            length, channels = self.embedding.shape
            _check("LearnedEncoding", x, positions, channels)
            _check_range(length, x, positions)
        if not isinstance(positions, Tensor):
            return x + self.embedding[positions : positions + x.shape[-2]]
        return x + self.embedding[positions]


def _check(owner: str, x: Tensor, positions: int | Tensor, channels: int, entries: int | None = None) -> None:
    """Raise an error unless x is floating (..., M, P), and `positions` that of its first entry or those of all."""
    check_tensor(owner, "x", x)
    check_entries(owner, x, entries=entries, channels=channels)
    if not (x.is_floating_point() or x.is_complex()):
        raise ShapeError(owner, "x must be floating", x.dtype, "Convert it with .float().")
    if isinstance(positions, Tensor):
        try:
            fits = positions.shape[-1:] == x.shape[-2:-1] and bool(broadcast(positions.shape, x.shape[:-1]))
        except RuntimeError:
            fits = False
        if not fits:
            raise ShapeError(owner, f"positions must have shape (..., M={x.shape[-2]}), one for each entry of x",
                             tuple(positions.shape))
    elif isinstance(positions, bool) or not isinstance(positions, (int, torch.SymInt)):
        raise ConfigError(owner, "positions must be that of the first entry, an integer, or a tensor of those of all",
                          repr(positions))


def _check_range(length: int, x: Tensor, positions: int | Tensor) -> None:
    """Raise an error if a position is known to have no learned vector; compilers may not know it."""
    first, last = positions, positions
    if not isinstance(positions, Tensor):
        last = positions + x.shape[-2] - 1
    elif positions.dtype not in (torch.int64, torch.int32):
        raise ConfigError("LearnedEncoding", "positions must be integers, int32 or int64", positions.dtype)
    elif not (positions.numel() and positions.is_cpu and values_known(positions)):
        return
    else:
        first, last = int(positions.min()), int(positions.max())
    if _is_true(first < 0) or _is_true(last >= length):
        raise ShapeError("LearnedEncoding", f"positions must be in [0, length={length})",
                         f"{int(first)} to {int(last)}", "Learn more positions: length=.")


def _is_true(condition: Any) -> bool:
    """Return True if the condition holds; False also if a compiler learns it only when the program runs."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports SymPy
    return bool(guard_or_false(condition))


def _positions_of(x: Tensor, positions: int | Tensor) -> Tensor:
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions, positions + x.shape[-2], device=x.device)


